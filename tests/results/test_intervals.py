"""Intervals are Student's, over conversations; a winner's gain is a choice's; few conversations decide nothing."""

import json
import math

import numpy as np
import pytest
from helpers.scores import PROMPTS, change, plain, score, speculative
from helpers.simulated import drawn, timed
from scipy import stats

from draftlab.intervals import (
    FEWEST,
    Interval,
    Timings,
    against_first,
    best_of,
    by_conversation,
    ratio,
    rows_to_reach,
    speedup,
    speedup_ratio,
)
from draftlab.results.ranking import missed_thresholds, rank, score_warnings, verdict_lines
from draftlab.results.score import PromptRecord, Score


@pytest.mark.parametrize("n", [2, 5, 30])
def test_the_interval_of_a_mean_is_students(n):
    values = np.random.default_rng(n).normal(10, 1, n)
    found = ratio(np.stack([values, np.ones(n)], 1))
    low, high = stats.t.interval(0.95, n - 1, values.mean(), stats.sem(values))
    assert (found.value, found.low, found.high) == pytest.approx((values.mean(), low, high))


@pytest.mark.parametrize("ks", [1, 4])
def test_a_speed_up_without_each_conversation_makes_its_interval(ks):
    whole, n = drawn(9, ks), 9
    found = speedup(whole)
    if ks == 1:  # the choice among several K draws other partitions for other conversations
        left = np.array([speedup(Timings(*(np.delete(each, g, -2) for each in whole[:2]))).value for g in range(n)])
        half = stats.t.ppf(0.975, n - 1) * np.sqrt((n - 1) * left.var())
        assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half))
    assert 0 <= found.low < found.value < found.high
    assert found.n == n


def test_one_k_among_slow_ones_is_chosen_everywhere():
    """A K that is fastest on every conversation has the interval that it has alone."""
    fast = drawn(12)
    slow = np.concatenate([fast.drafted, np.asarray(fast.drafted) * [1, 3]])
    assert speedup(Timings(slow, fast.plain)).value == pytest.approx(speedup(fast).value)
    assert speedup(Timings(slow, fast.plain)).low == pytest.approx(speedup(fast).low)


def test_a_ratio_and_its_inverse_have_inverse_intervals():
    a, b = drawn(10, 3, seed=1), drawn(10, 3, seed=2)
    for paired in (True, False):
        over, under = (speedup_ratio(*pair, paired=paired) for pair in ((a, b), (b, a)))
        inverse = (1 / under.value, 1 / under.high, 1 / under.low)
        assert (over.value, over.low, over.high) == pytest.approx(inverse)


@pytest.mark.parametrize("paired", [True, False])
def test_where_spreads_are_small_a_ratio_has_the_interval_of_scipys_t_test(paired):
    """Then logs are linear: the ratio is 1 plus a difference of means."""
    rng, small = np.random.default_rng(4), 1e-4
    a, b = rng.normal(0, small, 12), rng.normal(0, 2 * small, 12 if paired else 7)
    over, under = (Timings(timed(1 - x)[None], timed(np.ones(len(x)))) for x in (a, b))
    found = speedup_ratio(over, under, paired=paired)
    test = stats.ttest_rel(a, b) if paired else stats.ttest_ind(a, b, equal_var=False)
    ends = test.confidence_interval(0.95)
    assert found.low - 1 == pytest.approx(ends.low, rel=1e-2)
    assert found.high - 1 == pytest.approx(ends.high, rel=1e-2)


def test_turns_are_summed_and_copies_of_a_turn_narrow_nothing():
    talks = np.random.default_rng(5).uniform(1, 2, (6, 2))
    split = np.repeat(talks / 3, 3, 0)
    numbers = np.repeat(np.arange(6), 3).tolist()
    assert by_conversation(split, numbers) == pytest.approx(talks)
    assert by_conversation(talks, [None] * 6) == pytest.approx(talks)
    assert by_conversation(talks, [0, None, 0, 1, 0, None]).shape == (4, 2)
    alone, summed = ratio(split), ratio(by_conversation(split, numbers))
    assert (alone.n, summed.n) == (18, 6)
    assert alone.high - alone.low < summed.high - summed.low


def test_a_winner_among_equals_is_not_praised_and_one_that_wins_always_is():
    one = drawn(12)
    assert best_of([one] * 4).value == pytest.approx(speedup(one).value)
    equal = [drawn(12, seed=seed, gain=1.0, spread=0.3) for seed in range(8)]
    equal = [Timings(each.drafted, equal[0].plain) for each in equal]
    best = max(speedup(each).value for each in equal)
    assert best_of(equal).value < best
    far = Timings(np.asarray(one.drafted) * [1, 0.2], one.plain)
    assert best_of([one, far, one]).value == pytest.approx(speedup(far).value)


def test_a_run_on_a_machine_half_as_fast_changes_nothing():
    a, b = drawn(10, 2, seed=1), drawn(10, 2, seed=2)
    b = Timings(b.drafted, a.plain)
    slower = Timings(*(np.asarray(each) * [1, 2] for each in b[:2]))
    same, other = best_of([a, b]), best_of([a, slower])
    assert (same.value, same.low, same.high) == pytest.approx((other.value, other.low, other.high))
    (here,), (there,) = against_first([a, b]), against_first([a, slower])
    assert here.ratio.value == pytest.approx(there.ratio.value)


def test_two_drafters_have_the_interval_of_a_paired_ratio_and_more_have_wider_ones():
    fast, slow = drawn(12, gain=1.5, seed=1), drawn(12, gain=1.2, seed=2)
    slow = Timings(slow.drafted, fast.plain)
    pair = speedup_ratio(slow, fast, paired=True)
    (alone,) = against_first([fast, slow])
    assert (alone.ratio.low, alone.ratio.high) == pytest.approx((pair.low, pair.high))
    among = against_first([fast, slow, slow, slow])
    assert all(each.ratio.high > pair.high for each in among)


def test_the_number_of_conversations_that_decides_is_the_least_that_would():
    gain = speedup(drawn(8, gain=1.3, spread=0.1))
    bar = gain.value - 0.02
    rows = rows_to_reach(gain, bar)
    assert rows is not None
    error = (gain.high - gain.value) / stats.t.ppf(0.975, 7) * math.sqrt(8)

    def chance(n: int) -> float:
        return float(stats.norm.cdf(0.02 / (error / math.sqrt(n)) - stats.t.ppf(0.975, n - 1)))

    assert chance(rows) >= 0.8 > chance(rows - 1)
    assert rows_to_reach(gain, gain.value) is None
    assert rows_to_reach(gain, gain.value - 1e-5) is None


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_few_conversations_decide_nothing_and_say_so(n):
    found = speedup(drawn(n, gain=100.0, spread=1e-6))
    assert (found.above(1), found.decides, found.n) == (n >= FEWEST,) * 2 + (n,)
    assert not speedup(drawn(n, gain=0.01, spread=1e-6)).above(0.005) or n >= FEWEST
    text = json.loads(found.model_dump_json())
    assert (text["low"] is None) == (text["high"] is None) == (n < 2)
    assert Interval.model_validate(text) == found
    assert (" to " in str(found)) == (" to " in found.as_speedup()) == (n >= FEWEST)


# scores


def with_talks(base: Score, turns: int) -> Score:
    prompts = [PromptRecord(tokens=9, conversation=i // turns) for i in range(PROMPTS)]
    return change(base, prompts=prompts)


def test_a_score_counts_conversations_and_an_older_one_its_requests():
    assert [with_talks(score(), turns).best_k_speedup.n for turns in (1, 2, 3)] == [12, 6, 4]
    older = change(score(), prompts=[PromptRecord(tokens=9) for _ in range(PROMPTS)])
    assert (older.conversations, change(score(), prompts=[]).conversations) == (PROMPTS, PROMPTS)
    assert len(score_warnings([older])) == 1 + len(score_warnings([score()]))


@pytest.mark.parametrize(
    ("base", "decided"),
    [
        (with_talks(score(), 3), True),
        (with_talks(score(), 4), False),
        (with_talks(score(), PROMPTS), False),
        (change(score(), speculative={4: [plain(i, 0.3) for i in range(PROMPTS)]}), False),
    ],
    ids=["4 conversations", "3 conversations", "1 conversation", "nothing was drafted"],
)
def test_a_score_without_a_verdict_names_the_reason(base, decided):
    assert (base.undecided is None) == decided
    (line,) = verdict_lines(rank([base]))
    if base.undecided is not None:
        assert base.undecided in line
        assert base.undecided in base.headline()
    assert bool(missed_thresholds(rank([base])[0], 1.5, None)) != decided


def test_requests_that_took_no_time_are_refused():
    base, ended = score().model_dump(), [plain(i, 0.0).model_dump() for i in range(PROMPTS)]
    with pytest.raises(ValueError, match="0"):
        Score.model_validate(base | {"plain": ended})


def test_a_score_that_names_no_conversations_is_paired_with_one_that_does():
    named, older = with_talks(score("a"), 2), change(score("b", speed=0.9), prompts=[])
    behind = rank([named, older])[1].ratio_to_fastest
    assert behind is not None
    assert behind.n == PROMPTS // 2


def test_the_bar_is_for_the_low_end():
    """Requests gain 2 on average, and their interval is wide."""
    runs = [speculative(i, [4, 2, 0, 3, 1], 4, 0.15 if i % 2 else 0.45) for i in range(PROMPTS)]
    wide = rank([change(score(), speculative={4: runs})])[0]
    assert wide.gain.value == pytest.approx(2)
    assert wide.gain.low < 1.5
    assert not missed_thresholds(wide, wide.gain.low - 0.01, None)
    for bar in (1.5, 2.5):
        assert missed_thresholds(wide, bar, None)
