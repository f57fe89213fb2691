"""A timing that may end early keeps 5 %: its levels are those of the literature, and of simulated walks."""

import numpy as np
import pytest
from helpers.simulated import drawn, timed
from scipy.stats import norm

from draftlab.intervals import Interval, Timings, best_of, speedup
from draftlab.sequential import _levels_of, is_decided, levels, looks_of


def level(z: float) -> float:
    return 2 * norm.sf(z)


@pytest.mark.parametrize(("first", "second"), [(2.178, 2.178), (2.797, 1.977)], ids=["Pocock", "O'Brien and Fleming"])
def test_two_looks_have_the_critical_values_of_the_tables(first, second):
    """Jennison and Turnbull, Group Sequential Methods, 2000, tables 2.1 and 2.3, for two looks at 5 %."""
    found = _levels_of([1, 2], [level(first), 0.05])
    assert found == pytest.approx([level(first), level(second)], rel=0.005)


@pytest.mark.parametrize("total", [8, 12, 13, 24, 60])
def test_all_looks_together_are_wrong_in_five_per_cent(total):
    looks = looks_of(total)
    walks = np.random.default_rng(total).standard_normal((100_000, total)).cumsum(1)
    outside = np.zeros(len(walks), bool)
    for look, share in zip(looks, levels(looks), strict=True):
        outside |= np.abs(walks[:, look - 1]) > norm.isf(share / 2) * np.sqrt(look)
    assert outside.mean() == pytest.approx(0.05, abs=4 * np.sqrt(0.05 * 0.95 / len(walks)))


def test_a_timing_without_an_earlier_look_keeps_the_usual_level():
    assert looks_of(6) == [6]
    assert levels([6]) == pytest.approx([0.05])
    # the time was over at the tenth of 24 conversations, after a look at the eighth
    early, last = levels([8, 10], 24)
    assert early == pytest.approx(0.05 / 9)
    assert early < last < 0.05


@pytest.mark.parametrize(
    ("ends", "slower", "ended"),
    [
        ((0.7, 0.9), [False], True),  # no draft helps
        ((1.2, 2.0), [True, True], True),  # the order is known
        ((1.2, 2.0), [True, False], False),
        ((1.20, 1.25), [False], True),  # narrow enough
        ((0.9, 1.3), [], False),
    ],
)
def test_a_timing_ends_once_it_is_decided(ends, slower, ended):
    low, high = ends
    gain = Interval(value=(low + high) / 2, low=low, high=high, n=8)
    assert is_decided(gain, slower, precision=0.05) == ended
    few = gain.model_copy(update={"n": 3})
    assert not is_decided(few, slower, precision=0.05)


def test_intervals_at_a_lower_level_are_as_much_wider_as_student_says():
    whole = drawn(9)
    narrow, wide = speedup(whole), speedup(whole._replace(alpha=0.01))
    from scipy.stats import t

    assert (wide.high - wide.value) / (narrow.high - narrow.value) == pytest.approx(t.isf(0.005, 8) / t.isf(0.025, 8))
    assert best_of([whole, whole._replace(alpha=0.01)]).low < best_of([whole, whole]).low


def test_the_choice_of_k_is_repeated_without_each_conversation():
    """The jackknife values are those of scores in which the conversation was never there."""
    rng = np.random.default_rng(3)
    plain = timed(rng.lognormal(0, 0.2, 5))
    seconds = rng.lognormal(-0.2, 0.2, 5)
    swaps = rng.lognormal(0, 0.1, (1, 5, 5))
    found = speedup(Timings([timed(seconds)], plain, 0.05, swaps))
    left = []
    for out in range(5):
        kept = [i for i in range(5) if i != out]
        left.append(plain[kept, 1].sum() / (seconds * swaps[0, out])[kept].sum())
    error = np.sqrt(4 / 5 * ((left - np.mean(left)) ** 2).sum())
    assert found.value == pytest.approx(plain[:, 1].sum() / seconds.sum())
    assert found.high - found.value == pytest.approx(2.776445 * error)  # Student's, 4 degrees
