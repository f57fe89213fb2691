"""One generator for all text that models write: transformers' text, whatever stands beside a prompt."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.builders import assert_rounds
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM

from draftlab.acceptance import token_logprobs
from draftlab.engine import batch_generate
from draftlab.engine.batch_generate import Batching, generate_batch
from draftlab.model.decoder import Decoder
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import load
from draftlab.model.native_cpu import NativeLlama
from draftlab.sampling import SamplingParams

PROMPTS = [list(range(3, 12)), list(range(40, 45)), [7], list(range(90, 99)), list(range(200, 212))]


@pytest.fixture(scope="module")
def opt() -> OPTForCausalLM:
    torch.manual_seed(0)
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=307,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            word_embed_proj_dim=32,
            init_std=0.5,
        )
    ).eval()


@pytest.fixture(scope="module")
def models(family_dirs, opt) -> dict[str, Decoder]:
    llama = load(family_dirs["llama"], torch.float32)
    hosted = AutoModelForCausalLM.from_pretrained(family_dirs["llama"], dtype=torch.float32).eval()
    return {
        "eager": llama,
        "native": NativeLlama(llama),
        "hosted": HFDecoder(hosted),
        "opt": HFDecoder(opt),
    }


def transformers_of(name: str, family_dirs, opt) -> Any:
    return opt if name == "opt" else AutoModelForCausalLM.from_pretrained(family_dirs["llama"], dtype=torch.float32)


def test_progress_moves_with_every_token_of_a_batch(models):
    told: list[float] = []
    generate_batch(
        models["eager"], PROMPTS, SamplingParams(max_tokens=10), Batching(batch_size=len(PROMPTS)), advance=told.append
    )
    assert told == pytest.approx([len(PROMPTS) * length / 10 for length in range(1, 11)] + [len(PROMPTS)])


@pytest.mark.parametrize("name", ["eager", "native", "hosted", "opt"])
def test_greedy_text_is_what_transformers_writes(name, models, family_dirs, opt, monkeypatch):
    monkeypatch.setattr(batch_generate, "PASS_TOKENS", 8)  # several passes
    theirs = transformers_of(name, family_dirs, opt)
    ours = generate_batch(models[name], PROMPTS, SamplingParams(max_tokens=20))
    for prompt, text in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        whole = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=20,
            max_new_tokens=20,
            eos_token_id=[],
            pad_token_id=2,
        )
        assert text.ids.tolist() == whole[0, len(prompt) :].tolist()
        assert text.finish_reason == "length"
        assert not text.logprobs.any()


@pytest.mark.parametrize("name", ["eager", "native", "opt"])
def test_a_prompts_text_does_not_depend_on_the_prompts_beside_it(name, models):
    how = SamplingParams(max_tokens=16, temperature=1.0, seed=3)
    together = generate_batch(models[name], PROMPTS, how)
    alone = generate_batch(models[name], PROMPTS, how, Batching(batch_size=1))
    last = generate_batch(models[name], PROMPTS[3:], how, numbers=[3, 4])
    assert [t.ids.tolist() for t in together] == [t.ids.tolist() for t in alone]
    assert [t.ids.tolist() for t in last] == [t.ids.tolist() for t in together[3:]]
    other = generate_batch(models[name], PROMPTS, SamplingParams(max_tokens=16, temperature=1.0, seed=4))
    assert all(a.ids.tolist() != b.ids.tolist() for a, b in zip(together, other, strict=True))


@pytest.mark.parametrize("name", ["native", "opt"])
def test_log_probabilities_are_those_of_the_distribution_that_was_sampled(name, models, family_dirs, opt):
    theirs = transformers_of(name, family_dirs, opt)
    for prompt, text in zip(
        PROMPTS,
        generate_batch(models[name], PROMPTS, SamplingParams(max_tokens=12, temperature=0.7)),
        strict=True,
    ):
        with torch.no_grad():
            logits = theirs(torch.tensor([[*prompt, *text.ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
        at = torch.from_numpy(text.ids)[:, None]
        assert_rounds(torch.from_numpy(text.logprobs), (logits / 0.7).log_softmax(-1).gather(1, at)[:, 0])


@pytest.mark.parametrize("name", ["native", "opt"])
def test_a_text_stops_at_whichever_end_comes_first(name, models):
    free = generate_batch(models[name], PROMPTS, SamplingParams(max_tokens=20, temperature=1.0))
    ends = (int(free[0].ids[5]), int(free[1].ids[2]))
    found = generate_batch(models[name], PROMPTS, SamplingParams(max_tokens=20, temperature=1.0, stop_token_ids=ends))
    for text, whole in zip(found, free, strict=True):
        at = next((i for i, token in enumerate(whole.ids) if token in ends), None)
        assert text.finish_reason == ("length" if at is None else "stop")
        assert text.ids.tolist() == whole.ids[: None if at is None else at + 1].tolist()
        assert len(text.logprobs) == len(text.ids)
    assert found[0].finish_reason == found[1].finish_reason == "stop"


def test_memory_bounds_how_many_prompts_are_decoded_together(opt):
    run = opt.forward
    rows = []
    opt.forward = lambda *args, **given: (
        rows.append(len(given["input_ids"])),
        run(*args, **given),
    )[1]
    try:
        prompts = [list(range(i, i + 6)) for i in range(3, 30)]
        # bytes of a step's logits, and of 16 tokens' keys and values in fp32
        each = 32 * 307 + 16 * (2 * 2 * 32 * 4)
        generate_batch(HFDecoder(opt), prompts, SamplingParams(max_tokens=10), Batching(memory=4 * each / 1e9))
        assert max(rows) == 4
        rows.clear()
        generate_batch(HFDecoder(opt), prompts, SamplingParams(max_tokens=10), Batching(memory=1e-9))
        assert max(rows) == 1
    finally:
        opt.forward = run


@pytest.mark.parametrize("name", ["eager", "hosted", "opt"])
def test_logits_in_parts_are_those_of_one_pass(name, models):
    rng = np.random.default_rng(0)
    texts = [(rng.integers(3, 300, 5), rng.integers(3, 300, n)) for n in (60, 40, 1)]
    warp = SamplingParams(temperature=1.0)
    whole = token_logprobs.score_tokens(models[name], texts, 307, warp)
    # of seven positions
    parts = token_logprobs.score_tokens(models[name], texts, 307, warp, memory=7 * 16 * 307 / 1e9)
    for a, b in zip(whole, parts, strict=True):
        assert_rounds(a.logprobs, b.logprobs)
        assert (a.ranks == b.ranks).mean() > 0.95
