"""Any causal decoder of transformers is a target: rows of any lengths, roll back, trees, and states for heads."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.builders import assert_rounds
from helpers.enumeration import emitted, greedy_with_softmax_q, joint, leviathan, sampled
from helpers.errors import raises_option
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftlab.engine.batch_generate import Batching, generate_batch, load_generator
from draftlab.engine.generate import (
    Draft,
    Drafter,
    ModelDrafter,
    decode,
    output_tokens,
    speculative_decode,
)
from draftlab.engine.verify import Tokens, match
from draftlab.heads.eagle3 import layout
from draftlab.heads.eagle3.decoder import EagleLlama
from draftlab.heads.eagle3.drafter import EagleDrafter, score_chains
from draftlab.heads.eagle3.layout import Head
from draftlab.model import checkpoint, llama
from draftlab.model.decoder import Tree
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.modes import hosted
from draftlab.model.recurrent_decoder import RecurrentDecoder
from draftlab.sampling import SamplingParams

V = 307
SIZES = {
    "vocab_size": V,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
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
    "qwen3_5_text": LINEAR,
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "granitemoehybrid": EXPERTS | MAMBA2 | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 64},
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

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        ids = torch.zeros(len(texts), count, dtype=torch.long)
        for row, text in enumerate(texts):
            known = (self.texts[row] + [0] * count)[len(text) : len(text) + count]
            wrong = [i % (3 + row) == 2 for i in range(len(text), len(text) + count)]
            ids[row] = torch.tensor([(token + bad) % V for token, bad in zip(known, wrong, strict=True)])
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


@pytest.mark.parametrize("kind", ["mixtral", "gemma3_text", "gpt2"])
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


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "gpt2"])
def test_a_token_tree_has_the_logits_of_its_paths(kind):
    model = model_of(kind)
    target = HFDecoder(model)
    parents, ids = (
        [0, 0, 1, 2],
        torch.tensor([[9, 14, 3, 7, 5]]),
    )  # the text's last token, then the tree
    cache = target.new_cache(1, 32)
    target.forward(torch.tensor([PROMPTS[0]]), cache)
    found = target.forward(ids, cache, tree=Tree.from_parents(parents))
    for path in ([1, 3], [2, 4]):
        text = [*PROMPTS[0], 9, *(int(ids[0, i]) for i in path)]
        expected = target.forward_uncached(torch.tensor([text]), 3)
        assert_rounds(found[0, [0, *path]], expected[0])
    cache.keep(0, len(PROMPTS[0]) + 1, [1, 3])
    after = target.forward(torch.tensor([[61]]), cache)
    text = [*PROMPTS[0], 9, 3, 5, 61]  # the tree's second token and its child
    assert_rounds(after[0, -1:], target.forward_uncached(torch.tensor([text]), 1)[0])


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "gpt2"])
def test_the_states_of_layers_are_transformers_own(kind):
    model = model_of(kind)
    target = HFDecoder(model)
    cache = target.new_cache(2, 20)
    cache.layer_states = target.new_layer_states(cache, (0, 1, 3))
    ids = torch.tensor([[*PROMPTS[0]], [*PROMPTS[2], 0, 0, 0, 0]])
    target.forward(ids, cache)
    cache.used = [8, 6]
    target.forward(torch.tensor([[3, 90], [55, 56]]), cache)
    for row, text in enumerate([PROMPTS[0], [*PROMPTS[2], 55, 56]]):
        with torch.no_grad():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[i][0] for i in (0, 1, 3)], -1)
        assert_rounds(cache.layer_states.states[row, : len(text)], expected)


def test_models_whose_positions_cannot_be_given_speculate_one_row_at_a_time():
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("bloom", vocab_size=V, hidden_size=64, n_layer=2, n_head=4),
        dtype=torch.float32,
    ).eval()
    target, sampling = HFDecoder(model), SamplingParams(max_tokens=8)
    assert not target.masked
    expected = generated(model, PROMPTS[0], 8)
    drafter = HalfRight([[*PROMPTS[0], *expected]])
    assert output_tokens(speculative_decode(target, drafter, PROMPTS[:1], 3, sampling)) == [expected]
    with raises_option("1"):
        output_tokens(speculative_decode(target, HalfRight([[0] * 30] * 2), PROMPTS[:2], 3, sampling))


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
    drafted = output_tokens(speculative_decode(target, ModelDrafter(target, V), PROMPTS[:2], 3, sampling))
    assert drafted == expected[:2]
    written = generate_batch(target, PROMPTS, sampling, Batching(vocab=V))
    assert [each.ids.tolist() for each in written] == expected


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "mamba2"])
def test_a_stored_recurrent_model_generates_batches_in_which_rows_end_early(kind, tmp_path):
    model = model_of(kind)
    model.save_pretrained(tmp_path)
    assert checkpoint.vocab_size(tmp_path) == V
    prompts = [*PROMPTS, [0, 44, 91], [0, 12, 7], [0, 61, 30]]  # four of one length share a pass
    expected = [generated(model, prompt) for prompt in prompts]
    stops = tuple(text[2 + row] for row, text in enumerate(expected))
    target = load_generator(tmp_path, torch.float32, checkpoint.CPU)
    sampling = SamplingParams(max_tokens=LENGTH, stop_token_ids=stops)
    for written, text in zip(generate_batch(target, prompts, sampling, Batching(vocab=V)), expected, strict=True):
        end = next(i for i, token in enumerate(text) if token in stops) + 1
        assert written.ids.tolist() == text[:end]


def test_recurrent_layers_cannot_read_a_tree():
    target = hosted(model_of("qwen3_next"))
    cache = target.new_cache(1, 32)
    with raises_option("tree"):
        target.forward(torch.tensor([[9, 14, 3]]), cache, tree=Tree.from_parents([0, 0]))


class Conditional:
    """A decoder's distributions after a prompt, by passes over its cache, which is rolled back before each.

    A pass over the same tokens is made once.
    """

    PROMPT = (0, 2, 1, 1, 2, 0, 2, 2, 1)  # longer than the windows above

    def __init__(self, kind: str) -> None:
        self.model: Any = model_of(kind, vocab_size=3)
        self.decoder = hosted(self.model)
        self.cache = self.decoder.new_cache(1, 40)
        self.decoder.forward(torch.tensor([self.PROMPT[:-1]]), self.cache)
        self.transformers = cache(self._transformers)
        self._passed = cache(self._pass)

    def verified(self, tokens: Tokens) -> Tensor:
        return self._passed(tuple(tokens.ids), tuple(tokens.parents))

    def following(self, prefix: tuple[int, ...]) -> Tensor:
        return self._passed(prefix, tuple(range(len(prefix))))[-1]

    def _pass(self, tokens: tuple[int, ...], parents: tuple[int, ...]) -> Tensor:
        self.cache.used = [len(self.PROMPT) - 1]
        tree = None if parents == tuple(range(len(tokens))) else Tree.from_parents(parents)
        ids = torch.tensor([[self.PROMPT[-1], *tokens]])
        return self.decoder.forward(ids, self.cache, tree=tree)[0].double().softmax(-1)

    @torch.no_grad()
    def _transformers(self, prefix: tuple[int, ...]) -> Tensor:
        ids = torch.tensor([[*self.PROMPT, *prefix]])
        return self.model(ids, use_cache=False).logits[0, -1].double().softmax(-1)


CHAIN, BRANCHES = (0, 1), (0, 0, 1)


@pytest.mark.parametrize(
    ("kind", "rule", "parents"),
    [
        *((kind, leviathan, CHAIN) for kind in ("mixtral", "gpt_oss", "gemma3_text", "gpt2")),
        *((kind, leviathan, CHAIN) for kind in ("qwen3_next", "falcon_h1", "mamba2")),
        *((kind, match, BRANCHES) for kind in ("mixtral", "gpt_oss", "gemma3_text")),
    ],
)
def test_at_temperature_1_every_draft_and_outcome_gives_transformers_distribution(kind, rule, parents):
    target, draft = Conditional(kind), Conditional("stablelm")
    wanted = joint(target.transformers, 3)
    drafting = sampled(draft.following, parents)
    found = emitted(target.following, drafting, rule, 3, target.verified)
    assert_rounds(found, wanted)
    if rule is leviathan:
        broken = greedy_with_softmax_q(draft.following, parents)
        wrong = emitted(target.following, broken, rule, 3, target.verified)
        assert (wrong - wanted).abs().max() > 1e-3


def random_head(folder: Path) -> Head:
    config = layout.head_config(folder, (1, 2, 3), V)
    generator = torch.Generator().manual_seed(1)
    weights = {name: 0.2 * torch.randn(size, generator=generator) for name, size in config.sizes().items()}
    return Head(config=config, weights=weights, ids=torch.arange(V), embedding=None)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "qwen3_next"])
def test_an_eagle_head_drafts_for_a_model_of_transformers(kind, tmp_path):
    model = model_of(kind)
    model.save_pretrained(tmp_path)
    target, sampling = hosted(model), SamplingParams(max_tokens=LENGTH)
    head = EagleLlama(random_head(tmp_path), target.embed, tmp_path)
    found = output_tokens(speculative_decode(target, EagleDrafter(target, head), PROMPTS, 3, sampling))
    assert found == [generated(model, prompt) for prompt in PROMPTS]


def test_a_head_is_replayed_on_transformers_states_as_on_the_engines(family_dirs):
    folder = family_dirs["qwen3"]
    own = llama.load(folder, torch.float32)
    hosted = HFDecoder(checkpoint.load_model(folder, torch.float32).eval())
    head = EagleLlama(random_head(folder), own.embed, folder)
    texts = [
        (np.array(PROMPTS[0]), np.array([7, 3, 61, 8, 12])),
        (np.array(PROMPTS[1]), np.array([5, 5, 9])),
    ]
    both = [score_chains(each, head, texts, V, SamplingParams(temperature=1.0), 3) for each in (own, hosted)]
    for here, there in zip(*both, strict=True):
        assert_rounds(here.logprobs, there.logprobs)
