"""Measure what a pass of a model costs: every width, batch and context, models taking turns, once all is warm.

B rows, T new tokens, V vocab. Weights may be random: what a pass costs does not depend on what they are.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from draftlab import provenance
from draftlab.console import heartbeat, note, progress
from draftlab.engine.generate import Clock, Draft, clock_for, decode, speculative_decode
from draftlab.errors import UserError
from draftlab.latency.cost_model import Mode, Point, Profile, SteadyPoint, active_params, write_profile
from draftlab.latency.machine_state import device_name, steady_clock
from draftlab.model import checkpoint, llama, memory
from draftlab.model.decoder import Decoder, KVCache, check_mode, load, with_mode
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import Llama
from draftlab.model.shape import Shape
from draftlab.model.size import ApproximateSize, read_size
from draftlab.results.score import Latency
from draftlab.sampling import SamplingParams

WARM_ROUNDS = (3, 12)  # before anything counts: at least, at most
STEADY = 0.05  # warm is a round that takes as long as the one before, within this share
AGAIN = (1, 2, 3, 8)  # like passes before one; behind the last number caches hold nothing of what ran earlier
BUFFER_BYTES = 1 << 30  # most that the ceiling of bandwidth is measured on
SQUARE = {"cpu": 1024, "cuda": 8192}  # sides of the matrices that show the ceiling of arithmetic

COLUMNS = 4096  # of a matrix that is read as a whole

Task = Callable[[], object]
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What to measure of each model."""

    widths: Sequence[int]
    batches: Sequence[int]
    contexts: Sequence[int]
    prompts: Sequence[int]  # lengths of prefills
    repeats: int

    @property
    def capacity(self) -> int:
        return max([max(self.contexts) + max(self.widths), *self.prompts])


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyCurves:
    """What was measured of one model: fields of a cost.Profile."""

    forward: list[Point]
    steady: list[SteadyPoint]
    prefill: list[Latency]
    host: list[Latency]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Checkpoints, or shapes to be filled with random weights, by name; and how to measure them."""

    subjects: dict[str, Path | Shape]
    grid: Grid
    mode: Mode
    dtype: torch.dtype
    device: torch.device
    threads: int | None
    command: str
    device_map: str | None = None

    def sizes(self) -> dict[str, Shape | ApproximateSize]:
        return {n: s if isinstance(s, Shape) else read_size(s) for n, s in self.subjects.items()}


class RandomWeights(Mapping[str, Tensor]):
    """Weights of a shape, drawn on the device each time they are asked for, so that none is held twice."""

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


def check(plan: Plan) -> None:
    """Fail before anything is loaded.

    Raises:
        UserError: a mode that does not run so, a shape that the engine does not compute, or a model that only
            transformers runs in another mode than eager.
    """
    check_mode(plan.mode, plan.device, plan.dtype)
    if plan.device_map is not None and plan.mode != "eager":
        raise UserError("--device-map has transformers run the models: take --mode eager")
    for name, subject in plan.subjects.items():
        if isinstance(subject, Path) and plan.mode != "eager":
            llama.check_supported(subject)
        if isinstance(subject, Shape) and subject.qk_layernorm:
            raise UserError(
                f"{name} has q/k norms behind the rotation (qk_layernorm), which the engine does not compute"
            )


def run(
    plan: Plan, *, out: Path, arguments: dict[str, object], began: float, force: bool, command: str = "profile"
) -> list[Profile]:
    """Measure all models in one process, and write out/NAME.yaml of each.

    Raises:
        UserError: graphs without CUDA, contexts that do not fit a model.
    """
    check(plan)
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    check_memory(plan)
    note(f"loading {', '.join(plan.subjects)}")
    context = max(plan.grid.capacity, (plan.grid.repeats + 3) * max(plan.grid.widths))
    models = {
        name: random_model(subject, plan.dtype, plan.device, context)
        if isinstance(subject, Shape)
        else load(subject, plan.dtype, plan.device, plan.device_map)
        for name, subject in plan.subjects.items()
    }
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    if busy > cores:
        note(f"the machine is busy: load {busy:.1f} on {cores} cores; what is measured now is slower and spreads more")
    with heartbeat("passes"), progress("rounds", plan.grid.repeats) as advance:
        curves = measure(
            models, plan.grid, mode=plan.mode, clock=steady_clock(plan.device), advance=lambda done: advance(done, "")
        )
    dtypes = {plan.dtype, torch.float32, torch.bfloat16}
    most = {checkpoint.dtype_name(dtype): matmul_tflops(dtype, plan.device) for dtype in sorted(dtypes, key=str)}
    profiles = [_profile(name, model, curves[name], most, plan) for name, model in models.items()]
    with checkpoint.new_directory(out, force=force) as work:
        for profile in profiles:
            write_profile(profile, work / f"{profile.name}.yaml")
        sources = [subject for subject in plan.subjects.values() if isinstance(subject, Path)]
        provenance.write_record(work, command, arguments, sources, began)
    return profiles


def needed_bytes(plan: Plan) -> dict[str, float]:
    """Of weights, and of the caches of all batches; what accelerate spreads is not counted."""
    width, rows = plan.dtype.itemsize, (sum(plan.grid.batches) + 1) * plan.grid.capacity
    spread = () if plan.device_map is None else [n for n, s in plan.subjects.items() if isinstance(s, Path)]
    sizes = {name: size for name, size in plan.sizes().items() if name not in spread}
    needs: dict[str, float] = {f"weights of {name}": size.weight_bytes(width) for name, size in sizes.items()}
    return needs | {"caches": sum(rows * size.kv_bytes_per_token(width) for size in sizes.values())}


def check_memory(plan: Plan) -> None:
    """Raises UserError: weights and caches do not fit what is free."""
    memory.check_fits(needed_bytes(plan), plan.device, "--dtype bfloat16, --device-map auto, or fewer --batch")


def random_model(shape: Shape, dtype: torch.dtype, device: torch.device, context: int) -> Llama:
    """A model of that shape with random weights."""
    frequencies = 10000.0 ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    return Llama(shape, RandomWeights(shape, dtype, device), frequencies, 1.0, 1e-6, context)


def measure(
    models: Mapping[str, Decoder],
    grid: Grid,
    *,
    mode: Mode,
    clock: Clock,
    advance: Callable[[int], None] = lambda rounds: None,
) -> dict[str, LatencyCurves]:
    """The curves of each model. advance: rounds done, of grid.repeats.

    Raises:
        UserError: contexts that do not fit a model.
    """
    models = {name: with_mode(model, mode) if isinstance(model, Llama) else model for name, model in models.items()}
    passes = {name: dict(_passes(model, grid)) for name, model in models.items()}
    tasks: dict[tuple[str, int, int, int, int], tuple[Task, Task]] = {}
    for name, each in passes.items():
        other = _other_work(name, models, passes)
        tasks |= {(name, *at, 0): (other, run) for at, run in each.items()}
        ones = [(at, run) for at, run in each.items() if at[0] == 1]
        tasks |= {(name, *at, n): (_lead(other, run, n), run) for n in AGAIN for at, run in ones}
    times = time_interleaved(tasks, repeats=grid.repeats, clock=clock, advance=advance)

    def point(name: str, width: int, batch: int, context: int, behind: int) -> Point:
        found = latency(width, times[name, width, batch, context, behind])
        return Point(**found.model_dump(), batch=batch, context=context)

    places = list(itertools.product(grid.batches, grid.contexts))
    return {
        name: LatencyCurves(
            forward=[point(name, w, *at, 0) for w in grid.widths for at in places],
            steady=[SteadyPoint(**point(name, 1, *at, n).model_dump(), after=n) for n in AGAIN for at in places],
            prefill=[latency(length, times[name, length, 1, 0, 0]) for length in grid.prompts],
            host=[latency(width, host_times(model, width, grid, clock)) for width in grid.widths],
        )
        for name, model in models.items()
    }


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
    """One forward pass over width tokens of each row behind context cached ones, all taking turns.

    clock: the device's if left out.
    """
    grid = Grid(widths=widths, batches=[batch], contexts=[context], prompts=[], repeats=passes)
    tasks = {
        (name, *at): (_nothing, run)
        for name, model in models.items()
        for at, run in _passes(with_mode(model, mode), grid)
    }
    times = time_interleaved(tasks, repeats=passes, clock=clock or clock_for(next(iter(models.values())).device))
    return {name: [latency(width, times[name, width, batch, context]) for width in widths] for name in models}


def time_interleaved(
    tasks: Mapping[Key, tuple[Task, Task]],
    *,
    repeats: int,
    clock: Clock,
    advance: Callable[[int], None] = lambda rounds: None,
) -> dict[Key, list[float]]:
    """Milliseconds of the second of each pair right behind the first, once per round, in turning order.

    Rounds before all is warm do not count.
    """
    order = list(tasks)

    def once(number: int) -> dict[Key, float]:
        found = {}
        for key in order if number % 2 else reversed(order):
            before, run = tasks[key]
            before()
            began = clock()
            run()
            found[key] = (clock() - began) * 1e3
        return found

    last = 0.0
    for number in range(WARM_ROUNDS[1]):
        total = sum(once(number).values())
        if number + 1 >= WARM_ROUNDS[0] and abs(total - last) <= STEADY * last:
            break
        last = total
    rounds = []
    for number in range(repeats):
        rounds.append(once(number))
        advance(number + 1)
    return {key: [found[key] for found in rounds] for key in tasks}


def host_times(model: Decoder, width: int, grid: Grid, clock: Clock) -> list[float]:
    """Milliseconds that the engine takes beside the passes of a step which judges width tokens, one row, greedily."""
    k, most = width - 1, (grid.repeats + 2) * width  # if all that is drafted stands
    sampling = SamplingParams(max_tokens=min(most, model.context - width))
    steps = (
        speculative_decode(model, Echo(model.device), [[1]], k, sampling, clock)
        if k
        else decode(model, [[1]], sampling, clock)
    )
    return [1e3 * step.host_seconds for step in itertools.islice(steps, 1, grid.repeats + 1) if step.drafted == k]


class Echo:
    """Drafts the last token again: what the engine does with a draft, without the time of a draft model."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self, rows: int, capacity: int) -> None:
        pass

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        ids = torch.tensor([text[-1:] * count for text in texts], device=self.device)
        return Draft(ids=ids, q=None, counts=[count] * len(texts))


def bandwidth_gbs(weights: int, dtype: torch.dtype, device: torch.device) -> float:
    """Of one matrix-vector product over as many weights, at most a GiB: no decoder of that size has more."""
    size, run = _sweep(weights * dtype.itemsize, dtype, device)
    return size / 1e6 / _best_ms(run, device)


def matmul_tflops(dtype: torch.dtype, device: torch.device) -> float:
    """Of one large square product."""
    side = SQUARE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / 1e9 / _best_ms(lambda: a @ b, device)


def latency(width: int, times: list[float]) -> Latency:
    """Median and quartiles of times in milliseconds."""
    ordered = sorted(times)
    n = len(ordered)
    return Latency(width=width, median_ms=ordered[n // 2], low_ms=ordered[n // 4], high_ms=ordered[3 * n // 4], n=n)


def _profile(name: str, model: Decoder, curves: LatencyCurves, most: dict[str, float], plan: Plan) -> Profile:
    subject, shape = plan.subjects[name], model.shape if isinstance(model, Llama) else None
    weights = int(active_params(shape)) if shape else weight_bytes(model) // plan.dtype.itemsize
    return Profile(
        kind="measured",
        name=name,
        sha256=None if isinstance(subject, Shape) else provenance.fingerprint(subject),
        shape=shape,
        device=device_name(plan.device),
        dtype=checkpoint.dtype_name(plan.dtype),
        mode=plan.mode,
        threads=torch.get_num_threads() if plan.device.type == "cpu" else None,
        forward=curves.forward,
        steady=curves.steady,
        prefill=curves.prefill,
        host=curves.host,
        bandwidth_gbs=bandwidth_gbs(weights, plan.dtype, plan.device),
        matmul_tflops=most,
        command=plan.command,
        versions=provenance.versions(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _passes(model: Decoder, grid: Grid) -> Iterator[tuple[tuple[int, int, int], Task]]:
    """Each pass of the grid, and each prefill as a pass behind nothing: (width, batch, context), and how to run it."""
    for batch in grid.batches:
        caches = _caches(model, batch, grid)
        for width, context in itertools.product(grid.widths, grid.contexts):
            yield (width, batch, context), _pass(model, caches[context], width, context, width)
    cache = model.new_cache(1, grid.capacity)
    for length in grid.prompts:
        yield (length, 1, 0), _pass(model, cache, length, 0, 1)


def _caches(model: Decoder, batch: int, grid: Grid) -> dict[int, KVCache]:
    """By how many tokens they hold: the engine's own is what it is told to be, transformers' has to be filled."""
    if isinstance(model, Llama):
        return dict.fromkeys(grid.contexts, model.new_cache(batch, grid.capacity))
    caches = {context: model.new_cache(batch, grid.capacity) for context in grid.contexts}
    for context, cache in caches.items():
        model.forward(torch.ones(batch, context, dtype=torch.long, device=model.device), cache, last=1)
    return caches


def weight_bytes(model: Decoder) -> int:
    """Return how much memory a model's weights take."""
    if isinstance(model, Llama):
        return model.shape.weight_bytes(model.embed.itemsize)
    return sum(p.nbytes for p in model.model.parameters()) if isinstance(model, HFDecoder) else 0


def _other_work(name: str, models: Mapping[str, Decoder], passes: dict[str, dict[tuple[int, int, int], Task]]) -> Task:
    """What runs before a pass of name: one of the largest other model, or a sweep over memory where there is none."""
    others = [other for other in models if other != name]
    if others:
        return next(iter(passes[max(others, key=lambda other: weight_bytes(models[other]))].values()))
    return _sweep(weight_bytes(models[name]), torch.float32, models[name].device)[1]


def _nothing() -> None:
    pass


def _lead(other: Task, run: Task, behind: int) -> Task:
    """What runs before a pass that is measured behind so many like ones."""

    def several() -> None:
        other()
        for _ in range(behind):
            run()

    return several


def _sweep(size: int, dtype: torch.dtype, device: torch.device) -> tuple[int, Task]:
    """A product that reads about size bytes, at most BUFFER_BYTES; and how many."""
    rows = max(1, min(size, BUFFER_BYTES) // (COLUMNS * dtype.itemsize))
    matrix = torch.ones(rows, COLUMNS, dtype=dtype, device=device)
    vector = torch.ones(1, COLUMNS, dtype=dtype, device=device)
    return matrix.nbytes, lambda: F.linear(vector, matrix)


def _pass(model: Decoder, cache: KVCache, width: int, context: int, last: int) -> Task:
    ids = torch.ones(len(cache.used), width, dtype=torch.long, device=model.device)

    def run() -> Tensor:
        cache.used = [context] * len(ids)
        return model.forward(ids, cache, last)

    return run


def _best_ms(run: Task, device: torch.device, passes: int = 8) -> float:
    clock = clock_for(device)
    times = []
    for _ in range(passes):
        began = clock()
        run()
        times.append((clock() - began) * 1e3)
    return min(times)
