"""Intervals contain the truth as often as they say, in simulated scores; rivals of the method do not."""

import json
import math
from statistics import mean

import numpy as np
import pytest

from benchmarks import coverage
from benchmarks.coverage import BARS, ONE, RATIO, TURNS, WINNER, Cell
from draftlab import intervals

# standard errors by which no cell of a few hundred is away from its bar by chance
CHANCE = 3.5


def missed_beyond_chance(rows: list[dict]) -> list[str]:
    """Return the bars that are missed by more than the binomial error of the scores explains."""
    rows = [row for row in rows if not coverage.is_rare(row)]
    scores = rows[0]["scores"]
    return [
        name
        for name, value in coverage.figures(rows).items()
        if not -error(name, 0, rows, scores) <= value - BARS[name][0]
        or not value - BARS[name][1] <= error(name, 1, rows, scores)
    ]


def error(name: str, side: int, rows: list[dict], scores: int) -> float:
    share = BARS[name][side]
    if name == "winner_bias_max":  # an interval is at least four standard errors wide
        deviation = max(row["width"] for row in rows if row["n"] >= 8) / 4
    else:
        deviation = math.sqrt(max(0.0, share * (1 - share)))
    return CHANCE * deviation / math.sqrt(scores * (len(rows) if name.endswith("mean") else 1))


def simulated(cells: list[Cell], scores: int) -> list[dict]:
    return [coverage.simulated(cell, scores, np.random.default_rng(i)) for i, cell in enumerate(cells)]


@pytest.mark.slow
@pytest.mark.parametrize("n", coverage.SIZES)
def test_intervals_of_every_cell_contain_the_truth(n):
    assert missed_beyond_chance(simulated(coverage.cells([n]), 300)) == []


def test_intervals_of_few_conversations_contain_the_truth():
    cells = [
        Cell(scenario=ONE, n=4),
        Cell(scenario=ONE, n=8, spread=0.45, rare=True),
        Cell(scenario=TURNS, n=6, turns=4, correlation=0.7),
        Cell(scenario=RATIO, n=6, truths=((1.3,), (1.2,)), own=0.1),
        Cell(scenario=RATIO, n=6, truths=((1.3,), (1.2,)), own=0.1, paired=False),
        Cell(scenario=WINNER, n=8, truths=((1.3,),) * 4, spread=0.2, own=0.2),
    ]
    assert missed_beyond_chance(simulated(cells, 300)) == []


def test_a_percentile_bootstrap_misses_the_bars():
    cells = [Cell(scenario=ONE, n=n) for n in (4, 6, 8)]
    rows = [coverage.control(cell, 300, np.random.default_rng(cell.n)) for cell in cells]
    assert missed_beyond_chance(rows) == [
        "coverage_min",
        "coverage_mean",
        "false_faster_max",
        "false_faster_mean",
    ]


def test_turns_that_count_as_conversations_miss_the_bars():
    """Each request counts as a row, without by_conversation."""
    cell = Cell(scenario=TURNS, n=6, turns=4, correlation=0.7)
    plain, drafted = coverage._seconds(cell, 300, np.random.default_rng(0))
    apart = Cell(scenario=ONE, n=cell.n * cell.turns)
    outcomes = [
        coverage._outcome(apart, timings := coverage._timings(apart, *one), timings)
        for one in zip(plain, drafted, strict=True)
    ]
    row = {"scenario": ONE, "n": cell.n, "scores": 300} | coverage._shares(outcomes)
    assert "coverage_min" in missed_beyond_chance([row])


def test_the_luckiest_of_equal_drafters_misses_the_bars():
    """Its own value is too high, and tests without Holm's correction call other drafters slower."""
    cell = Cell(scenario=WINNER, n=8, truths=((1.3,),) * 8, spread=0.2, own=0.2)
    lucky, named, slower = [], [], []
    for drafters, _ in coverage._draws(cell, 100, np.random.default_rng(0)):
        values = [intervals.speedup(each).value for each in drafters]
        best = drafters[values.index(max(values))]
        ratios = [intervals.speedup_ratio(each, best, paired=True) for each in drafters]
        slower.append(any(each.high < 1 for each in ratios))
        lucky.append(max(values))
        named.append(values[0])
    assert mean(lucky) / mean(named) - 1 > 3 * BARS["winner_bias_max"][1]
    assert mean(slower) > 3 * BARS["false_slower_max"][1]


@pytest.mark.parametrize(
    "cell",
    [
        Cell(scenario=WINNER, n=30_000, truths=((1.2, 1.5), (1.1, 1.3)), own=0.2),
        Cell(scenario=ONE, n=30_000, truths=((1.5,),), rare=True),
        Cell(scenario=TURNS, n=15_000, turns=2, correlation=0.7),
    ],
)
def test_a_score_of_many_conversations_has_the_true_speedups(cell):
    """The truth of the simulation is what it says: ratios of sums, within five standard errors."""
    plain, drafted = coverage._seconds(cell, 1, np.random.default_rng(0))
    speedups = plain.sum() / drafted[0].sum(-1)
    np.testing.assert_allclose(speedups, cell.truths, rtol=5 * 0.5 / math.sqrt(cell.n))


def test_the_record_keeps_the_bars():
    record = json.loads(coverage.RESULT.read_text())
    cells = [row for row in record["cells"] if row["scenario"] != coverage.CONTROL]
    assert record["missed"] == coverage.missed(coverage.figures(cells)) == []
    assert len(cells) == len(coverage.cells())
    assert min(row["scores"] for row in record["cells"]) >= 2000
    assert record["control"]["missed"]
