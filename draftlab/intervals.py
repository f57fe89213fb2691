"""Speed-ups, ratios and acceptance with 95 % intervals over conversations.

The rows of all functions are conversations: the turns of a conversation depend on each other, so their tokens and
seconds are summed (see by_conversation). A request without further turns is a conversation of its own.

One method makes every interval: the statistic is computed again without each conversation, which gives its standard
error (delete-one jackknife: Miller, "The jackknife - a review", Biometrika 1974). The interval is that many standard
errors wide as Student's t says for G - 1 degrees of freedom (Cochran, Sampling Techniques, 1977, chapter 6; for rows
that are clusters Cameron and Miller, "A practitioner's guide to cluster-robust inference", J. Human Resources 2015).
python -m benchmarks.coverage measures how often such intervals contain the truth; docs/method.md has the table.

Shapes: G conversations, C columns, K tested numbers of drafted tokens, P random partitions of the conversations.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from pydantic import ConfigDict, field_serializer, field_validator
from scipy.special import ndtri, stdtrit

from draftlab.reading import FileModel

ALPHA = 0.05
# chance with which the number of conversations that rows_to_show names shows a difference
POWER = 0.8
FEWEST = 4  # below this number of conversations, an interval is too wide to be of use
# Below this number, kinds of requests that are rare may be missing. No interval can know of them.
RARE = 12
ENOUGH = 24
PARTITIONS = 40
PARTS = 3
MOST_ROWS = 10_000  # a larger number of conversations is not worth naming

Timing = tuple[float, float]  # tokens, seconds


class Timings(NamedTuple):
    """Tokens and seconds of each conversation.

    drafted: With drafts, [K, G, 2]. plain: Without drafts, [G, 2].
    alpha: 1 minus the coverage of intervals. It is below 0.05 if the timing could end early, see sequential.py.
    swaps: Factor by which the seconds of each conversation change in each column if another conversation is left out,
        [K, G left out, G], because another K is then chosen for it. None: each column has a fixed K.
    """

    drafted: ArrayLike
    plain: ArrayLike
    alpha: float = ALPHA
    swaps: np.ndarray | None = None


class Interval(FileModel):
    """An estimate with its 95 % interval over n conversations. With n < 2, it reaches from 0 to infinity."""

    model_config = ConfigDict(allow_inf_nan=True)

    value: float
    low: float
    high: float
    n: int

    @field_validator("low", mode="before")
    @classmethod
    def _low(cls, value: float | None) -> float:
        return 0.0 if value is None else value

    @field_validator("high", mode="before")
    @classmethod
    def _high(cls, value: float | None) -> float:
        return math.inf if value is None else value

    @field_serializer("low", "high")
    def _end(self, value: float) -> float | None:
        return value if self.exists else None

    @property
    def exists(self) -> bool:
        """Return whether there are enough conversations for an interval with an end."""
        return self.n > 1

    @property
    def decides(self) -> bool:
        """Return whether there are enough conversations for a verdict."""
        return self.n >= FEWEST

    def above(self, bar: float) -> bool:
        """Return whether the whole interval is above a bar, and has enough conversations for this verdict."""
        return self.decides and self.low > bar

    def below(self, bar: float) -> bool:
        """Return whether the whole interval is below a bar, and has enough conversations for this verdict."""
        return self.decides and self.high < bar

    @property
    def drawn(self) -> tuple[float, float]:
        """Return the ends to draw: those of the interval, or the value itself where n is too small."""
        return (self.low, self.high) if self.decides else (self.value, self.value)

    def __str__(self) -> str:
        return self.text()

    def as_speedup(self) -> str:
        """Return text such as "1.52x (1.40 to 1.63)"."""
        return self.text(unit="x")

    def text(self, digits: int = 2, unit: str = "") -> str:
        """Return the value and, with enough conversations, the interval. digits: Number of digits after the point."""
        value = f"{self.value:.{digits}f}{unit}"
        if self.decides:
            return f"{value} ({self.low:.{digits}f} to {self.high:.{digits}f})"
        return f"{value} (n = {self.n})" if self.n < 2 else f"{value} (n = {self.n}, too few)"


def by_conversation(values: ArrayLike, conversations: Sequence[int | None] | None) -> np.ndarray:
    """Return the sums over the requests of each conversation, [G, C].

    values: One row for each request, [requests, C].
    conversations: Number of each request's conversation. A request without a number counts for itself. None: No request
        has a number.
    """
    if conversations is None:
        return np.asarray(values, dtype=float)
    places: dict[tuple[bool, int], int] = {}
    rows = []
    for i, number in enumerate(conversations):
        key = (False, i) if number is None else (True, number)
        rows.append(places.setdefault(key, len(places)))
    array = np.asarray(values, dtype=float)
    sums = np.zeros((len(places), array.shape[1]))
    np.add.at(sums, rows, array)
    return sums


def ratio_intervals(over: np.ndarray, under: np.ndarray, most: np.ndarray | float = math.inf) -> list[Interval]:
    """Return the ratio sum(over) / sum(under) of each column, with its interval.

    A ratio with sum(under) = 0 is 0. Conversations without a denominator are not counted in n.

    over, under: Numerators and denominators, [G, C] each. most: Upper limit of each ratio, such as 1 for shares, [C].
    """
    found = []
    for o, u, high in zip(over.T, under.T, np.broadcast_to(most, over.shape[1]), strict=True):
        used = u > 0
        o = np.append(o[used], o[~used].sum())
        u = np.append(u[used], 0.0)
        n = int(used.sum())
        # the whole, then without each conversation; the last entry holds what has no denominator
        tops = o.sum() - np.append(0.0, o[:n])
        bottoms = u.sum() - np.append(0.0, u[:n])
        ratios = np.divide(tops, bottoms, out=np.zeros(n + 1), where=bottoms > 0)
        found.append(_interval(ratios, most=float(high)))
    return found


def ratio(pairs: Sequence[tuple[float, float]] | np.ndarray) -> Interval:
    """Return the sum of the first column over the sum of the second column, with its interval. pairs: [G, 2]."""
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


def speedup(timings: Timings, *, chosen_by: ArrayLike | None = None) -> Interval:
    """Return the speed-up: tokens per second with drafts over tokens per second without drafts.

    Both rates are ratios of sums over conversations. A K that is chosen on the timed conversations looks faster than it
    is, so K is chosen by cross-validation, see _log_speedups.

    The interval is that of the speed-up, not of its logarithm, which would call a draft faster too often where some
    answers take much longer than others.

    chosen_by: Timings by which the fastest K is chosen, [K, G, 2]. Default: the timings with drafts.
    """
    logs = _log_speedups(timings, chosen_by)
    return _interval(np.exp(logs), alpha=timings.alpha)


def best_of(drafters: Sequence[Timings]) -> Interval:
    """Return the speed-up of the fastest of several drafters, each at its fastest K.

    Drafter and K are chosen together by cross-validation, so the value is not that of the luckiest drafter. If the
    drafters were timed in several runs, their seconds are first put in proportion to plain decoding of the first run.

    drafters: Timings of the same conversations.
    """
    paces = [tokens_per_second(np.asarray(each.plain, dtype=float).tolist()) for each in drafters]
    columns = [
        np.asarray(each.drafted, dtype=float) * [1.0, pace / paces[0]]
        for each, pace in zip(drafters, paces, strict=True)
    ]
    swaps = None
    if any(each.swaps is not None for each in drafters):
        swaps = np.concatenate([_swaps(each) for each in drafters])
    alpha = min(each.alpha for each in drafters)
    return speedup(Timings(np.concatenate(columns), drafters[0].plain, alpha, swaps))


def _swaps(timings: Timings) -> np.ndarray:
    if timings.swaps is not None:
        return timings.swaps
    columns, n, _ = np.shape(timings.drafted)
    return np.ones((columns, n, n))


def speedup_ratio(first: Timings, second: Timings, *, paired: bool) -> Interval:
    """Return the ratio of the first speed-up to the second, with its interval.

    The interval is that of the logarithm, so the inverse ratio has the inverse interval.

    paired: Whether both speed-ups are of the same conversations. If not, degrees of freedom are Welch's ("The
        generalization of Student's problem when several different population variances are involved", Biometrika 1947).
    """
    alpha = min(first.alpha, second.alpha)
    if paired:
        first, second = _timed_in_all([first, second])
        gap = _log_speedups(first) - _log_speedups(second)
        n = len(gap) - 1
        return _around(gap[0], _student(n - 1, alpha=alpha) * _standard_error(gap), n)
    a = _log_speedups(first)
    b = _log_speedups(second)
    n = min(len(a), len(b)) - 1
    if n < 2:
        return _around(a[0] - b[0], math.inf, n)
    parts = [(_standard_error(logs) ** 2, len(logs) - 2) for logs in (a, b)]
    variance = sum(part for part, _ in parts)
    spread = sum(part**2 / df for part, df in parts)
    df = variance**2 / spread if spread else n - 1
    return _around(a[0] - b[0], _student(df, alpha=alpha) * math.sqrt(variance), n)


class Behind(NamedTuple):
    """A drafter next to the fastest one.

    Args:
        ratio: Speed-up of the drafter over that of the fastest one. The drafter is slower if the interval is below 1.
        needed: Number of conversations that would probably show a drafter to be slower if it is 10 % slower. None: too
            many to name, or unknown.
    """

    ratio: Interval
    needed: int | None


SHOWN = 0.9  # a drafter with this share of the fastest one's speed-up is 10 % slower


def against_first(drafters: Sequence[Timings]) -> list[Behind]:
    """Compare the drafters with the first one, which is the fastest.

    The data choose the fastest drafter, so each comparison may be any of the m (m - 1) / 2 pairs of m drafters. In at
    most 5 % of rankings of equal drafters is any of them called slower: the levels are those of Holm ("A simple
    sequentially rejective multiple test procedure", Scand. J. Statist. 1979) over the pairs of the drafters left.

    drafters: Timings of the same conversations, the drafter with the highest speed-up first.
    """
    logs = [_log_speedups(each) for each in _timed_in_all(drafters)]
    n = len(logs[0]) - 1
    m = len(logs)
    alpha = min(each.alpha for each in drafters)
    gaps = [logs[0] - each for each in logs[1:]]
    errors = [_standard_error(gap) for gap in gaps]
    scores = np.array([gap[0] / error if error > 0 else math.inf for gap, error in zip(gaps, errors, strict=True)])
    critical = np.zeros(m - 1)
    order = np.argsort(-scores)
    for i, left in enumerate(range(m, 1, -1)):
        critical[order[i:]] = _student(n - 1, pairs=left * (left - 1) // 2, alpha=alpha)
        if scores[order[i]] <= critical[order[i]]:
            break
    return [
        Behind(
            _around(-gap[0], float(t) * error, n),
            rows_to_show(error, n, -math.log(SHOWN), pairs=m * (m - 1) // 2),
        )
        for gap, error, t in zip(gaps, errors, critical, strict=True)
    ]


def rows_to_reach(gain: Interval, bar: float) -> int | None:
    """Return the number of conversations with which the low end of an interval would probably be above a bar.

    The estimate and the spread are assumed to stay as they are. None: the estimate is not above the bar, the number is
    too large to name, or there are too few conversations to know.
    """
    if gain.n < 2 or gain.value <= bar:
        return None
    error = (gain.high - gain.value) / _student(gain.n - 1)
    return rows_to_show(error, gain.n, gain.value - bar)


def rows_to_show(error: float, n: int, distance: float, pairs: int = 1) -> int | None:
    """Return the number of conversations that shows a distance in 80 % of measurements, or None if it is too large.

    error: Standard error over n conversations. pairs: Number of comparisons among which this one is.
    """

    def shown(rows: int) -> bool:
        needed = _student(rows - 1, pairs) + float(ndtri(POWER))
        return needed * error * math.sqrt(n / rows) <= distance

    sizes = range(FEWEST, MOST_ROWS)
    place = bisect_left(sizes, True, key=shown)
    return sizes[place] if place < len(sizes) else None


def _student(df: float, pairs: int = 1, alpha: float = ALPHA) -> float:
    """Return the two-sided critical value of Student's t at a level, divided among comparisons after Bonferroni.

    Without a degree of freedom, it is infinite.
    """
    if df <= 0:
        return math.inf
    return float(stdtrit(df, 1 - alpha / 2 / pairs))


def _interval(values: np.ndarray, most: float = math.inf, alpha: float = ALPHA) -> Interval:
    """Return a statistic with its interval, which is cut at 0 and at `most`.

    values: The statistic of all conversations, then without each of them, [1 + G].
    """
    n = len(values) - 1
    value = float(values[0])
    half = _student(n - 1, alpha=alpha) * _standard_error(values)
    return Interval(value=value, low=max(0.0, value - half), high=min(most, value + half), n=n)


def _around(log: float, half: float, n: int) -> Interval:
    """Return the ratio whose logarithm is `log`. half: Half of the width of the logarithm's interval."""
    return Interval(value=math.exp(log), low=math.exp(log - half), high=math.exp(log + half), n=n)


def _standard_error(values: np.ndarray) -> float:
    """Return the jackknife's standard error, which is infinite for one conversation. values: as in _interval."""
    left = values[1:]
    if len(left) < 2:
        return math.inf
    return math.sqrt((len(left) - 1) / len(left) * float(((left - left.mean()) ** 2).sum()))


def _timed_in_all(drafters: Sequence[Timings]) -> list[Timings]:
    """Return the timings of the conversations that plain decoding timed in the runs of all drafters."""
    arrays = [(np.asarray(each.drafted), np.asarray(each.plain)) for each in drafters]
    timed = np.all([plain[:, 1] > 0 for _, plain in arrays], axis=0)
    return [
        Timings(drafted[:, timed], plain[timed], each.alpha, _among(each.swaps, timed))
        for each, (drafted, plain) in zip(drafters, arrays, strict=True)
    ]


def _among(swaps: np.ndarray | None, timed: np.ndarray) -> np.ndarray | None:
    return None if swaps is None else swaps[:, timed][:, :, timed]


def _log_speedups(timings: Timings, chosen_by: ArrayLike | None = None) -> np.ndarray:
    """Return the logarithm of the speed-up of the fastest column, then without each conversation, [1 + G].

    Each third of the conversations is timed at the column that is fastest on the other two thirds. Tokens and seconds
    are summed over PARTITIONS random partitions. The choice is repeated without each conversation, so the interval
    contains its uncertainty (Bates, Hastie and Tibshirani, "Cross-validation: what does it estimate and how well does
    it do it?", JASA 2024). Conversations without timings of plain decoding are left out.

    chosen_by: See speedup.
    """
    plain = np.asarray(timings.plain, dtype=float)  # [G, 2]
    timed = plain[:, 1] > 0
    plain = plain[timed]
    drafted = np.asarray(timings.drafted, dtype=float)[:, timed]  # [C, G, 2]
    judged = drafted if chosen_by is None else np.asarray(chosen_by, dtype=float)[:, timed]
    n = len(plain)
    if not n:
        return np.array([math.nan])
    kept = np.vstack([np.ones(n), 1 - np.eye(n)]) if n > 1 else np.ones((1, n))  # [1 + G, G]
    with np.errstate(divide="ignore", invalid="ignore"):
        base = kept @ plain
        if n > 1 and (swaps := _among(timings.swaps, timed)) is not None:
            drafted = _swapped(drafted, swaps)
        chosen = _at_cross_validated_column(drafted, judged, kept)
        logs = np.log(chosen[:, 0] / chosen[:, 1]) - np.log(base[:, 0] / base[:, 1])
    # an interval of one conversation has no width
    return logs if n > 1 else np.repeat(logs, 1 + n)


def k_of_others(predicted: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return for each of these conversations the column with the fewest seconds on all other conversations, [G].

    predicted: Predicted seconds of all conversations, [C, K]. rows: Conversations of which K is wanted, [G].
    """
    return (predicted.sum(0) - predicted[rows]).argmin(-1)


def swaps_of(predicted: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return by which factor the seconds of each conversation change if another one is left out, [G left out, G].

    The column of a conversation is the one with the fewest predicted seconds on the other conversations, see
    k_of_others. Without a conversation, it is chosen again on those that are left.
    """
    seconds = predicted[rows]
    usual = k_of_others(predicted, rows)
    chosen = (predicted.sum(0) - seconds[None] - seconds[:, None]).argmin(-1)
    np.fill_diagonal(chosen, usual)
    own = np.arange(len(rows))
    return seconds[own, chosen] / seconds[own, usual]


def _swapped(drafted: np.ndarray, swaps: np.ndarray) -> np.ndarray:
    """Return tokens and seconds of all conversations, then without each of them, [1 + G, C, G, 2]. See Timings."""
    seconds = np.concatenate([np.ones((1, *swaps.shape[::2])), swaps.swapaxes(0, 1)])
    return drafted * np.stack([np.ones_like(seconds), seconds], -1)


def _at_cross_validated_column(drafted: np.ndarray, judged: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Return tokens and seconds with drafts, [1 + G, 2]: sums over the parts of all partitions.

    Args:
        drafted: Tokens and seconds by column and conversation, [C, G, 2]; or [1 + G, C, G, 2], if they depend on which
            conversation is left out.
        judged: Tokens and seconds by which the fastest column is chosen, [C, G, 2].
        kept: 1 for the conversations to use, [1 + G, G].
    """
    if drafted.shape[-3] == 1:
        return (kept[:, None] @ drafted[..., 0, :, :])[:, 0]
    n = kept.shape[1]
    rng = np.random.default_rng(0)
    parts = min(PARTS, n)
    part_of = np.stack([rng.permutation(n) % parts for _ in range(PARTITIONS)])
    part = (part_of[:, None] == np.arange(parts)[:, None]).reshape(-1, n)  # [parts * P, G]

    def sums(rows: np.ndarray, of: np.ndarray) -> np.ndarray:
        """Return sums over conversations, [1 + G, rows, C, 2]. rows: [1 + G, rows, G]. of: as drafted."""
        flat = of.swapaxes(-3, -2).reshape(*of.shape[:-3], n, -1)
        return (rows @ flat).reshape(*rows.shape[:2], -1, 2)

    timed = sums(kept[:, None] * part, drafted)
    others = sums(kept[:, None] * ~part, judged)
    # if the other parts have no timing, all conversations decide
    others = np.where(others[..., 1:] > 0, others, sums(kept[:, None], judged))
    rates = np.nan_to_num(others[..., 0] / others[..., 1])  # [1 + G, parts * P, C]
    best = rates.argmax(-1)[..., None, None]
    return np.take_along_axis(timed, best, 2).sum((1, 2))


def _seconds_per_token(timing: Timing) -> float:
    """Return the seconds per token, or 0 if no token was decoded after the prefill."""
    return timing[1] / timing[0] if timing[0] else 0.0
