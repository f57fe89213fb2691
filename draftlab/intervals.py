"""Estimates from timed prompts: speed-ups, and their intervals by drawing prompts anew. No torch.

S samples, R prompts, K numbers of drafted tokens.
"""

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import numpy as np

SAMPLES = 2000
AT_ONCE = 100  # samples in memory
SPLITS = 20

Timing = tuple[int, float]  # tokens and the seconds that they took
Timings = tuple[Sequence[Sequence[Timing]], Sequence[Timing]]  # with drafts, of each K and prompt [K, R]; without, [R]
Item = TypeVar("Item")


class Interval(BaseModel):
    """A ratio with its 95 % bootstrap interval over prompts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float
    low: float
    high: float
    n: int


def bootstrap(items: Sequence[Item], of: Callable[[Sequence[Item]], float]) -> Interval:
    """Return of all items, with the 95 % interval of drawing as many anew, seeded."""
    rng = random.Random(0)
    values = sorted(of(rng.choices(items, k=len(items))) for _ in range(SAMPLES))
    low, high = values[int(0.025 * SAMPLES)], values[int(0.975 * SAMPLES) - 1]
    return Interval(value=of(items), low=low, high=high, n=len(items))


def tokens_per_second(timed: Sequence[Timing]) -> float:
    """Tokens per second, sums over sums; 0 where nothing was timed."""
    seconds = sum(seconds for _, seconds in timed)
    return sum(tokens for tokens, _ in timed) / seconds if seconds else 0.0


def median_repeat(repeats: Sequence[Timing]) -> Timing:
    """The repeat of median time per token, the lower of two middle ones: a stall of the machine is not the draft's."""
    return sorted(repeats, key=_pace)[(len(repeats) - 1) // 2]


def slowest_over_fastest(repeats: Sequence[Timing]) -> float:
    """The slowest repeat over the fastest, per token; 1 where nothing was timed."""
    paces = [_pace(one) for one in repeats]
    return max(paces) / min(paces) if min(paces) > 0 else 1.0


def speedup(arm: Timings) -> Interval:
    """Tokens per second with drafts over those without: a ratio of sums over prompts.

    With several K the prompts are split in halves, SPLITS times, and each half counts at the K that is fastest on the
    other, in every bootstrap sample anew: a K chosen on the prompts that it is timed on looks faster than it is.
    """
    return _interval(_gains(arm, seed=0), [arm])


def speedup_ratio(first: Timings, second: Timings, *, paired: bool) -> Interval:
    """The first speed-up over the second. paired: of the same prompts, which are drawn for both together."""
    return _interval(_gains(first, seed=0) / _gains(second, seed=0 if paired else 1), [first, second])


def _interval(values: "np.ndarray", arms: Sequence[Timings]) -> Interval:
    """values: of all prompts, then of each sample, [1 + S]."""
    import numpy as np

    low, high = np.nanpercentile(values[1:], [2.5, 97.5])
    n = min(sum(seconds > 0 for _, seconds in slow) for _, slow in arms)
    return Interval(value=float(values[0]), low=float(low), high=float(high), n=n)


def _gains(arm: Timings, seed: int) -> "np.ndarray":
    """The speed-up over all prompts, then that of each sample, [1 + S]; nan where no prompt in it was timed."""
    import numpy as np

    timed, alone = np.array(arm[0], dtype=float), np.array(arm[1], dtype=float)  # [K, R, 2], [R, 2]
    n = len(alone)
    drawn = np.random.default_rng(seed).multinomial(n, [1 / n] * n, SAMPLES)
    counts = np.concatenate([np.ones((1, n)), drawn])  # how often each sample holds each prompt
    chosen = np.concatenate([_chosen(timed, counts[at : at + AT_ONCE]) for at in range(0, len(counts), AT_ONCE)])
    plain = counts @ alone  # [1 + S, 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        return chosen[:, 0] / chosen[:, 1] / (plain[:, 0] / plain[:, 1])


def _chosen(timed: "np.ndarray", counts: "np.ndarray") -> "np.ndarray":
    """Tokens and seconds of each sample, each half of the prompts at the K that is fastest on the other, [S, 2]."""
    import numpy as np

    rng, n = np.random.default_rng(0), timed.shape[1]
    first = np.stack([rng.permutation(n) < n // 2 for _ in range(SPLITS)])
    halves = np.stack([first, ~first]) * counts[:, None, None]  # [S, 2, SPLITS, R]
    sums = np.einsum("shpr,krx->shpkx", halves, timed, optimize=True)  # of each half [S, 2, SPLITS, K, 2]
    others = np.where(sums[:, ::-1, :, :, 1:] > 0, sums[:, ::-1], sums.sum(1, keepdims=True))  # one half may be empty
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = np.nan_to_num(others[..., 0] / others[..., 1])  # [S, 2, SPLITS, K]
    best = rates.argmax(-1)[..., None, None]
    return np.take_along_axis(sums, best, 3).sum((1, 2, 3))


def _pace(timed: Timing) -> float:
    """Seconds per token; 0 where the prefill wrote all."""
    return timed[1] / timed[0] if timed[0] else 0.0
