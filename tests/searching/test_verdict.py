"""A verdict says no more than its measurements: a gain beyond the noise, at some streams or all, or no draft."""

from pathlib import Path

import pytest
from helpers.scores import PROMPTS, change, score, speculative

from draftlab.drafters.base import parse_drafter
from draftlab.drafters.fallback import FallbackSpec
from draftlab.intervals import Interval
from draftlab.searching.verdict import REACHED, Arm, judged, training_ceiling, would_change


def gain(value: float, half: float = 0.05) -> Interval:
    return Interval(value=value, low=value - half, high=value + half, n=24)


@pytest.mark.parametrize(
    ("speedups", "use"),
    [
        ({1: gain(1.5)}, True),
        ({1: gain(1.03)}, False),
        ({1: gain(0.8)}, False),
        ({1: gain(1.5), 4: gain(1.2)}, True),
        ({1: gain(1.5), 16: gain(0.9)}, True),
        ({1: gain(1.2), 16: gain(0.6)}, False),
    ],
)
def test_a_draft_is_advised_where_it_gains(speedups, use):
    assert judged(speedups)[0] == use


ACCURATE = score("wide")
WRONG = [speculative(i, [0] * 15, 4, 0.9) for i in range(PROMPTS)]


@pytest.mark.parametrize(
    ("measured", "cheaper", "trains"),
    [
        (ACCURATE, 1.0, False),  # nothing cheaper can be made, and it accepts more than REACHED
        (ACCURATE, 0.1, True),  # drafting is a third of its time
        (change(ACCURATE, speculative={4: WRONG}), 1.0, True),  # nothing that it drafts is accepted
    ],
)
def test_others_are_trained_if_the_ceiling_is_above_the_noise(measured, cheaper, trains):
    arm = Arm(kind="draft", draft=Path("runs/wide"), shape="wide")
    found = training_ceiling([arm], {1: {"wide": measured}}, {"wide": cheaper})
    assert found.may_gain == trains
    gain = 1 / (1 - (1 - cheaper) / 3)
    if measured is ACCURATE:
        assert found.speedup == pytest.approx(measured.speedup_value(4) * gain)
    else:  # one token per pass becomes a geometric series
        series = sum(REACHED**i for i in range(5))
        assert found.speedup == pytest.approx(measured.speedup_value(4) * series)
    assert measured.speedup(4).as_speedup() in found.text(60)
    assert ("would save as much time" in found.text(60)) == trains


@pytest.mark.parametrize(
    ("reason", "helps"),
    [
        ("the time is too short; --minutes 90 would try all candidates", True),
        ("the target cannot be pruned: models/minutes-of-meetings is not LLaMA-like", False),
    ],
)
def test_more_time_is_advised_only_if_a_candidate_lacked_time(reason, helps):
    changes = would_change([], {1: {}}, {"draft": reason})
    assert any("--minutes" in each for each in changes) == helps


def test_candidates_have_the_names_of_their_scores():
    assert Arm(kind="draft", draft=Path("runs/a/2x64-1")).name == "2x64-1"
    drafter = FallbackSpec.of(draft="runs/a/2x64", draft_tokens=2)
    assert drafter.text == "fallback:draft=runs/a/2x64,draft_tokens=2"
    names = {Arm(kind="fallback", drafter=drafter).name, parse_drafter(drafter.text).name}
    assert names == {drafter.name}
