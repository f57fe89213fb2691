"""Any causal decoder of transformers is a target: rows of any lengths, roll back, trees, and states for heads."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from head_texts import V
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftlab.engine.batch_generate import Batching, generate_batch
from draftlab.engine.generate import (
    Draft,
    Drafter,
    ModelDrafter,
    decode,
    output_tokens,
    speculative_decode,
)
from draftlab.model.decoder import Tree
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.modes import hosted
from draftlab.model.recurrent_decoder import RecurrentDecoder
from draftlab.sampling import SamplingParams

SIZES = {
    "vocab_size": V, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "gpt_oss": EXPERTS | SLIDING,
    "gemma2": SLIDING,
    "gemma3_text": SLIDING,
    "mistral": {"sliding_window": 6},
    "cohere": {},
    "glm4": {"pad_token_id": 2},
    "smollm3": {},
    "phi3": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": 6},
    "gpt2": GPT2,
    "gpt_neox": {},
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": EXPERTS | LINEAR | {"shared_expert_intermediate_size": 48},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "granitemoehybrid": EXPERTS
    | MAMBA2
    | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 64},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "jamba": {"num_experts": 2, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "state_size": 16, "n_groups": 1, "expand": 2},
    "mamba": {},
}
PROMPTS = [
    [0, 17, 44, 101, 9, 17, 44, 8, 3, 90],
    [0, 5, 250],
    [0, 90, 91, 12, 77, 60],
    [0, 31, 66, 8],
]
LENGTH = 14


def model_of(kind: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | (MODELS | RECURRENT).get(kind, {}) | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.08))
    return model


def generated(model: Any, prompt: list[int], length: int = LENGTH) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=None,
    )
    return out[0, len(prompt) :].tolist()


class HalfRight(Drafter):
    """Drafts the texts that are given, with every third token wrong, and a row less often than another."""

    def __init__(self, texts: Sequence[list[int]]) -> None:
        self.texts = texts

    def reset(self, rows: int, capacity: int) -> None:
        self.rows = rows

    def propose(
        self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor
    ) -> Draft:
        ids = torch.zeros(len(texts), count, dtype=torch.long)
        for row, text in enumerate(texts):
            known = (self.texts[row] + [0] * count)[len(text) : len(text) + count]
            wrong = [i % (3 + row) == 2 for i in range(len(text), len(text) + count)]
            ids[row] = torch.tensor(
                [(token + bad) % V for token, bad in zip(known, wrong, strict=True)]
            )
        return Draft(ids=ids, q=None, counts=[count] * len(texts))


@pytest.mark.parametrize("kind", MODELS)
def test_speculative_text_of_a_batch_is_what_generate_writes(kind):
    """Rows of unequal prompts accept unequal numbers of tokens, so that every pass has rows of other lengths."""
    model = model_of(kind)
    expected = [generated(model, prompt) for prompt in PROMPTS]
    target, sampling = HFDecoder(model), SamplingParams(max_tokens=LENGTH)
    assert target.masked
    drafter = HalfRight([[*p, *e] for p, e in zip(PROMPTS, expected, strict=True)])
    steps = list(speculative_decode(target, drafter, PROMPTS, 4, sampling))
    assert output_tokens(steps) == expected
    assert {step.accepted for step in steps} > {0, 1, 2}
    assert output_tokens(decode(target, PROMPTS, sampling)) == expected
    written = generate_batch(target, PROMPTS, sampling, Batching(vocab=V))
    assert [each.ids.tolist() for each in written] == expected


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt2"])
def test_a_long_run_of_rejections_keeps_the_cache_small(kind):
    model = model_of(kind)
    target, sampling = HFDecoder(model), SamplingParams(max_tokens=40)
    made: list[Any] = []
    new_cache: Callable[..., Any] = target.new_cache
    target.new_cache = lambda rows, capacity: made.append(new_cache(rows, capacity)) or made[-1]  # type: ignore[method-assign]
    drafter = HalfRight([[0] * 60] * len(PROMPTS))  # nearly always wrong
    found = output_tokens(speculative_decode(target, drafter, PROMPTS, 5, sampling))
    assert found == [generated(model, prompt, 40) for prompt in PROMPTS]
    cache = made[0]  # the trial's comes later
    assert cache.slots <= 2 * max(cache.used) + 6


@pytest.mark.parametrize("kind", ["gpt_oss", "gpt2"])
def test_a_cache_keeps_a_path_of_a_tree(kind):
    target = HFDecoder(model_of(kind))
    cache = target.new_cache(1, 32)
    target.forward(torch.tensor([PROMPTS[0]]), cache)
    tree = torch.tensor([[9, 14, 3, 7, 5]])  # the text's last token, then the tree
    found = target.forward(tree, cache, tree=Tree.from_parents([0, 0, 1, 2]))
    cache.keep(0, len(PROMPTS[0]) + 1, [1, 3])
    after = target.forward(torch.tensor([[61]]), cache)
    text = torch.tensor([[*PROMPTS[0], 9, 3, 5, 61]])  # the tree's second token and its child
    expected = target.forward_uncached(text, 4)[0]
    ours = torch.cat([found[0, [0, 2, 4]], after[0, -1:]])
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma3_text", "gpt2", "qwen3_next"])
def test_states_and_logits_after_a_roll_back_are_transformers_own(kind):
    model = model_of(kind)
    target = hosted(model)
    cache = target.new_cache(2, 20)
    cache.layer_states = target.new_layer_states(cache, (0, 1, 3))
    target.forward(torch.tensor([PROMPTS[0], [*PROMPTS[2], 0, 0, 0, 0]]), cache)
    cache.used = [8, 6]
    logits = target.forward(torch.tensor([[3, 90], [55, 56]]), cache)
    for row, text in enumerate([PROMPTS[0], [*PROMPTS[2], 55, 56]]):
        with torch.no_grad():
            theirs: Any = model(torch.tensor([text]), output_hidden_states=True)
        expected = torch.cat([theirs.hidden_states[i][0] for i in (0, 1, 3)], -1)
        torch.testing.assert_close(logits[row], theirs.logits[0, -2:], atol=1e-4, rtol=1e-4)
        found = cache.layer_states.states[row, : len(text)]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_roll_back_to_what_was_accepted(kind):
    model = model_of(kind)
    expected = [generated(model, prompt) for prompt in PROMPTS]
    target, sampling = hosted(model), SamplingParams(max_tokens=LENGTH)
    assert isinstance(target, RecurrentDecoder)
    drafter = HalfRight([[*p, *e] for p, e in zip(PROMPTS, expected, strict=True)])
    steps = list(speculative_decode(target, drafter, PROMPTS, 4, sampling))
    assert output_tokens(steps) == expected
    assert {step.accepted for step in steps} > {0, 1, 2}
    assert output_tokens(decode(target, PROMPTS, sampling)) == expected
    written = generate_batch(target, PROMPTS, sampling, Batching(vocab=V))
    assert [each.ids.tolist() for each in written] == expected


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2"])
def test_rows_that_share_a_pass_of_a_recurrent_model_end_early(kind):
    model, prompts = model_of(kind), [[0, 5, 250], [0, 44, 91], [0, 12, 7], [0, 61, 30]]
    expected = [generated(model, prompt) for prompt in prompts]
    stops = tuple(text[2 + row] for row, text in enumerate(expected))
    sampling = SamplingParams(max_tokens=LENGTH, stop_token_ids=stops)
    target = hosted(model).without_rollback()
    written = generate_batch(target, prompts, sampling, Batching(vocab=V))
    for each, text in zip(written, expected, strict=True):
        end = next(i for i, token in enumerate(text) if token in stops) + 1
        assert each.ids.tolist() == text[:end]


def test_a_recurrent_model_drafts_for_itself():
    target, sampling = hosted(model_of("lfm2")), SamplingParams(max_tokens=LENGTH)
    steps = list(speculative_decode(target, ModelDrafter(target, V), PROMPTS[:2], 3, sampling))
    assert output_tokens(steps) == output_tokens(decode(target, PROMPTS[:2], sampling))
    assert all(step.accepted == step.drafted for step in steps)
