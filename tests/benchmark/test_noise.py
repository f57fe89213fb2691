"""The figures of benchmarks.noise are those of its scores."""

import pytest
from test_report import score

from benchmarks.noise import result


def test_spread_coverage_and_false_praise_are_counted():
    quiet = {"good": score("good"), "bad": score("bad", speed=0.4)}
    assert [quiet[name].best_k_speedup.value for name in quiet] == [pytest.approx(2), pytest.approx(0.8)]
    wrong = {"good": score("good", speed=1.1), "bad": score("bad", speed=0.8)}  # 2.2, not covered; 1.6, falsely praised
    found = result(quiet, [quiet, wrong])
    assert found["best"] == [pytest.approx(2), pytest.approx(2.2)]
    assert found["relative_spread"] == pytest.approx(2**0.5 * 0.1 / 2.1)  # of 2 and 2.2: standard deviation over mean
    assert found["coverage"] == 0.5
    assert found["false_faster"] == 1
    assert (found["scores"], found["cannot_tell"], found["reference_in_doubt"]) == (4, 0, [])
