"""Speed-ups and acceptance with their bootstrap intervals over prompts. No torch.

Shapes: R prompts, K tested numbers of drafted tokens, C columns, S bootstrap samples.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pydantic import ConfigDict

from draftlab.reading import FileModel

if TYPE_CHECKING:
    import numpy as np

SAMPLES = 2000
BLOCK = 100  # samples that are in memory at a time
SPLITS = 20

Timing = tuple[int, float]  # tokens, seconds
# timings with drafts, [K, R], and timings without drafts, [R]
Timings = tuple[Sequence[Sequence[Timing]], Sequence[Timing]]


class Interval(FileModel):
    """An estimate with its 95 % bootstrap interval over n prompts."""

    model_config = ConfigDict(allow_inf_nan=True)

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.2f}" + (f" ({self.low:.2f} to {self.high:.2f})" if self.n > 1 else "")

    def as_speedup(self) -> str:
        """Return text such as "1.52x (1.40 to 1.63)". An estimate from one prompt has no interval."""
        return f"{self.value:.2f}x " + (
            f"({self.low:.2f} to {self.high:.2f})" if self.n > 1 else "(n = 1)"
        )


def bootstrap(
    statistic: "Callable[[np.ndarray], np.ndarray]", rows: int, seed: int = 0
) -> "np.ndarray":
    """Return a statistic of all prompts, followed by the statistic of each bootstrap sample, [1 + S, ...].

    The same seed draws the same samples, so two statistics of the same prompts can be compared sample by sample.

    Args:
        statistic: Function that returns the statistic of each of n samples, [n, ...]. Its argument has the number of
            times that each sample contains each prompt, [n, R].
        rows: Number of prompts, R.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    blocks = (rng.multinomial(rows, [1 / rows] * rows, BLOCK) for _ in range(SAMPLES // BLOCK))
    return np.concatenate([statistic(np.ones((1, rows))), *map(statistic, blocks)])


def interval(values: "np.ndarray", n: int) -> Interval:
    """Return an estimate with its 95 % bootstrap interval.

    values: The estimate, then its value in each bootstrap sample, [1 + S]. Samples whose value is nan are left out.
    n: Number of prompts.
    """
    import numpy as np

    low, high = np.nanpercentile(values[1:], [2.5, 97.5])
    return Interval(value=float(values[0]), low=float(low), high=float(high), n=n)


def ratio_intervals(over: "np.ndarray", under: "np.ndarray") -> list[Interval]:
    """Return the ratio sum(over) / sum(under) of each column, with its interval over prompts.

    A ratio with sum(under) = 0 is 0.

    over, under: Numerators and denominators, [R, C] each.
    """
    import numpy as np

    def ratios(counts: np.ndarray) -> np.ndarray:
        sums = counts @ under
        return np.divide(counts @ over, sums, out=np.zeros_like(sums, dtype=float), where=sums > 0)

    return [interval(column, len(over)) for column in bootstrap(ratios, len(over)).T]


def ratio(pairs: "Sequence[tuple[float, float]] | np.ndarray") -> Interval:
    """Return the sum of the first column over the sum of the second column, with its interval. pairs: [R, 2]."""
    import numpy as np

    over, under = np.array(pairs, dtype=float).T[:, :, None]
    return ratio_intervals(over, under)[0]


def tokens_per_second(timings: Sequence[Timing]) -> float:
    """Return the sum of tokens over the sum of seconds, or 0 without timings."""
    seconds = sum(seconds for _, seconds in timings)
    return sum(tokens for tokens, _ in timings) / seconds if seconds else 0.0


def median_repeat(repeats: Sequence[Timing]) -> Timing:
    """Return the repeat with the median time per token. If there are two medians, return the faster repeat.

    A single stall of the machine thus has no effect.
    """
    return sorted(repeats, key=_seconds_per_token)[(len(repeats) - 1) // 2]


def slowest_over_fastest(repeats: Sequence[Timing]) -> float:
    """Return the longest time per token of the repeats divided by the shortest, or 1 if the shortest is 0."""
    times = list(map(_seconds_per_token, repeats))
    return max(times) / min(times) if min(times) > 0 else 1.0


def speedup(timings: Timings, *, chosen_by: Sequence[Sequence[Timing]] | None = None) -> Interval:
    """Return the speed-up: tokens per second with drafts over tokens per second without drafts.

    Both rates are ratios of sums over prompts. K is the number of drafted tokens per step. A K that is chosen on the
    timed prompts looks faster than it is. The prompts are therefore split into random halves, SPLITS times. Each half
    is timed at the K that is fastest on the other half.

    chosen_by: Timings by which the fastest K is chosen: one for each K and run. Default: the timings with drafts.
    """
    return interval(_speedups(timings, chosen_by or timings[0], seed=0), _timed_prompts(timings))


def speedup_ratio(first: Timings, second: Timings, *, paired: bool) -> Interval:
    """Return the ratio of the first speed-up to the second, with its interval.

    paired: Whether both speed-ups are of the same prompts. They are then compared on the same bootstrap samples.
    """
    ratios = _speedups(first, first[0], seed=0) / _speedups(
        second, second[0], seed=0 if paired else 1
    )
    return interval(ratios, min(_timed_prompts(first), _timed_prompts(second)))


def _speedups(timings: Timings, chosen_by: Sequence[Sequence[Timing]], seed: int) -> "np.ndarray":
    """Return the speed-up on all prompts, followed by the speed-up on each bootstrap sample, [1 + S].

    The speed-up of a sample without timings is nan.
    """
    import numpy as np

    drafted, plain = (
        np.array(timings[0], dtype=float),
        np.array(timings[1], dtype=float),
    )  # [K, R, 2], [R, 2]
    judged = np.array(chosen_by, dtype=float)  # [K, R, 2]

    def ratios(counts: np.ndarray) -> np.ndarray:
        chosen, baseline = (
            _at_cross_validated_k(drafted, judged, counts),
            counts @ plain,
        )  # [S, 2] each
        with np.errstate(divide="ignore", invalid="ignore"):
            return chosen[:, 0] / chosen[:, 1] / (baseline[:, 0] / baseline[:, 1])

    return bootstrap(ratios, len(plain), seed)


def _at_cross_validated_k(
    drafted: "np.ndarray", judged: "np.ndarray", counts: "np.ndarray"
) -> "np.ndarray":
    """Return the tokens and seconds of each bootstrap sample, [S, 2].

    They are sums over the halves of all splits. For each half, K is the number of drafted tokens that is fastest on the
    other half.

    Args:
        drafted: Tokens and seconds by K and prompt, [K, R, 2].
        judged: Tokens and seconds by which the fastest K is chosen, [K, R, 2].
        counts: Number of times that each sample contains each prompt, [S, R].
    """
    import numpy as np

    rng, n = np.random.default_rng(0), drafted.shape[1]
    first = np.stack([rng.permutation(n) < n // 2 for _ in range(SPLITS)])
    halves = np.stack([first, ~first]) * counts[:, None, None]  # [S, 2, SPLITS, R]
    sums, judging = (
        np.einsum("shpr,krx->shpkx", halves, timings, optimize=True)
        for timings in (drafted, judged)
    )  # [S, 2, SPLITS, K, 2]
    # if the other half has no timing, both halves decide
    others = np.where(
        judging[:, ::-1, :, :, 1:] > 0, judging[:, ::-1], judging.sum(1, keepdims=True)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = np.nan_to_num(others[..., 0] / others[..., 1])  # [S, 2, SPLITS, K]
    best = rates.argmax(-1)[..., None, None]
    return np.take_along_axis(sums, best, 3).sum((1, 2, 3))


def _timed_prompts(timings: Timings) -> int:
    return sum(seconds > 0 for _, seconds in timings[1])


def _seconds_per_token(timing: Timing) -> float:
    """Return the seconds per token, or 0 if no token was decoded after the prefill."""
    return timing[1] / timing[0] if timing[0] else 0.0
