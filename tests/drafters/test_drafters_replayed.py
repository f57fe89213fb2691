"""Replay of every kind of drafter counts what live decoding counts, at every K."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.builders import build
from helpers.built import built

from draftlab.acceptance.expected import Counts, chain, texts_of
from draftlab.acceptance.token_logprobs import score_tokens
from draftlab.config.kinds import DRAFTERS, parse_drafter
from draftlab.engine.drafters.context import DrafterContext
from draftlab.engine.generate import Step, decode, output_tokens, speculative_decode
from draftlab.model import checkpoint, modes
from draftlab.model.decoder import Decoder
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import Llama
from draftlab.sampling import SamplingParams
from draftlab.target_outputs.replay import ReplayContext

KS = (1, 2, 4)
VOCAB = 307
PROMPTS = [[0, 17, 44, 101, 9, 17, 44], [0, 5, 250, 31, 5, 250], [0, 90, 91, 92]]
MODEL_KINDS = ["model", "fallback", "fallback:draft_tokens=2,min_match=3x1x5"]
COPIES = [
    "prompt-lookup:prompt_lookup_max=2",
    "latest-lookup",
    "ngram-gpu",
    "ngram-simple:size_n=2",
    "suffix",
]


@pytest.fixture(scope="module")
def noisy(family_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the target with noise, which agrees with it now and then."""
    folder = tmp_path_factory.mktemp("noisy") / "draft"
    build("llama", noise=0.3).save_pretrained(folder)
    return folder


@pytest.fixture
def work(context: DrafterContext, noisy: Path) -> DrafterContext:
    return replace(context, draft=noisy)


def replayed(
    work: DrafterContext,
    text: str,
    texts: Sequence[list[int]],
    sampling: SamplingParams,
    prompts: Sequence[list[int]] = PROMPTS,
    log_p: Sequence[np.ndarray] | None = None,
) -> Callable[[int], Counts]:
    """Return the counts of a drafter by K, on texts of the target after prompts."""
    pairs = [(np.array(p), np.array(ids)) for p, ids in zip(prompts, texts, strict=True)]
    scores = parse_drafter(text).acceptance(
        ReplayContext(
            texts=pairs,
            limits=[sampling.max_tokens] * len(pairs),
            target_path=work.target_path,
            sampling=sampling,
            vocab=VOCAB,
            most=max(KS),
            load=work.load,
            load_target=lambda: work.target,
            advance=lambda done: None,
            draft=work.draft,
            data=work.data,
        )
    )
    zeros = [np.zeros(len(ids)) for ids in texts]
    chances = [s.chances(p)[1:] for s, p in zip(scores, log_p or zeros, strict=True)]
    kept = texts_of(
        chances,
        np.full(len(texts), sampling.max_tokens - 1),
        None if scores[0].drafted is None else [s.drafted[1:] for s in scores],
        None if scores[0].modelled is None else [s.modelled[1:] for s in scores],
    )
    return lambda k: chain(kept, k)


def check_counts(counts: Counts, row: int, steps: list[Step], text: list[int]) -> int:
    """Check that the counts of a text equal those of live steps, and return the number of accepted tokens."""
    live = steps[1:]  # without the prefill
    accepted = sum(min(step.accepted, len(step.tokens)) for step in live)
    assert counts.tokens[row] == len(text) - 1
    assert counts.passes[row] == len(live)
    assert counts.steps[row] == sum(step.drafted > 0 for step in live)
    assert counts.drafted[row] == sum(step.drafted for step in live)
    assert counts.accepted[row] == accepted
    return accepted


def check_greedy(work: DrafterContext, text: str) -> int:
    """Check every K, for texts that reach the length limit and for texts that end before it."""
    whole = output_tokens(decode(work.target, PROMPTS, SamplingParams(max_tokens=24)))
    accepted = 0
    for stops in ((), (whole[0][11],)):
        sampling = SamplingParams(max_tokens=24, stop_token_ids=stops)
        texts = output_tokens(decode(work.target, PROMPTS, sampling))
        counts = replayed(work, text, texts, sampling)
        drafter = built(work, text).drafter
        for k in KS:
            for row, prompt in enumerate(PROMPTS):
                steps = list(speculative_decode(work.target, drafter, [prompt], k, sampling))
                assert output_tokens(steps)[0] == texts[row]
                accepted += check_counts(counts(k), row, steps, texts[row])
    return accepted


def in_mode(work: DrafterContext, int8: bool) -> DrafterContext:
    """Return the context with all models in mode native."""

    def native(model: Decoder) -> Llama:
        assert isinstance(model, Llama)
        return modes.with_mode(model, "native", int8)

    load_eager = work.load
    target = native(work.target)
    return replace(
        work, target=target, load=lambda path: native(load_eager(path)), mode="native", int8=int8
    )


def test_replay_of_greedy_text_counts_the_live_steps_of_every_kind(
    work, eagle_head, peagle_head, dflash_head, dspark_head, parallel_draft, stored
):
    work = in_mode(work, int8=False)  # the fastest
    asked = [*MODEL_KINDS, *COPIES]
    asked += [f"parallel:draft={parallel_draft}", f"fallback:draft={parallel_draft}"]
    asked += [f"suffix:outputs={stored},max_spec_factor=2"]
    rarely = [f"eagle:heads={eagle_head}", f"peagle:heads={peagle_head}"]
    rarely += [f"eagle:heads={eagle_head},prompt_lookup_max=3,draft_tokens=1"]
    rarely += [f"dflash:heads={dflash_head}", f"dspark:heads={dspark_head}"]
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
            steps = list(
                speculative_decode(work.target, drafter, [prompt], k, sampling, numbers=[row])
            )
            ids = output_tokens(steps)[0]
            counts = replayed(work, text, [ids], sampling, [prompt])(k)
            accepted += check_counts(counts, 0, steps, ids)
    assert accepted


@pytest.mark.parametrize("text", ["fallback:min_match=1x1x1", "fallback:draft_tokens=1"])
def test_replay_of_sampled_text_expects_what_fallback_counts(work, text):
    """Over many texts, within five standard errors. The draft alone is a control that is far off."""
    sampling, rows, k = SamplingParams(max_tokens=24, temperature=0.5), 250, 3
    live = list(
        speculative_decode(work.target, built(work, text).drafter, [PROMPTS[0]] * rows, k, sampling)
    )
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
