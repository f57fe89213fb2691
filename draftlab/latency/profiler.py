"""Measure the latency of forward passes by width (tokens fed per row), batch size and context. Models take turns.

B rows (texts of a batch), T new tokens, V vocab. Weights may be random, because latency does not depend on their
values. The passes of a head are timed like the passes of a decoder.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.engine.clocks import Clock, clock_for
from draftlab.engine.drafters.ngram import TextDrafter
from draftlab.engine.drafters.states import HeadPasses
from draftlab.engine.generate import speculative_decode
from draftlab.engine.timing import Task, memory_sweep, summarize, time_interleaved
from draftlab.latency.cost_model import Point, SteadyPoint
from draftlab.model import Mode
from draftlab.model.decoder import Decoder, KVCache
from draftlab.model.llama import Llama
from draftlab.model.modes import with_mode
from draftlab.model.shape import Shape
from draftlab.results.score import Latency
from draftlab.sampling import SamplingParams


class RandomWeights(Mapping[str, Tensor]):
    """Random weights of a shape, by name. Each access draws a new tensor, so that no tensor stays in memory here."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.axes, self.dtype, self.device = shape, shape.axes(), dtype, device

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The passes that are timed for each model."""

    widths: Sequence[int]  # tokens fed
    batches: Sequence[int]
    contexts: Sequence[int]
    prompts: Sequence[int]  # lengths of prefills
    repeats: int

    @property
    def capacity(self) -> int:
        return max([max(self.contexts) + max(self.widths), *self.prompts])


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyCurves:
    """The measured latencies of one model, as fields of a cost_model.Profile."""

    forward: list[Point]
    steady: list[SteadyPoint]
    prefill: list[Latency]
    host: list[Latency]


def measure(
    models: Mapping[str, Decoder],
    grid: Grid,
    *,
    mode: Mode,
    clock: Clock,
    advance: Callable[[int], None] = lambda rounds: None,
) -> dict[str, LatencyCurves]:
    """Measure the latency curves of each model. advance: Function to call with the number of finished rounds.

    Raises:
        UserError: A model has a shorter context than the grid needs.
    """
    models = {
        name: with_mode(model, mode) if isinstance(model, Llama) else model
        for name, model in models.items()
    }
    passes = {name: dict(_passes(model, grid)) for name, model in models.items()}
    tasks: dict[tuple[str, int, At], tuple[Task, Task]] = {}
    for name, by_place in passes.items():
        other = _other_work(name, models, passes)
        tasks |= {(name, 0, at): (other, run) for at, run in by_place.items()}
        model = models[name]
        chained = (
            dict(_passes(model.of_own_states(), grid))
            if isinstance(model, HeadPasses)
            else by_place
        )
        ones = [(at, run) for at, run in chained.items() if at[0] == 1]
        tasks |= {
            (name, after, at): (_lead_in(other, run, after), run)
            for after in AFTER
            for at, run in ones
        }
    times = time_interleaved(tasks, repeats=grid.repeats, clock=clock, advance=advance)
    curves: dict[str, LatencyCurves] = {}
    for name, model in models.items():
        curves[name] = LatencyCurves(
            forward=[
                _point(times, name, 0, at)
                for at in itertools.product(grid.widths, grid.batches, grid.contexts)
            ],
            steady=[
                SteadyPoint(**_point(times, name, after, (1, *at)).model_dump(), after=after)
                for after in AFTER
                for at in itertools.product(grid.batches, grid.contexts)
            ],
            prefill=[summarize(length, times[name, 0, (length, 1, 0)]) for length in grid.prompts],
            host=[summarize(width, host_times(model, width, grid, clock)) for width in grid.widths],
        )
    return curves


def measure_latency(
    models: dict[str, Llama],
    *,
    widths: list[int],
    context: int,
    passes: int,
    mode: Mode = "eager",
    clock: Clock | None = None,
    batch: int = 1,
) -> dict[str, list[Latency]]:
    """Measure the latency of forward passes of each width after `context` cached tokens. Models take turns.

    Args:
        passes: Number of timed passes of each width.
        clock: Default: the clock of the device.
    """
    grid = Grid(widths=widths, batches=[batch], contexts=[context], prompts=[], repeats=passes)
    tasks = {
        (name, at): (lambda: None, run)
        for name, model in models.items()
        for at, run in _passes(with_mode(model, mode), grid)
    }
    times = time_interleaved(
        tasks, repeats=passes, clock=clock or clock_for(next(iter(models.values())).device)
    )
    return {
        name: [summarize(width, times[name, (width, batch, context)]) for width in widths]
        for name in models
    }


def host_times(model: Decoder, width: int, grid: Grid, clock: Clock) -> list[float]:
    """Return the milliseconds that several greedy steps spend outside forward passes, one number per step.

    Each step verifies `width` tokens of one text.
    """
    k, longest = width - 1, (grid.repeats + 2) * width  # enough if all drafted tokens are accepted
    sampling = SamplingParams(max_tokens=min(longest, model.context - width))
    steps = speculative_decode(model, RepeatLastToken(), [[1]], k, sampling, clock)
    return [
        1e3 * step.host_seconds
        for step in itertools.islice(steps, 1, grid.repeats + 1)
        if step.drafted == k
    ]


class RepeatLastToken(TextDrafter):
    """A drafter that repeats the last token. Drafting takes no time, so that only the engine's own work is timed."""

    def draft(self, text: list[int], count: int) -> list[int]:
        return text[-1:] * count


def _point(
    times: Mapping[tuple[str, int, At], list[float]], name: str, after: int, at: At
) -> Point:
    width, batch, context = at
    return Point(
        **summarize(width, times[name, after, at]).model_dump(), batch=batch, context=context
    )


def _passes(model: Decoder, grid: Grid) -> Iterator[tuple[At, Task]]:
    """Yield each pass of the grid with its (width, batch, context). A prefill is a pass of one text with context 0."""
    for batch in grid.batches:
        caches = _caches(model, batch, grid)
        for width, context in itertools.product(grid.widths, grid.contexts):
            yield (width, batch, context), _pass(model, caches[context], width, context, width)
    cache = model.new_cache(1, grid.capacity)
    for length in grid.prompts:
        yield (length, 1, 0), _pass(model, cache, length, 0, 1)


def _caches(model: Decoder, batch: int, grid: Grid) -> dict[int, KVCache]:
    """Return a KV cache for each context. Only caches of transformers are filled with tokens."""
    if isinstance(model, Llama):
        return dict.fromkeys(grid.contexts, model.new_cache(batch, grid.capacity))
    caches = {context: model.new_cache(batch, grid.capacity) for context in grid.contexts}
    for context, cache in caches.items():
        model.forward(
            torch.ones(batch, context, dtype=torch.long, device=model.device), cache, last=1
        )
    return caches


def _pass(model: Decoder, cache: KVCache, width: int, context: int, last: int) -> Task:
    ids = torch.ones(len(cache.used), width, dtype=torch.long, device=model.device)

    def run() -> Tensor:
        cache.used = [context] * len(ids)
        return model.forward(ids, cache, last)

    return run


def _other_work(
    name: str, models: Mapping[str, Decoder], passes: Mapping[str, Mapping[At, Task]]
) -> Task:
    """Return the untimed work before a timed pass: a pass of the largest other model.

    If there is no other model, the work is a sweep through memory.
    """
    others = [other for other in models if other != name]
    if others:
        return next(
            iter(passes[max(others, key=lambda other: models[other].weight_bytes)].values())
        )
    return memory_sweep(models[name].weight_bytes, torch.float32, models[name].device)[1]


def _lead_in(other: Task, run: Task, after: int) -> Task:
    """Return the untimed work before a timed pass: `other` once, and then `run` as many times as `after` says."""

    def several() -> None:
        other()
        for _ in range(after):
            run()

    return several
