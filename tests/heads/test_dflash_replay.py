"""Replay of a DFlash head: the log-probabilities that its drafter draws with, and the steps of live decoding."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.builders import assert_rounds
from helpers.drafter_laws import (
    PROMPTS,
    VOCAB,
    dflash_drafter,
    replay_errors,
    save_models,
)
from helpers.errors import raises_option

from draftlab.engine.generate import decode, output_tokens
from draftlab.heads.dflash.decoder import DFlash
from draftlab.heads.dflash.drafter import DFlashDrafter, score_blocks
from draftlab.model.llama import Llama
from draftlab.sampling import SamplingParams

K = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Llama:
    return save_models(tmp_path_factory.mktemp("models"))["target"]


def head_of(target: Llama, **changes: Any) -> DFlash:
    """Return a head of random weights with a full and a sliding layer."""
    head = dflash_drafter(target).head
    return DFlash(
        head.config.model_copy(update=changes),
        head.weights,
        head.embed,
        head.head,
        head.ids,
        (1 / 10000 ** (torch.arange(0, 12, 2) / 12), 1.0),
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"sample_from_anchor": True}, {"causal": (True, False)}, {"causal": (True, True)}],
    ids=["plain", "anchor", "half causal", "causal"],
)
def test_replay_has_the_log_probabilities_that_the_drafter_draws_with(target, changes):
    """They are compared at every token and age, at two K, over more tokens than one pass scores."""
    head, sampling = head_of(target, **changes), SamplingParams(temperature=0.8)
    texts = output_tokens(decode(target, PROMPTS, replace(sampling, max_tokens=45)))
    pairs = [(np.array(p), np.array(t)) for p, t in zip(PROMPTS, texts, strict=True)]
    scored = score_blocks(target, head, pairs, VOCAB, sampling, K)
    drafter, uniform = DFlashDrafter(target, head), torch.zeros(1, K)
    for k, (prompt, text, view) in itertools.product((2, K), zip(PROMPTS, texts, scored, strict=True)):
        whole = prompt + text
        drafter.reset(1, len(whole))
        cache = target.new_cache(1, len(whole))
        drafter.attach(cache)
        target.forward(torch.tensor([whole[:-1]]), cache, last=1)
        drawn = np.full((len(text), k), -np.inf)
        for anchor in range(len(prompt) - 1, len(whole) - 1):
            drafter.read = [0]
            q = drafter.propose([whole[: anchor + 1]], k, sampling, uniform).q
            assert q is not None
            for age, token in enumerate(whole[anchor + 1 : anchor + 1 + k]):
                with np.errstate(divide="ignore"):
                    drawn[anchor + 1 - len(prompt) + age, age] = np.log(float(q[0, age, token]))
        assert_rounds(view.at(k).logprobs[:, :k], drawn)
        assert np.isfinite(drawn).sum() > 10  # a third of the ids has a probability


def test_replay_expects_what_sampling_counts(target):
    """Over many texts, within five standard errors."""
    drafter = DFlashDrafter(target, head_of(target))

    def score(pairs: list[tuple[np.ndarray, np.ndarray]], sampling: SamplingParams) -> Any:
        return [s.at(3) for s in score_blocks(target, drafter.head, pairs, VOCAB, sampling, 3)]

    sampling = SamplingParams(max_tokens=24, temperature=1.5)
    assert replay_errors(target, drafter, score, sampling, 3, 200)[0] < 5


def test_a_text_longer_than_the_heads_context_is_refused(target):
    head = head_of(target, context=40)
    pairs = [(np.arange(3, 23), np.arange(3, 23))]
    with raises_option("40"):
        score_blocks(target, head, pairs, VOCAB, SamplingParams(), K)
