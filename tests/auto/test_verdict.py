"""A verdict says no more than its measurements: a gain beyond the noise, at some streams or all, or no draft."""

from pathlib import Path

import pytest

from draftlab.config.kinds import parse_drafter
from draftlab.drafters.fallback import FallbackSpec
from draftlab.intervals import Interval
from draftlab.searching.verdict import Arm, judged


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


def test_candidates_have_the_names_of_their_scores():
    assert Arm(kind="draft", draft=Path("runs/a/2x64-1")).name == "2x64-1"
    drafter = FallbackSpec.of(draft="runs/a/2x64", draft_tokens=2)
    assert drafter.text == "fallback:draft=runs/a/2x64,draft_tokens=2"
    assert (
        Arm(kind="fallback", drafter=drafter).name
        == drafter.name
        == parse_drafter(drafter.text).name
    )
