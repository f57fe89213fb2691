"""The figures of benchmarks.noise are those of its scores."""

import pytest
from test_report import UNEVEN, change, score

from benchmarks.noise import result
from draftlab.results.score import Score


def uneven(name: str, speed: float) -> Score:
    """Prompts of 0.3 to 1.4 s without a draft, 10.2 in all, and of 0.3 s / speed with it."""
    return change(score(name, speed=speed), plain=UNEVEN)


def test_spread_coverage_and_false_praise_are_counted():
    quiet = {"good": uneven("good", 1), "bad": uneven("bad", 0.32)}
    wrong = {"good": uneven("good", 2), "bad": uneven("bad", 0.64)}
    assert [quiet[name].best_k_speedup.value for name in quiet] == [
        pytest.approx(10.2 / 3.6),
        pytest.approx(0.32 * 10.2 / 3.6),
    ]
    found = result(quiet, [quiet, wrong])
    assert found["best"] == [pytest.approx(10.2 / 3.6), pytest.approx(20.4 / 3.6)]
    # of 1 and 2: standard deviation over mean
    assert found["relative_spread"] == pytest.approx(0.5**0.5 / 1.5)
    assert found["coverage"] == 0.5
    # the interval of 0.91 holds 1
    assert [found[name] for name in ("answered", "right", "wrong", "false_faster")] == [3, 2, 1, 1]
    assert (found["scores"], found["cannot_tell"], found["reference_in_doubt"]) == (4, 0, [])
