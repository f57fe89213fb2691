"""What an export says of a draft's newest score: slower, in doubt, not timed, or not there."""

from pathlib import Path

import pytest
from helpers.scores import IDLE, PROMPTS, at, change, conditioned, prediction, score

from draftlab.exporting.run import advice
from draftlab.results.score import Score


def predicted(base: Score) -> Score:
    """Return a score in which the draft was not timed."""
    return change(base, speculative={2: []}, prediction=prediction(k2=[0.5] * PROMPTS))


FAST = at("draft", [0.2] * PROMPTS)
SLOW = at("draft", [2.0] * PROMPTS)
STOLEN = change(conditioned(FAST, device="p"), environment=IDLE.model_copy(update={"stolen_share": 0.5}))


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ([FAST], ""),
        ([SLOW], "do not serve"),
        ([STOLEN], str(STOLEN.doubt)),
        ([predicted(FAST)], "not timed"),
        ([predicted(FAST), SLOW], "do not serve"),  # the timed score counts, although it is older
        ([], "not measured"),
    ],
)
def test_advice_on_a_draft_follows_its_newest_timed_score(scores, said):
    text = advice(scores, Path("runs/draft"))
    assert said in text
    assert bool(text) == bool(said)
    assert ("draftlab score --draft runs/draft" in text) == (said not in ("", "do not serve"))


def test_a_score_with_its_own_doubt_is_the_case():
    assert STOLEN.doubt is not None
    assert not predicted(score("draft")).timed
