"""Time interleaved tasks, and measure the limits of a device: memory bandwidth and matrix multiplication."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch.nn import functional as F

from draftlab.engine.clocks import Clock, clock_for
from draftlab.model.checkpoint import is_fast
from draftlab.results.score import Latency

WARM_UP_ROUNDS = (3, 12)  # fewest and most rounds
STEADY = 0.05  # warm-up ends when a round differs from the previous round by at most this share
MAX_BUFFER_BYTES = 1 << 30  # largest matrix that measures bandwidth
SQUARE = {"cpu": 1024, "cuda": 8192}  # side of the multiplied matrices
SLOW_SQUARE = 256  # side for slow dtypes, whose larger products take seconds
COLUMNS = 4096  # columns of the matrix that measures bandwidth
LAPS = 16  # runs of a task between two readings of an accelerator's clock, since a reading takes a tenth of a run

Task = Callable[[], object]
Key = TypeVar("Key")


def time_interleaved(
    tasks: Mapping[Key, tuple[Task, Task]],
    *,
    repeats: int,
    clock: Clock,
    advance: Callable[[int], None] = lambda rounds: None,
) -> dict[Key, list[float]]:
    """Time pairs of tasks in turns, and return the milliseconds of each pair's second task in each round.

    The first task of a pair runs, untimed, right before the second. The order of the pairs is reversed every round, so
    that drift of the machine affects all pairs alike. Warm-up rounds do not count.
    """
    order = list(tasks)

    def run_round(number: int) -> dict[Key, float]:
        times = {}
        for key in order if number % 2 else reversed(order):
            before, timed = tasks[key]
            before()
            start = clock()
            timed()
            times[key] = (clock() - start) * 1e3
        return times

    last = 0.0
    for number in range(WARM_UP_ROUNDS[1]):
        total = sum(run_round(number).values())
        if number + 1 >= WARM_UP_ROUNDS[0] and abs(total - last) <= STEADY * last:
            break
        last = total
    measured: dict[Key, list[float]] = {key: [] for key in tasks}
    for number in range(repeats):
        for key, milliseconds in run_round(number).items():
            measured[key].append(milliseconds)
        advance(number + 1)
    return measured


def summarize(width: int, times: Sequence[float]) -> Latency:
    """Return median and quartiles of times in milliseconds."""
    ordered = sorted(times)
    n = len(ordered)
    return Latency(
        width=width,
        median_ms=ordered[n // 2],
        low_ms=ordered[n // 4],
        high_ms=ordered[3 * n // 4],
        n=n,
    )


def bandwidth_gbs(weights: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the bandwidth (GB/s) of a matrix-vector product over `weights` weights: an upper bound for a decoder."""
    size, run = memory_sweep(weights * dtype.itemsize, dtype, device)
    return size / 1e6 / _fastest_ms(run, device)


def matmul_tflops(dtype: torch.dtype, device: torch.device) -> float:
    """Return the rate of a large square matrix product, in TFLOP/s."""
    side = SQUARE[device.type] if is_fast(dtype, device) else SLOW_SQUARE
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / 1e9 / _fastest_ms(lambda: a @ b, device)


def memory_sweep(size: int, dtype: torch.dtype, device: torch.device) -> tuple[int, Task]:
    """Return the bytes of a matrix of about `size`, at most MAX_BUFFER_BYTES, and a task that multiplies the matrix."""
    rows = max(1, min(size, MAX_BUFFER_BYTES) // (COLUMNS * dtype.itemsize))
    matrix = torch.ones(rows, COLUMNS, dtype=dtype, device=device)
    vector = torch.ones(1, COLUMNS, dtype=dtype, device=device)
    return matrix.nbytes, lambda: F.linear(vector, matrix)


def _fastest_ms(run: Task, device: torch.device, passes: int = 8) -> float:
    laps = 1 if device.type == "cpu" else LAPS

    def several() -> None:
        for _ in range(laps):
            run()

    times = time_interleaved({"": (lambda: None, several)}, repeats=passes, clock=clock_for(device))
    return min(times[""]) / laps
