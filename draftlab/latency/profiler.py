"""Measure the latency of forward passes by width (tokens fed per row), batch size and context. Models take turns.

B rows (texts of a batch), T new tokens, V vocab. Weights may be random, because latency does not depend on their
values. The passes of a head are timed like the passes of a decoder.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftlab.drafters.lookup import TextDrafter
from draftlab.drafters.passes import HeadPasses
from draftlab.engine.clocks import Clock
from draftlab.engine.generate import speculative_decode
from draftlab.engine.timing import Chain, Rounds, Task, memory_sweep, summarize
from draftlab.latency.cost_model import Point, SteadyPoint
from draftlab.model.decoder import Decoder, KVCache
from draftlab.model.llama import Llama
from draftlab.model.shape import Shape
from draftlab.results.score import Latency
from draftlab.sampling import SamplingParams


class RandomWeights(Mapping[str, Tensor]):
    """Random weights of a shape, by name. Each access draws a new tensor, so that no tensor stays in memory here."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.axes = shape.axes()
        self.dtype = dtype
        self.device = device

    def __getitem__(self, name: str) -> Tensor:
        size = self.shape.dims(self.axes[name])
        if len(size) == 1:
            return torch.ones(size, dtype=self.dtype, device=self.device)
        return torch.randn(size, dtype=self.dtype, device=self.device).mul_(size[-1] ** -0.5)

    def __iter__(self) -> Iterator[str]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)


def random_model(shape: Shape, dtype: torch.dtype, device: torch.device, context: int) -> Llama:
    """Return a model of a shape with random weights. Its passes take as long as those of a trained model.

    context: Longest sequence that the model can read.
    """
    frequencies = 10000.0 ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    model = Llama(shape, RandomWeights(shape, dtype, device), frequencies, 1.0, 1e-6, context)
    if shape.draft_vocab is not None:
        model.trim_head(list(range(shape.draft_vocab)))
    return model


# numbers of passes of the same model before a timed pass; after the largest number, processor caches are steady
AFTER = (1, 2, 3, 8)
At = tuple[int, int, int]  # a point of the grid: width, batch, context
# name of a model, number of its passes before this one, and point of the grid
Key = tuple[str, int, At]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The passes of a model that are timed."""

    widths: Sequence[int]  # tokens fed
    batches: Sequence[int]
    contexts: Sequence[int]
    prompts: Sequence[int]  # lengths of prefills
    repeats: int
    # for passes over one token: numbers of passes of the same model before the timed pass
    after: Sequence[int] = AFTER
    last: int = 0  # number of fed tokens after which logits are computed; 0: all of them

    @property
    def capacity(self) -> int:
        return max([max(self.contexts) + max(self.widths), *self.prompts])


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyCurves:
    """The measured latencies of one model, as fields of a cost_model.Profile. host: [] if it was not measured."""

    forward: list[Point]
    steady: list[SteadyPoint]
    prefill: list[Latency]
    host: list[Latency]


class PassTimer:
    """Times the passes of several models in turns, a round at a time, where they occur in speculative decoding.

    A pass of the grid follows a pass of another model, as the first pass of a step does. Passes of the same model
    follow it, as in a step that drafts several tokens, and as in plain decoding.
    """

    def __init__(self, models: Mapping[str, tuple[Decoder, Grid]], clock: Clock) -> None:
        """Prepare the passes of each model. models: Decoders in the mode in which they run, with their grids.

        Raises:
            UserError: A model has a shorter context than its grid needs.
        """
        self.grids = {name: grid for name, (_, grid) in models.items()}
        decoders = {name: model for name, (model, _) in models.items()}
        passes = {name: dict(_passes(*each)) for name, each in models.items()}
        chains: list[Chain[Key]] = []
        for name, (model, grid) in models.items():
            other = _other_work(name, decoders, passes)
            following = passes[name]
            if isinstance(model, HeadPasses):
                following = dict(_passes(model.of_own_states(), grid))
            for at, run in passes[name].items():
                chain: list[tuple[Key | None, Task]] = [(None, other), ((name, 0, at), run)]
                if at[0] == 1 and at[2] in grid.contexts:  # not a prefill
                    chain += _following(name, at, following[at], grid.after)
                chains.append(chain)
        self.rounds = Rounds(chains, clock)

    def curves(self) -> dict[str, LatencyCurves]:
        """Return the latencies of each model in the rounds so far."""
        return {name: self._curves(name, grid) for name, grid in self.grids.items()}

    def _curves(self, name: str, grid: Grid) -> LatencyCurves:
        places = list(itertools.product(grid.batches, grid.contexts))

        def point(after: int, at: At) -> Point:
            width, batch, context = at
            latency = summarize(width, self.rounds.times[name, after, at])
            return Point(**latency.model_dump(), batch=batch, context=context)

        return LatencyCurves(
            forward=[point(0, (width, *place)) for width in grid.widths for place in places],
            steady=[
                SteadyPoint(**point(after, (1, *place)).model_dump(), after=after)
                for after in grid.after
                for place in places
            ],
            prefill=[summarize(length, self.rounds.times[name, 0, (length, 1, 0)]) for length in grid.prompts],
            host=[],
        )


def measure(
    models: Mapping[str, Decoder],
    grid: Grid,
    *,
    clock: Clock,
    advance: Callable[[int], None] = lambda rounds: None,
) -> dict[str, LatencyCurves]:
    """Measure the latency curves of each model, and the time of its steps outside the passes.

    Args:
        models: Decoders in the mode in which they run, by name.
        advance: Function to call with the number of finished rounds.

    Raises:
        UserError: A model has a shorter context than the grid needs.
    """
    curves = measure_passes(models, grid, clock=clock, advance=advance)
    for name, measured in curves.items():
        host = [summarize(width, host_times(models[name], width, grid, clock)) for width in grid.widths]
        curves[name] = replace(measured, host=host)
    return curves


def measure_passes(
    models: Mapping[str, Decoder],
    grid: Grid,
    *,
    clock: Clock,
    advance: Callable[[int], None] = lambda rounds: None,
) -> dict[str, LatencyCurves]:
    """Measure the latency curves of each model without the time outside passes. The arguments are those of measure."""
    timer = PassTimer({name: (model, grid) for name, model in models.items()}, clock)
    timer.rounds.measure(grid.repeats, advance)
    return timer.curves()


def host_times(model: Decoder, width: int, grid: Grid, clock: Clock) -> list[float]:
    """Return the milliseconds that several greedy steps spend outside forward passes, one number per step.

    Each step verifies `width` tokens of one text.
    """
    k = width - 1
    longest = (grid.repeats + 2) * width  # enough if all drafted tokens are accepted
    sampling = SamplingParams(max_tokens=min(longest, model.context - width))
    steps = speculative_decode(model, RepeatLastToken(), [[1]], k, sampling, clock)
    return [1e3 * step.host_seconds for step in itertools.islice(steps, 1, grid.repeats + 1) if step.drafted == k]


class RepeatLastToken(TextDrafter):
    """A drafter that repeats the last token. Drafting takes no time, so that only the engine's own work is timed."""

    def draft(self, text: list[int], count: int) -> list[int]:
        return text[-1:] * count


def _passes(model: Decoder, grid: Grid) -> Iterator[tuple[At, Task]]:
    """Yield each pass of the grid with its (width, batch, context). A prefill is a pass of one text with context 0."""
    for batch in grid.batches:
        caches = _caches(model, batch, grid)
        for width, context in itertools.product(grid.widths, grid.contexts):
            last = min(width, grid.last or width)
            yield (width, batch, context), _pass(model, caches[context], width, context, last)
    cache = model.new_cache(1, grid.capacity)
    for length in grid.prompts:
        yield (length, 1, 0), _pass(model, cache, length, 0, 1)


def _caches(model: Decoder, batch: int, grid: Grid) -> dict[int, KVCache]:
    """Return a KV cache for each context. Only caches of transformers are filled with tokens."""
    if isinstance(model, Llama):
        return dict.fromkeys(grid.contexts, model.new_cache(batch, grid.capacity))
    caches = {context: model.new_cache(batch, grid.capacity) for context in grid.contexts}
    for context, cache in caches.items():
        model.forward(torch.ones(batch, context, dtype=torch.long, device=model.device), cache, last=1)
    return caches


def _pass(model: Decoder, cache: KVCache, width: int, context: int, last: int) -> Task:
    ids = torch.ones(len(cache.used), width, dtype=torch.long, device=model.device)

    def run() -> Tensor:
        cache.used = [context] * len(ids)
        return model.forward(ids, cache, last)

    return run


def _other_work(name: str, models: Mapping[str, Decoder], passes: Mapping[str, Mapping[At, Task]]) -> Task:
    """Return the untimed work before a timed pass: a pass of the largest other model.

    If there is no other model, the work is a sweep through memory.
    """
    others = [other for other in models if other != name]
    if others:
        return next(iter(passes[max(others, key=lambda other: models[other].weight_bytes)].values()))
    return memory_sweep(models[name].weight_bytes, torch.float32, models[name].device)[1]


def _following(name: str, at: At, run: Task, after: Sequence[int]) -> Iterator[tuple[Key | None, Task]]:
    """Yield passes that follow the first pass of a chain, with keys for those that come after so many passes."""
    for number in range(1, max(after, default=0) + 1):
        yield (name, number, at) if number in after else None, run
