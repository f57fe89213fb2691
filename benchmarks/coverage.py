"""Measure how often intervals contain the truth, in simulated scores: python -m benchmarks.coverage [--scores N]

A simulated score has the timings of n conversations, drawn so that the true speed-up of every drafter at every K is
known. draftlab.intervals makes all intervals. A cell is a number of conversations in a setting. Every factor below
appears at every number of conversations, but not every combination of factors. The benchmark takes about 15 minutes of
one quiet core. The last line is one JSON object, which is also written to benchmarks/results/coverage.json:

coverage_min, coverage_mean: share of the 95 % intervals that contain the truth, in the worst cell and over all cells.
false_faster_max, false_faster_mean: share of the scores whose interval lies above the truth. With a true speed-up of 1,
    these scores call a draft "faster".
false_slower_max: share of the scores of equal drafters that call any of them "slower" than the fastest.
winner_bias_max: how far the speed-up of the best of several drafters is, on average, above that of the truly fastest
    drafter named beforehand, with 8 or more conversations.
seconds_for_44x6x8: CPU seconds for all intervals of a score of eight drafters at six K with 44 conversations.
missed: bars that the cells miss, see BARS.
table: rows of docs/method.md by scenario and number of conversations.
cells: all cells.

How scores are drawn (sd is the standard deviation of a logarithm):
* A request takes longer or shorter with drafts by a factor that all drafters share: its sd is the spread.
* Each drafter varies by a factor of its own, and each K of a drafter by another. Timing noise has an sd of .03.
* With rare requests, .15 of the requests gain nothing from a draft.
* The requests of a conversation correlate as given.
* A timing that may end early looks at its first 8, 12 and 24 conversations, with the levels and the rule of
  draftlab/sequential.py, and says what it says when it ends. Where K is chosen by predictions, each conversation is
  timed at the K with the fewest predicted seconds on the other conversations. Predictions differ from timings by the
  noise of both, and by an error of each drafter at each K with an sd of .03. --early simulates these timings alone,
  and writes benchmarks/results/coverage_early.json.

Where the truth depends on what a score chooses, it is the true speed-up of the drafter and K that the score names.

If rare requests are a kind of their own, because all others are alike (a spread of .1) or gain much (a true speed-up of
2), no interval of a few conversations can know of them. These cells are in the table, but not under the bars. Rare
requests with larger spreads and a true speed-up of 1.3 are under the bars. The control is a percentile bootstrap, which
misses the bars.
"""

import argparse
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks import environment
from draftlab import intervals
from draftlab.console import note
from draftlab.intervals import Interval, Timings
from draftlab.sequential import is_decided, levels, looks_of

RESULT = Path(__file__).parent / "results" / "coverage.json"
EARLY_RESULT = RESULT.with_name("coverage_early.json")
SIZES = (4, 6, 8, 12, 24, 44)
TOKENS, PLAIN_SECONDS = 64.0, 0.64
PLAIN_SD, NOISE_SD, K_SD = 0.05, 0.03, 0.05
RARE_SHARE = 0.15
FLAT, PEAKED = (1.3,) * 5, (1.18, 1.28, 1.30, 1.27, 1.20)
ONE, SEVERAL, TURNS = "one drafter, one K", "one drafter, K of five", "several turns"
RATIO, WINNER = "ratio of two drafters", "best of several drafters"
LOOKS = "timing that may end early"
PREDICTED_K = "the same, K chosen by predictions"
PREDICTION_SD = 0.03
PRECISION = 0.05  # default of draftlab score --precision
# by the true speed-up of all requests; that of the requests that gain follows from it
RARE = {truth: f"rare requests, speed-up {truth}" for truth in (1.3, 1.5, 2.0)}
# the same, where the other requests do not agree
VARYING = "rare requests, speed-up 2.0, others vary"
CONTROL = "control: percentile bootstrap"
# the level of a test of two equal drafters, 5 %, is so close to its bar that chance would decide
MORE = 5
# what the cells must keep: the smallest and the largest value
BARS = {
    "coverage_min": (0.92, 1.0),
    "coverage_mean": (0.94, 0.96),
    "false_faster_max": (0.0, 0.048),
    "false_faster_mean": (0.0, 0.03),
    "false_slower_max": (0.0, 0.06),
    "winner_bias_max": (-1.0, 0.015),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A setting in which scores are simulated.

    n: Number of conversations. truths: True speed-ups by drafter and K. spread: Sd of the factor that drafters share.
    own: Sd of each drafter's factor. paired: Whether two drafters decode the same requests. times: Factor by which the
    cell has more scores than others.
    """

    scenario: str
    n: int
    truths: tuple[tuple[float, ...], ...] = ((1.3,),)
    spread: float = 0.25
    own: float = 0.0
    rare: bool = False
    turns: int = 1
    correlation: float = 0.0
    paired: bool = True
    times: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulated score says.

    truth: True value of what the estimate is of. named: Speed-up of the truly fastest drafter. slower: Whether any
    drafter is called slower.
    """

    estimate: Interval
    truth: float
    named: float | None = None
    slower: bool | None = None


def cells(sizes: Sequence[int] = SIZES) -> list[Cell]:
    varying = [Cell(scenario=VARYING, n=n, truths=((2.0,),), rare=True) for n in sizes]
    return [cell for n in sizes for cell in _cells_of(n)] + varying


def early_cells(sizes: Sequence[int] = (12, 24, 44)) -> list[Cell]:
    """Return the cells of timings that may end early."""
    one_k = [
        Cell(scenario=LOOKS, n=n, truths=((truth,),) * drafters, spread=spread, own=own)
        for n in sizes
        for truth in (1.0, 1.3)
        for drafters, own in ((1, 0.0), (2, 0.05), (4, 0.2))
        for spread in (0.1, 0.25)
    ]
    return one_k + [
        Cell(scenario=PREDICTED_K, n=n, truths=(truths,) * drafters, spread=0.25, own=own)
        for n in sizes
        for truths in ((1.0,) * 5, FLAT, PEAKED)
        for drafters, own in ((1, 0.0), (2, 0.05), (4, 0.2))
    ]


def _cells_of(n: int) -> list[Cell]:
    spreads = [
        {"spread": 0.1},
        {"spread": 0.25},
        {"spread": 0.45},
        {"spread": 0.25, "rare": True},
        {"spread": 0.45, "rare": True},
    ]
    found = [Cell(scenario=ONE, n=n, **spread) for spread in spreads]
    peaked, flat = spreads[::2] + spreads[3:4], spreads[1:2] + spreads[4:]
    found += [Cell(scenario=SEVERAL, n=n, truths=(PEAKED,), **spread) for spread in peaked]
    found += [Cell(scenario=SEVERAL, n=n, truths=(FLAT,), **spread) for spread in flat]
    found += [
        Cell(scenario=TURNS, n=n, turns=turns, correlation=correlation, spread=spread)
        for turns in (2, 4)
        for correlation in (0.3, 0.7)
        for spread in (0.25, 0.45)
    ]
    found.append(Cell(scenario=TURNS, n=n, turns=2, correlation=0.7, truths=(PEAKED,)))
    for paired in (True, False):
        found += [
            Cell(scenario=RATIO, n=n, truths=((1.3,), (1.2,)), own=own, paired=paired) for own in (0.05, 0.1, 0.2)
        ]
    found.append(Cell(scenario=RATIO, n=n, truths=(PEAKED, PEAKED), own=0.1))
    rankings = [((1.3,) * drafters, own) for drafters in (2, 4, 8) for own in (0.05, 0.2)]
    rankings += [
        ((1.3 * gain, *(1.3,) * (drafters - 1)), 0.1) for gain, drafters in ((1.05, 2), (1.05, 8), (1.1, 4), (1.1, 8))
    ]
    rankings += [(tuple(1.3 * (1 - 0.03 * step) for step in range(drafters)), 0.1) for drafters in (4, 8)]
    found += [
        Cell(
            scenario=WINNER,
            n=n,
            truths=tuple((each,) for each in truths),
            spread=0.2,
            own=own,
            times=MORE if len(truths) == 2 and len(set(truths)) == 1 else 1,
        )
        for truths, own in rankings
    ]
    found.append(Cell(scenario=WINNER, n=n, truths=(FLAT,) * 4, spread=0.2, own=0.1))
    found += [
        Cell(scenario=scenario, n=n, truths=((truth,),), spread=0.1, rare=True) for truth, scenario in RARE.items()
    ]
    return found


def simulated(cell: Cell, scores: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return a cell with the shares of its scores that are right and wrong."""
    draws = _draws(cell, scores, rng)
    if cell.scenario == PREDICTED_K:
        outcomes = [_looked(cell, *_at_predicted_k(drafters, rng)) for drafters, _ in draws]
    else:
        outcomes = [_outcome(cell, *timings) for timings in draws]
    return dataclasses.asdict(cell) | {"scores": scores} | _shares(outcomes)


def _shares(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    estimates = [(outcome.estimate, outcome.truth) for outcome in outcomes]
    named = [outcome.named for outcome in outcomes if outcome.named is not None]
    slower = [outcome.slower for outcome in outcomes if outcome.slower is not None]
    value = mean(estimate.value for estimate, _ in estimates)
    return {
        "coverage": mean(each.low <= truth <= each.high for each, truth in estimates),
        "false_faster": mean(each.above(truth) for each, truth in estimates),
        "bias": mean(each.value / truth for each, truth in estimates) - 1,
        "width": median((each.high - each.low) / each.value for each, _ in estimates),
        "over_named": value / mean(named) - 1 if named else None,
        "false_slower": mean(slower) if slower else None,
    }


def _draws(cell: Cell, scores: int, rng: np.random.Generator) -> Iterable[tuple[list[Timings], list[Timings]]]:
    """Yield the timings of all drafters in each score, and those of a second run with other requests."""
    runs = [_seconds(cell, scores, rng) for _ in range(1 if cell.paired else 2)]
    for score in range(scores):
        first, *others = [_timings(cell, plain[score], drafted[score]) for plain, drafted in runs]
        yield first, others[0] if others else first


def _seconds(cell: Cell, scores: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds of requests, plain [scores, R] and with drafts [scores, M, K, R]. R: requests. M: drafters."""
    truths = np.array(cell.truths)[..., None]
    shape = (scores, cell.n, cell.turns)
    requests = (scores, cell.n * cell.turns)
    shared, rest = math.sqrt(cell.correlation), math.sqrt(1 - cell.correlation)
    common = shared * rng.standard_normal((*shape[:2], 1)) + rest * rng.standard_normal(shape)
    length = _mean_one(common.reshape(requests), cell.spread)
    own = _mean_one(rng.standard_normal((scores, len(truths), 1, requests[1])), cell.own)
    by_k = rng.standard_normal((scores, *truths.shape[:2], requests[1]))
    factors = length[:, None, None] * own * _mean_one(by_k, math.hypot(K_SD, NOISE_SD))
    gains = np.broadcast_to(truths, factors.shape)
    if cell.rare:
        # the other requests gain as much more as makes the truth
        more = (1 - RARE_SHARE) / (1 / truths - RARE_SHARE)
        gains = np.where(rng.random((scores, 1, 1, requests[1])) < RARE_SHARE, 1.0, more)
    plain = PLAIN_SECONDS * _mean_one(rng.standard_normal(requests), PLAIN_SD)
    timed = plain * _mean_one(rng.standard_normal(requests), NOISE_SD)
    return timed, plain[:, None, None] * factors / gains


def _mean_one(normal: np.ndarray, sd: float) -> np.ndarray:
    """Return log-normal factors with mean 1. normal: standard normal numbers."""
    return np.exp(sd * normal - sd**2 / 2)


def _timings(cell: Cell, plain: np.ndarray, drafted: np.ndarray) -> list[Timings]:
    """Return the timings of each drafter, whose rows are conversations. plain: [R]. drafted: [M, K, R]."""
    seconds = np.vstack([plain, drafted.reshape(-1, len(plain))])
    if cell.turns > 1:
        numbers = np.repeat(np.arange(cell.n), cell.turns).tolist()
        seconds = intervals.by_conversation(seconds.T, numbers).T
    tokens = np.full(seconds.shape, TOKENS * cell.turns)
    rows = np.stack([tokens, seconds], -1)
    columns = rows[1:].reshape(*drafted.shape[:2], cell.n, 2)
    return [Timings(each, rows[0]) for each in columns]


def _outcome(cell: Cell, drafters: list[Timings], others: list[Timings]) -> Outcome:
    if cell.scenario == RATIO:
        estimate = intervals.speedup_ratio(drafters[0], others[1], paired=cell.paired)
        named = [_named_truth(cell, 0, drafters[0]), _named_truth(cell, 1, others[1])]
        return Outcome(estimate=estimate, truth=named[0] / named[1])
    if cell.scenario == LOOKS:
        return _looked(cell, drafters, [0] * len(drafters))
    if cell.scenario != WINNER:
        truth = _named_truth(cell, 0, drafters[0])
        return Outcome(estimate=intervals.speedup(drafters[0]), truth=truth)
    values = [intervals.speedup(each).value for each in drafters]
    order = sorted(range(len(values)), key=lambda i: -values[i])
    slower = None
    if len(set(cell.truths)) == 1:
        compared = intervals.against_first([drafters[i] for i in order])
        slower = any(each.ratio.below(1) for each in compared)
    return Outcome(
        estimate=intervals.best_of(drafters),
        truth=_named_truth(cell, order[0], drafters[order[0]]),
        named=values[0],
        slower=slower,
    )


def _at_predicted_k(drafters: list[Timings], rng: np.random.Generator) -> tuple[list[Timings], list[int]]:
    """Return timings with each conversation at the K chosen by predictions, and the best K of each drafter."""
    columns, best = [], []
    for each in drafters:
        rows = np.asarray(each.drafted)  # [K, G, 2]
        noise = rng.standard_normal(rows.shape[:2]) * NOISE_SD
        error = rng.standard_normal((len(rows), 1)) * PREDICTION_SD
        predicted = (rows[..., 1] * np.exp(noise + error)).T
        everyone = np.arange(len(predicted))
        ks = intervals.k_of_others(predicted, everyone)
        swaps = intervals.swaps_of(predicted, everyone)[None]
        columns.append(Timings(rows[ks, everyone][None], each.plain, swaps=swaps))
        best.append(int(predicted.sum(0).argmin()))
    return columns, best


def _looked(cell: Cell, drafters: list[Timings], ks: list[int]) -> Outcome:
    """Return what a timing says that ends once it is decided. ks: Index of the K that each drafter names."""
    # drafters with equal curves differ if predictions chose another K for each
    alike = len(drafters) > 1 and len({truths[k] for truths, k in zip(cell.truths, ks, strict=True)}) == 1
    for look, level in zip(looks_of(cell.n), _levels(cell.n), strict=True):
        shown = [
            Timings(
                np.asarray(each.drafted)[:, :look],
                np.asarray(each.plain)[:look],
                level,
                None if each.swaps is None else each.swaps[:, :look, :look],
            )
            for each in drafters
        ]
        values = [intervals.speedup(each).value for each in shown]
        order = sorted(range(len(values)), key=lambda i: -values[i])
        ranked = [shown[i] for i in order]
        gain = intervals.best_of(ranked)
        slower = [each.ratio.below(1) for each in intervals.against_first(ranked)]
        if look == cell.n or is_decided(gain, slower, PRECISION):
            truth = cell.truths[order[0]][ks[order[0]]]
            return Outcome(estimate=gain, truth=truth, slower=any(slower) if alike else None)
    raise AssertionError("the last look is at all conversations")


@functools.cache
def _levels(conversations: int) -> list[float]:
    return levels(looks_of(conversations))


def _named_truth(cell: Cell, drafter: int, timings: Timings) -> float:
    """Return the true speed-up of a drafter at the K that is fastest on all conversations."""
    tokens, seconds = np.moveaxis(np.asarray(timings.drafted).sum(1), -1, 0)
    return cell.truths[drafter][int((tokens / seconds).argmax())]


def control(cell: Cell, scores: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return the cell of one drafter at one K as simulated does, with intervals of a percentile bootstrap."""
    draws = np.random.default_rng(0).multinomial(cell.n, [1 / cell.n] * cell.n, size=1000)
    plain, drafted = _seconds(cell, scores, rng)
    drafted = drafted[:, 0, 0]
    low, high = np.quantile((draws @ plain.T) / (draws @ drafted.T), [0.025, 0.975], axis=0)
    values = plain.sum(1) / drafted.sum(1)
    outcomes = [
        Outcome(estimate=Interval(value=value, low=low, high=high, n=cell.n), truth=cell.truths[0][0])
        for value, low, high in zip(values, low, high, strict=True)
    ]
    return dataclasses.asdict(cell) | {"scenario": CONTROL, "scores": scores} | _shares(outcomes)


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return what BARS limits, for the cells in which any kind of request is frequent."""
    rows = [row for row in rows if not is_rare(row)]
    slower = [row["false_slower"] for row in rows if row["false_slower"] is not None]
    winners = [row["over_named"] for row in rows if row["over_named"] is not None and row["n"] >= 8]
    found = {
        "coverage_min": min(row["coverage"] for row in rows),
        "coverage_mean": mean(row["coverage"] for row in rows),
        "false_faster_max": max(row["false_faster"] for row in rows),
        "false_faster_mean": mean(row["false_faster"] for row in rows),
    }
    if slower:
        found["false_slower_max"] = max(slower)
    if winners:
        found["winner_bias_max"] = max(winners)
    return found


def is_rare(row: dict[str, Any]) -> bool:
    """Return whether the row is of rare requests, which are not under the bars."""
    return row["scenario"] in (*RARE.values(), VARYING)


def missed(found: dict[str, float]) -> list[str]:
    """Return the names of the bars that figures miss."""
    return [name for name, value in found.items() if not BARS[name][0] <= value <= BARS[name][1]]


def table(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return means over the cells by scenario and number of conversations."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in dict.fromkeys(row["scenario"] for row in rows):
        found[name] = {}
        for n in dict.fromkeys(row["n"] for row in rows):
            here = [row for row in rows if row["scenario"] == name and row["n"] == n]
            found[name][str(n)] = {
                "coverage": mean(row["coverage"] for row in here),
                "lowest": min(row["coverage"] for row in here),
                "false_faster": mean(row["false_faster"] for row in here),
                "bias": mean(row["bias"] for row in here),
                "width": median(row["width"] for row in here),
            }
    return found


def seconds_of(conversations: int, ks: int, drafters: int) -> float:
    """Return the CPU seconds that all intervals of a score take, the fastest of five times."""
    rng = np.random.default_rng(0)
    cell = Cell(scenario=WINNER, n=conversations, truths=((1.3,) * ks,) * drafters)
    ((timings, _),) = _draws(cell, 1, rng)
    return min(_cpu_seconds(lambda: _all_intervals(timings)) for _ in range(5))


def _all_intervals(drafters: list[Timings]) -> None:
    for each in drafters:
        intervals.speedup(each)
    intervals.best_of(drafters)
    intervals.against_first(drafters)


def _cpu_seconds(call: Callable[[], None]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def record_early(scores: int) -> None:
    """Simulate timings that may end early, and write the record."""
    rows = []
    for number, cell in enumerate(early_cells()):
        rows.append(simulated(cell, scores, np.random.default_rng(number)))
        note(f"{cell.scenario}, n {cell.n}: {rows[-1]['coverage']:.3f} {rows[-1]['false_faster']:.3f}")
    found = figures(rows)
    result = environment(threads=1) | {
        "command": f"python -m benchmarks.coverage --early --scores {scores}",
        **found,
        "missed": missed(found),
        "cells": rows,
    }
    EARLY_RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scores", type=int, default=2000, help="simulated scores of each cell")
    parser.add_argument("--early", action="store_true", help="simulate timings that may end early, and nothing else")
    options = parser.parse_args()
    scores = options.scores
    if options.early:
        record_early(scores)
        return
    rows, controls = [], []
    for number, cell in enumerate(cells()):
        rng = np.random.default_rng(number)
        rows.append(simulated(cell, scores * cell.times, rng))
        if cell.scenario == ONE:
            controls.append(control(cell, scores, rng))
        row = rows[-1]
        note(f"{cell.scenario}, n {cell.n}: {row['coverage']:.3f} {row['false_faster']:.3f}")
    result = environment(threads=1) | {
        "command": f"python -m benchmarks.coverage --scores {scores}",
        **figures(rows),
        "seconds_for_44x6x8": seconds_of(44, 6, 8),
        "missed": missed(figures(rows)),
        "control": figures(controls) | {"missed": missed(figures(controls))},
        "table": table(rows + controls),
        "cells": rows + controls,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
