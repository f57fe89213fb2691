"""The figures of benchmarks.noise are those of its scores."""

import pytest
from helpers.scores import UNEVEN, change, score

from benchmarks.noise import result
from draftlab.results.score import Score


def uneven(name: str, speed: float) -> Score:
    """Return a score of prompts that take 0.3 to 1.4 s without a draft, 10.2 s in all, and 0.3 s / speed with it."""
    return change(score(name, speed=speed), plain=UNEVEN)


def test_a_run_is_wrong_if_it_contradicts_the_reference():
    quiet = [uneven("good", 1), uneven("bad", 0.32)]
    # 10.2 s of plain decoding; 12 prompts of 0.3 s, or 0.3 / 0.32 s
    assert [draft.best_k_speedup.value for draft in quiet] == [
        pytest.approx(10.2 / 3.6),
        pytest.approx(0.32 * 10.2 / 3.6),
    ]
    doubled = [uneven("good", 2), uneven("bad", 0.64)]
    swapped = [uneven("good", 0.2), uneven("bad", 2)]
    undecided = [uneven("good", 0.36), uneven("bad", 0.1)]
    counted = result(quiet, [quiet, doubled, swapped, undecided])
    assert counted["runs"] == 4
    # 0.36 * 10.2 / 3.6 = 1.02, whose interval contains 1
    assert (counted["decided"], counted["right"], counted["wrong"]) == (3, 2, 1)
    assert (counted["false_faster"], counted["doubtful"]) == (1, 0)
    # of eight intervals, those of the first run contain the reference, and no other run does
    assert (counted["timed_intervals"], counted["coverage"]) == (8, 0.25)
    assert counted["winners"] == {"good": 3, "bad": 1}


def test_a_wrong_order_of_two_drafts_is_wrong():
    quiet = [uneven("good", 2), uneven("bad", 1)]
    swapped = [uneven("good", 1), uneven("bad", 2)]
    assert result(quiet, [quiet, quiet])["wrong"] == 0
    assert result(quiet, [quiet, swapped])["wrong"] == 1
