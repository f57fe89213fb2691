"""A verdict says no more than its measurements: a gain beyond the noise, at some streams or all, or no draft."""

from pathlib import Path
from typing import get_args

import pytest

from draftlab.config.drafters import parse_drafter
from draftlab.drafters.fallback import FallbackSpec
from draftlab.intervals import Interval
from draftlab.searching.plan import Kind
from draftlab.searching.verdict import Candidate, Choice, Verdict, finalists, judged


def gain(value: float, half: float = 0.05) -> Interval:
    return Interval(value=value, low=value - half, high=value + half, n=24)


@pytest.mark.parametrize(
    ("speedups", "use", "said"),
    [
        ({1: gain(1.5)}, True, "beyond the noise"),
        ({1: gain(1.03)}, False, "gains nothing beyond the noise: 1.03x (0.98 to 1.08)"),
        ({1: gain(0.8)}, False, "nothing beyond the noise"),
        ({1: gain(1.5), 4: gain(1.2)}, True, "gains at 1, 4 streams"),
        ({1: gain(1.5), 16: gain(0.9)}, True, "at 16 streams it loses: turn it off there"),
        ({1: gain(1.2), 16: gain(0.6)}, False, "gains at 1 stream and loses more at 16 streams"),
    ],
)
def test_a_draft_is_advised_where_it_gains(speedups, use, said):
    verdict, reason = judged(speedups)
    assert (verdict, said in reason) == (use, True), reason


def choice(name: str, speedup: float, half: float = 0.05, changed: bool = False) -> Choice:
    return Choice(
        kind="draft", name=name, label=name, k=2, speedup=speedup, at_fewest=gain(speedup, half), tokens_per_pass=1.5,
        tokens_per_second=100, changed=changed,
    )  # fmt: skip


def test_what_is_measured_again_seemed_to_gain_and_the_second_beyond_the_noise():
    first, second, noise = choice("a", 1.2, 0.3), choice("b", 1.15), choice("c", 1.1, 0.2)
    assert finalists([first, noise, second]) == [first, second]
    assert finalists([first, second, choice("d", 1.12)]) == [first, second]
    assert finalists([first, noise]) == [first]
    assert finalists([choice("a", 0.9), second]) == []
    assert finalists([choice("a", 1.5, changed=True)]) == []


def test_no_draft_is_a_verdict_with_its_reason_and_what_would_change_it():
    verdict = Verdict(
        target="tiny", use=False, choice="no draft", speedups={1: gain(0.8)}, measured_on="on prompts",
        precision="target int8, draft int8", reason="too slow", plain_tokens_per_second=100,
        would_change=["a cheaper draft"], ranking=[], training=None,
        left_out={"eagle": "too few minutes", "fallback-eagle": "too few minutes"}, planned_minutes=10, minutes=9,
    )  # fmt: skip
    text = "\n".join(verdict.lines())
    assert text.startswith(
        "Do not use a draft here: too slow.\nmeasured: 0.80x (0.75 to 0.85) at 1 stream, on prompts; whole "
        "requests, target int8, draft int8\n"
    )
    assert "what would change it: a cheaper draft" in text
    assert "not tried: eagle, fallback-eagle: too few minutes" in text


def test_a_verdict_from_scores_in_doubt_says_that_nobody_can_tell():
    settings = {
        "target": "tiny", "use": True, "choice": "prompt lookup", "k": 3, "speedups": {1: gain(1.5)},
        "reason": "a gain", "measured_on": "on prompts", "plain_tokens_per_second": 100, "ranking": [],
        "training": None, "left_out": {}, "planned_minutes": 10, "minutes": 9,
    }  # fmt: skip
    assert Verdict(**settings).lines()[0] == "Use prompt lookup with K = 3: a gain."
    doubtful = Verdict(**settings, doubt="12 of 40 steps stalled")
    assert doubtful.lines()[0].startswith("Cannot tell, because 12 of 40 steps stalled; measure again on a quiet")
    assert "use prompt lookup with K = 3: a gain" in doubtful.lines()[0]
    assert doubtful.model_dump(mode="json")["doubt"] == "12 of 40 steps stalled"


def test_candidates_have_the_names_of_their_scores():
    assert Candidate(kind="draft", draft=Path("runs/a/2x64-1")).name == "2x64-1"
    drafter = FallbackSpec.of(draft="runs/a/2x64", draft_tokens=2)
    assert drafter.text == "fallback:draft=runs/a/2x64,draft_tokens=2"
    assert Candidate(kind="fallback", drafter=drafter).name == drafter.name == parse_drafter(drafter.text).name
    assert Candidate(kind="fallback", drafter=drafter, shape="2x64").label == "prompt lookup, then draft model 2x64"


def test_every_kind_of_candidate_has_words():
    labels = [Candidate(kind=kind, draft=Path("a"), shape="2x64").label for kind in get_args(Kind)]
    assert len(set(labels)) == len(get_args(Kind))
