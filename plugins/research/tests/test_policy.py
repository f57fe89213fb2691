"""The policy of the drafter adaptive learns probabilities from steps, and is faster than simpler policies."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers.drafter_laws import save_models

from draftlab.engine.generate import ModelDrafter
from draftlab.sampling import SamplingParams
from draftlab_research.drafting.adaptive import PolicyDraft
from draftlab_research.policy import EDGES, LENGTHS, Policy, Steps, learn

K, COUNT = 4, 4000


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("policy"))


def steps_of(seed: int, **given: Any) -> Steps:
    """Return steps in which a drafted token is right with a probability equal to its confidence.

    A copied token is right with probability 0.2 length.
    """
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0.2, 1, (COUNT, K))
    right = rng.random((COUNT, K)) < confidence
    length = rng.integers(0, LENGTHS + 1, COUNT)
    copies = rng.random((COUNT, K)) < 0.2 * length[:, None]
    drawn: dict[str, Any] = {
        "kind": rng.integers(0, 3, COUNT),
        "length": length,
        "copied": np.cumprod(copies, 1).sum(1),
        "confidence": confidence,
        "accepted": np.cumprod(right, 1).sum(1),
    }
    return Steps(**drawn | given)


def speed(steps: Steps, copied: np.ndarray, drafted: np.ndarray, ms: np.ndarray, each: float) -> float:
    """Return the tokens per millisecond of steps that copy `copied` tokens, or draft `drafted` tokens if that is 0.

    copied, drafted: Numbers of tokens, [S]. ms: Milliseconds of a target pass, [K + 1]. each: Milliseconds to draft a
    token.
    """
    tokens = np.where(copied > 0, np.minimum(steps.copied, copied), np.minimum(steps.accepted, drafted))
    return (1 + tokens).sum() / (ms[np.where(copied > 0, copied, drafted)] + (copied == 0) * drafted * each).sum()


@pytest.mark.parametrize("each", [0.5, 2.0, 4.0])
def test_no_fixed_number_of_tokens_and_no_threshold_is_faster(each):
    steps, ms = steps_of(0), 10 + 0.6 * np.arange(K + 1)
    policy = learn(steps, ms.tolist(), each)
    copied = np.array([policy.copied_tokens(*pair, K) for pair in zip(steps.kind, steps.length, strict=True)])
    drafted = policy.drafted_tokens(steps.confidence) * (policy.draft_gain > 0)
    assert policy.speed == pytest.approx(speed(steps, copied, drafted, ms, each))
    for shortest, tokens, k in itertools.product(range(1, LENGTHS + 2), range(1, K + 1), range(K + 1)):
        fixed = np.where(steps.length >= shortest, tokens, 0)
        assert speed(steps, fixed, np.full(COUNT, k), ms, each) < policy.speed
    for floor in EDGES:  # stop at low confidence, as confidence-stop does
        going = np.cumprod(steps.confidence[:, :-1] >= floor, 1).sum(1)
        assert speed(steps, copied, 1 + going, ms, each) < policy.speed * 1.002


def test_chances_are_those_of_the_draws():
    policy = learn(steps_of(1), [10.0] * (K + 1), 0.5)
    middles = (EDGES[2:-1] + EDGES[3:]) / 2
    assert policy.chance_of(middles) == pytest.approx(middles, abs=0.04)
    assert policy.copies[:, :, 0].mean(0) == pytest.approx([0.2, 0.4, 0.6, 0.8], abs=0.04)


def test_a_draft_that_is_never_right_or_too_slow_is_never_made(models):
    wrong = steps_of(2, accepted=np.zeros(COUNT, dtype=int))
    for steps, each in ((wrong, 0.5), (steps_of(2), 40.0)):
        policy = learn(steps, [10.0, 11.0, 12.0, 13.0, 14.0], each)
        assert policy.draft_gain <= 0
        drafter = PolicyDraft(ModelDrafter(models["noisy"]), policy)
        drafter.reset(1, 32)
        draft = drafter.propose([[1, 2, 3]], 2, SamplingParams(), torch.zeros(1, 2))
        assert (draft.ids.shape, draft.counts) == ((1, 0), [0])


def test_a_row_stops_where_its_next_token_does_not_pay(models):
    """Acceptance probabilities are 1 or 0, so a row drafts on as long as its confidence is in a bin with 1."""
    sure = np.repeat([0.0, 1.0], [len(EDGES) - 6, 7])
    policy = Policy(
        speed=0.1,
        verify_ms=np.arange(10.0, 15),
        draft_ms=1.0,
        copies=np.zeros((3, LENGTHS, K)),
        chance=sure,
        next_chance=sure,
        draft_gain=1.0,
    )
    texts = [[1, 2, 3], [7, 5, 9], [4, 4, 8]]
    plain = ModelDrafter(models["noisy"])
    plain.reset(3, 32)
    uniform = torch.zeros(3, K)
    ids = plain.propose(texts, K, SamplingParams(), uniform).ids
    drafter = PolicyDraft(ModelDrafter(models["noisy"]), policy)
    drafter.reset(3, 32)
    draft = drafter.propose(texts, K, SamplingParams(), uniform)
    assert torch.equal(draft.ids, ids[:, : max(draft.counts)])
    for text, row, count in zip(texts, ids.tolist(), draft.counts, strict=True):
        with torch.inference_mode():
            whole = torch.tensor([[*text, *row]])
            model = models["noisy"]
            logits = model.forward(whole, model.new_cache(1, whole.shape[1]))
        top = logits[0, len(text) - 1 : -1].softmax(-1).amax(-1).numpy()
        going = np.cumprod(sure[np.digitize(top, EDGES)]).astype(bool)
        assert count == min(K, 1 + int(going.sum()))
