"""Time interleaved tasks, and measure a device's memory bandwidth and speed of matrix multiplication."""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
from torch.nn import functional as F

from draftlab.engine.clocks import Clock, clock_for
from draftlab.model.devices import is_fast
from draftlab.results.score import Latency

WARM_UP_ROUNDS = (3, 12)  # fewest and most warm-up rounds
STEADY = 0.05  # warm-up ends when the time of a round differs from the last by at most this fraction
MAX_BUFFER_BYTES = 1 << 30  # largest size of the matrix that measures bandwidth
SQUARE = {"cpu": 1024, "cuda": 8192}  # side of the square matrices that matmul_tflops multiplies
SLOW_SQUARE = 256  # the same for slow dtypes, in which larger products take seconds
COLUMNS = 4096  # columns of the matrix that measures bandwidth
LAPS = 16  # runs between two readings of a GPU's clock, because a reading takes a tenth of a run's time

Task = Callable[[], object]
Key = TypeVar("Key")
# tasks that run one after the other, each with the key of its times, or None if it is not timed
Chain = Sequence[tuple[Key | None, Task]]


class Rounds(Generic[Key]):
    """Chains of tasks that are timed in turns.

    A round runs every chain once. The order of the chains is reversed every round, so that drift of the machine affects
    all chains alike. A task always follows the same task of its chain.

    times: Milliseconds of each task in each round after the warm-up, by key.
    done: Number of rounds after the warm-up.
    """

    def __init__(self, chains: Sequence[Chain[Key]], clock: Clock) -> None:
        self.chains = list(chains)
        self.clock = clock
        self.times: dict[Key, list[float]] = {}
        self.done = 0

    def warm_up(self, rounds: tuple[int, int] = WARM_UP_ROUNDS) -> None:
        """Run rounds that do not count, until two of them take similar times. rounds: Fewest and most of them."""
        last = 0.0
        for number in range(rounds[1]):
            total = sum(milliseconds for _, milliseconds in self._timed())
            if number + 1 >= rounds[0] and abs(total - last) <= STEADY * last:
                return
            last = total

    def run(self) -> None:
        """Run a round, and keep its times."""
        for key, milliseconds in list(self._timed()):
            self.times.setdefault(key, []).append(milliseconds)
        self.done += 1

    def measure(
        self,
        repeats: int,
        advance: Callable[[int], None] = lambda rounds: None,
        warm_up: tuple[int, int] = WARM_UP_ROUNDS,
    ) -> None:
        """Warm up, and run rounds.

        advance: Callback that receives the number of measured rounds so far. warm_up: See warm_up().
        """
        self.warm_up(warm_up)
        for _ in range(repeats):
            self.run()
            advance(self.done)

    def _timed(self) -> Iterator[tuple[Key, float]]:
        self.chains.reverse()
        for chain in self.chains:
            for key, task in chain:
                start = self.clock()
                task()
                if key is not None:
                    yield key, (self.clock() - start) * 1e3


def time_interleaved(
    chains: Sequence[Chain[Key]],
    *,
    repeats: int,
    clock: Clock,
    advance: Callable[[int], None] = lambda rounds: None,
) -> dict[Key, list[float]]:
    """Time tasks in turns after a warm-up, and return the milliseconds that each task took in each round, see Rounds.

    Args:
        repeats: Number of measured rounds.
        advance: Callback that receives the number of measured rounds so far.
    """
    rounds = Rounds(chains, clock)
    rounds.measure(repeats, advance)
    return rounds.times


def summarize(width: int, times: Sequence[float]) -> Latency:
    """Return median and quartiles of times in milliseconds as a Latency. width: Tokens of the timed pass."""
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
    """Measure the memory bandwidth of a device in GB/s, by a matrix-vector product over a matrix of `weights` weights.

    The bandwidth of a decoder with this number of weights is at most the result.
    """
    size, run = memory_sweep(weights * dtype.itemsize, dtype, device)
    return size / 1e6 / _fastest_ms(run, device)


def matmul_tflops(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the speed, in TFLOP/s, of the product of two large square matrices."""
    side = SQUARE[device.type] if is_fast(dtype, device) else SLOW_SQUARE
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / 1e9 / _fastest_ms(lambda: a @ b, device)


def memory_sweep(size: int, dtype: torch.dtype, device: torch.device) -> tuple[int, Task]:
    """Return the size of a matrix in bytes, and a task that reads the whole matrix by a matrix-vector product.

    size: Wanted size of the matrix in bytes. The actual size is at most MAX_BUFFER_BYTES.
    """
    rows = max(1, min(size, MAX_BUFFER_BYTES) // (COLUMNS * dtype.itemsize))
    matrix = torch.ones(rows, COLUMNS, dtype=dtype, device=device)
    vector = torch.ones(1, COLUMNS, dtype=dtype, device=device)
    return matrix.nbytes, lambda: F.linear(vector, matrix)


def _fastest_ms(run: Task, device: torch.device, passes: int = 8) -> float:
    laps = 1 if device.type == "cpu" else LAPS

    def several() -> None:
        for _ in range(laps):
            run()

    times = time_interleaved([[("", several)]], repeats=passes, clock=clock_for(device))
    return min(times[""]) / laps
