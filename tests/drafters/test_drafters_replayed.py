"""Replay of every kind of drafter counts what live decoding counts, at every K."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.built import built
from helpers.replay_laws import (  # noqa: F401
    KS,
    PROMPTS,
    VOCAB,
    check_counts,
    check_greedy,
    in_mode,
    noisy_fixture,
    replayed,
    work_fixture,
)

from draftlab.acceptance.token_logprobs import score_tokens
from draftlab.drafters.base import DRAFTERS, parse_drafter
from draftlab.engine.generate import output_tokens, speculative_decode
from draftlab.model import checkpoint
from draftlab.model.hf_decoder import HFDecoder
from draftlab.sampling import SamplingParams

MODEL_KINDS = ["model", "fallback", "fallback:draft_tokens=2,min_match=3x1x5"]
COPIES = [
    "prompt-lookup:prompt_lookup_max=2",
    "latest-lookup",
    "ngram-gpu",
    "ngram-simple:size_n=2",
    "suffix",
]


def test_replay_of_greedy_text_counts_the_live_steps_of_every_kind(
    work, eagle_head, dflash_head, parallel_draft, stored
):
    work = in_mode(work, int8=False)  # the fastest
    asked = [*MODEL_KINDS, *COPIES]
    asked += [f"parallel:draft={parallel_draft}", f"fallback:draft={parallel_draft}"]
    asked += [f"suffix:outputs={stored},max_spec_factor=2"]
    rarely = [f"eagle:heads={eagle_head}"]
    rarely += [f"eagle:heads={eagle_head},prompt_lookup_max=3,draft_tokens=1"]
    rarely += [f"dflash:heads={dflash_head}"]
    assert {parse_drafter(text).kind for text in asked + rarely} == set(DRAFTERS.builtin)
    for text in asked:
        assert parse_drafter(text).replays
        assert check_greedy(work, text), text  # else nothing was compared
    for text in rarely:  # heads of random weights
        check_greedy(work, text)


@pytest.mark.parametrize("text", [*COPIES, "suffix:max_spec_factor=3,min_token_prob=0.3"])
def test_sampled_text_decides_every_step_of_a_lookup(work, text):
    """A lookup is certain of its tokens. They are accepted exactly where the text has them."""
    sampling = SamplingParams(max_tokens=40, temperature=0.3, seed=3)
    drafter, accepted = built(work, text).drafter, 0
    for k in KS:
        for row, prompt in enumerate(PROMPTS):
            steps = list(speculative_decode(work.target, drafter, [prompt], k, sampling, numbers=[row]))
            ids = output_tokens(steps)[0]
            counts = replayed(work, text, [ids], sampling, [prompt])(k)
            accepted += check_counts(counts, 0, steps, ids)
    assert accepted


@pytest.mark.parametrize("text", ["fallback:min_match=1x1x1", "fallback:draft_tokens=1"])
def test_replay_of_sampled_text_expects_what_fallback_counts(work, text):
    """Over many texts, within five standard errors. The draft alone is a control that is far off."""
    sampling, rows, k = SamplingParams(max_tokens=24, temperature=0.5), 250, 3
    live = list(speculative_decode(work.target, built(work, text).drafter, [PROMPTS[0]] * rows, k, sampling))
    texts = output_tokens(live)
    pairs = [(np.array(PROMPTS[0]), np.array(ids)) for ids in texts]
    log_p = [s.logprobs for s in score_tokens(work.target, pairs, VOCAB, sampling)]
    counted = np.array([sum(step.row == row for step in live) - 1 for row in range(rows)])
    drafted = np.array([sum(s.drafted for s in live if s.row == row) for row in range(rows)])

    def errors(drafter: str) -> list[float]:
        counts = replayed(work, drafter, texts, sampling, PROMPTS[:1] * rows, log_p)(k)
        found = (counted - counts.passes, drafted - counts.drafted)
        return [abs(each.mean()) / (each.std(ddof=1) / rows**0.5) for each in found]

    assert max(errors(text)) < 5
    assert max(errors("model")) > 5


@pytest.mark.parametrize("text", ["model", "fallback"])
def test_rounded_weights_are_replayed_as_they_are(work, text):
    assert check_greedy(in_mode(work, int8=True), text)


@pytest.mark.parametrize("text", ["model", "fallback"])
def test_a_draft_that_transformers_runs_is_replayed(work, text, noisy):
    hosted = HFDecoder(checkpoint.load_model(noisy, torch.float32).eval())
    assert check_greedy(replace(work, load=lambda path: hosted), text)
