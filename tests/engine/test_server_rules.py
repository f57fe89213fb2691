"""draftlab samples, drafts and looks up as each server does: by the server's own functions, or by what it answered."""

import ast
import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import candidate_generator

from draftlab.config.server_rules import SERVER_RULES, rule_of
from draftlab.drafters.lookup import PromptLookupDrafter
from draftlab.drafters.ngram import NgramGpuDrafter, NgramSimpleDrafter
from draftlab.engine.verify import distribution, verify_rows
from draftlab.errors import UserError
from draftlab.sampling import SamplingParams

V = 300
DATA = Path(__file__).parents[1] / "files"


def random_logits(seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(1, V, generator=rng) * float(torch.rand(1, generator=rng) * 6 + 0.5)


def random_sampling(seed: int, *, min_p: bool) -> SamplingParams:
    rng = np.random.default_rng(seed)
    return SamplingParams(
        temperature=round(float(rng.uniform(0.2, 2.5)), 2),
        top_k=int(rng.choice([0, 1, 2, 20, 100, V, 2 * V])),
        top_p=float(rng.choice([1.0, 0.95, 0.7, 0.3])),
        min_p=float(rng.choice([0.0, 0.02, 0.3])) if min_p else 0.0,
    )


def as_transformers(logits: Tensor, sampling: SamplingParams) -> Tensor:
    chain = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(MinPLogitsWarper(sampling.min_p))
    return chain(torch.zeros(1, 1, dtype=torch.long), logits).softmax(-1)  # type: ignore[arg-type]


def agrees(found: Tensor, wanted: Tensor) -> None:
    """Check that the same ids are possible, with the same probabilities."""
    assert found.gt(0).equal(wanted.gt(0))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", range(200))
def test_the_target_is_filtered_as_in_transformers(seed):
    logits, sampling = random_logits(seed), random_sampling(seed, min_p=True)
    own = rule_of("transformers").target_sampling(sampling)
    agrees(distribution(logits, own), as_transformers(logits, sampling))


@pytest.mark.parametrize("top_k", [1, 2, 3, 5])
def test_ids_that_tie_with_the_last_of_top_k_are_kept_as_in_transformers(top_k):
    logits = torch.tensor([[3.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.0]])
    sampling = SamplingParams(temperature=1.0, top_k=top_k)
    agrees(distribution(logits, sampling), as_transformers(logits, sampling))


@pytest.mark.parametrize("seed", range(5))
def test_the_draft_is_filtered_as_in_transformers_assisted_generation(seed, monkeypatch):
    """The scores that its assistant drafts with in its first step, against the assistant's own logits."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    target, draft = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    draft.lm_head.weight.data *= 12
    draft.generation_config.update(
        num_assistant_tokens=3,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    seen: list[Any] = []
    whole = candidate_generator.AssistedCandidateGenerator._generate_candidates

    def recorded(self: Any, arguments: dict[str, Any]) -> Any:
        ids, scores = whole(self, arguments)
        seen.append((ids, scores))
        return ids, scores

    monkeypatch.setattr(candidate_generator.AssistedCandidateGenerator, "_generate_candidates", recorded)
    sampling = SamplingParams(temperature=0.6, top_k=20, top_p=0.8, min_p=0.02)
    target.generate(  # pyright: ignore[reportAttributeAccessIssue]
        torch.tensor([[1, 2, 3, 4]]),
        assistant_model=draft,
        max_new_tokens=4,
        do_sample=True,
        pad_token_id=0,
        eos_token_id=None,
        temperature=0.6,
        top_k=20,
        top_p=0.8,
        min_p=0.02,
    )
    rule = rule_of("transformers")
    own = rule.draft_sampling(rule.target_sampling(sampling))
    ids, scores = seen[0]
    with torch.no_grad():
        logits = draft(ids[:, :-1]).logits[0, -scores.shape[1] :]
    agrees(distribution(logits, own), scores[0].softmax(-1))


def test_the_target_is_filtered_as_llama_cpps_server_answered():
    """Recorded probabilities after its default chain of samplers. The ids that it did not list share what is left."""
    golden = json.loads((DATA / "llama_cpp_sampling.json").read_text())
    for text in golden["texts"]:
        listed = torch.tensor(text["logprobs"]).double().exp()
        others = torch.full((2000,), float(1 - listed.sum()) / 2000, dtype=torch.float64)
        logits = torch.cat([listed, others]).log().float()
        places = {id: i for i, id in enumerate(text["ids"])}
        for case in text["cases"]:
            own = rule_of("llama.cpp").target_sampling(SamplingParams(**case["sampling"]))
            wanted = torch.zeros(len(logits))
            wanted[[places[id] for id in case["ids"]]] = torch.tensor(case["probabilities"])
            agrees(distribution(logits, own), wanted)


@pytest.mark.parametrize("rule", SERVER_RULES)
def test_only_transformers_filters_drafts_like_the_target(rule):
    """A greedy draft of a server, and vLLM's, which the source says is drawn at the temperature alone."""
    sampling = SamplingParams(temperature=0.7, top_k=5, top_p=0.5)
    own = rule_of(rule).draft_sampling(rule_of(rule).target_sampling(sampling))
    p = distribution(random_logits(1), own)
    kept = {"vllm": V, "vllm-block": V, "transformers": int(p.count_nonzero())}.get(rule, 1)
    assert p.count_nonzero() == kept
    assert kept in (1, V) or kept < 5


@pytest.mark.parametrize("rule", ["vllm", "vllm-greedy", "vllm-block", "sglang"])
def test_min_p_is_refused_where_the_server_cannot_use_it_with_a_draft(rule):
    with pytest.raises(UserError, match="--min-p"):
        rule_of(rule).target_sampling(SamplingParams(temperature=1.0, min_p=0.1))
    rule_of(rule).target_sampling(SamplingParams(temperature=0.0))


@pytest.mark.parametrize(
    ("rule", "sent", "used"),
    [
        ("vllm", 1e-6, 0.01),
        ("vllm", 0.009, 0.01),
        ("vllm", 0.0, 0.0),
        ("sglang", 9e-7, 0.0),
        ("sglang", 2e-6, 2e-6),
    ],
)
def test_temperatures_near_zero_are_those_of_the_server(rule, sent, used):
    """vllm/sampling_params.py (_MAX_TEMP) and sglang/srt/sampling/sampling_params.py (_SAMPLING_EPS)."""
    assert rule_of(rule).target_sampling(SamplingParams(temperature=sent)).temperature == used


# lookups


def random_text(seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, rng.integers(2, 9), rng.integers(2, 60)).tolist()


def looked_up(
    function: Callable[[list[int], int, int], list[int]], seeds: range
) -> list[tuple[int, list[int], list[int]]]:
    """Return the texts whose drafts differ. function: takes a text, the longest n-gram and K."""
    differ = []
    for seed in seeds:
        text, longest, k = random_text(seed), 1 + seed % 5, 1 + seed % 8
        found = PromptLookupDrafter(longest).draft(text, k)
        wanted = function(text, longest, k)
        if found != wanted:
            differ.append((seed, found, wanted))
    return differ


def test_prompt_lookup_is_transformers():
    def of_transformers(text: list[int], longest: int, k: int) -> list[int]:
        generator = candidate_generator.PromptLookupCandidateGenerator(
            num_output_tokens=k, max_matching_ngram_size=longest, max_length=10_000
        )
        ids, _ = generator.get_candidates(torch.tensor([text]))  # type: ignore[arg-type]
        return ids[0, len(text) :].tolist()

    assert looked_up(of_transformers, range(2000)) == []


def test_ngram_gpu_drafts_what_vllms_kernels_drafted():
    """Recorded from the kernels of vLLM 0.32.0 in Triton's interpreter."""
    for text, longest, drafted in json.loads((DATA / "vllm_ngram_gpu.json").read_text())["drafts"]:
        assert NgramGpuDrafter(longest).draft(text, len(drafted)) == drafted


def test_ngram_simple_by_hand():
    """common_ngram_simple_draft of llama.cpp, which sees the last token apart from the text before it."""

    def drafted(text: list[int], n: int, k: int) -> list[int]:
        return NgramSimpleDrafter(n).draft(text, k)

    # the latest 7 8, not the earlier one; the first token of a text never counts
    text = [9, 7, 8, 1, 2, 7, 8, 3, 4, 5, 7, 8]
    assert drafted(text, 2, 3) == [3, 4, 5]
    assert drafted([7, 8, *range(20, 30), 7, 8], 2, 3) == []
    # the last token is not copied, and fewer than n tokens are no draft
    assert drafted([0, 0, 0, 0, 5, 6, 1, 2, 5, 6], 2, 4) == [1, 2, 5]
    assert drafted([0, 0, 0, 0, 0, 5, 6, 1, 5, 6], 2, 4) == [1, 5]
    assert drafted([0, 0, 0, 0, 0, 0, 5, 6, 5, 6], 2, 4) == []
    # a text needs more than n + K + 2 tokens
    assert drafted([0, 5, 6, 1, 2, 5, 6], 2, 3) == []
    assert drafted([0, 0, 5, 6, 1, 2, 5, 6], 2, 3) == [1, 2, 5]


def test_ngram_simple_drafts_what_llama_cpps_server_counted():
    """Along the texts that the server wrote, greedy and sampled: tokens that it drafted and accepted."""
    for text in json.loads((DATA / "llama_cpp_ngram_simple.json").read_text())["texts"]:
        drafter, prompt, tokens = NgramSimpleDrafter(3), text["prompt"], text["tokens"]
        at, drafted, accepted = 1, 0, 0
        while at < len(tokens) - 1:
            texts, draws = [prompt + tokens[:at]], torch.zeros(1, text["k"])
            draft = drafter.propose(texts, text["k"], SamplingParams(), draws)
            ids = draft.ids[0, : min(draft.counts[0], len(tokens) - at - 1)].tolist()
            right = [a == b for a, b in zip(ids, tokens[at:], strict=False)]
            stands = right.index(False) if False in right else len(right)
            at, drafted, accepted = at + stands + 1, drafted + len(ids), accepted + stands
        assert (drafted, accepted) == (text["drafted"], text["accepted"])


# functions of servers that are not installed: their source is enough


def functions_of(package: str, path: str, *names: str, **known: Any) -> SimpleNamespace:
    """Functions of a module, whose other imports may be missing. known: what they need beside torch and numpy."""
    wanted = definitions(package, path, names)
    for node in wanted:
        node.decorator_list = []
    space: dict[str, Any] = {"torch": torch, "np": np, "F": torch.nn.functional, **known}
    annotations = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*annotations, *wanted], []), path, "exec"), space)
    return SimpleNamespace(**space)


def definitions(package: str, path: str, names: tuple[str, ...]) -> list[ast.FunctionDef]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / path).read_text())
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert len(wanted) == len(names), f"{path} has no longer all of {names}"
    return wanted


@pytest.fixture(scope="module")
def vllm_kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the Triton kernels of vLLM's rejection sampler, in a file whose source Triton's interpreter reads."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("without a GPU, Triton needs TRITON_INTERPRET=1")
    names = (
        "rejection_greedy_sample_kernel",
        "rejection_random_sample_kernel",
        "sample_recovered_tokens_kernel",
    )
    kernels = definitions("vllm", "v1/sample/rejection_sampler.py", names)
    file = tmp_path_factory.mktemp("vllm") / "vllm_kernels.py"
    imports = "import triton\nimport triton.language as tl\n"
    file.write_text("\n\n".join([imports, *map(ast.unparse, kernels)]))
    spec = importlib.util.spec_from_file_location("vllm_kernels", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_drafted_tokens_are_accepted_and_replaced_as_in_vllm(vllm_kernels, seed):
    """The kernels of vLLM 0.32.0 with our uniforms: the same tokens, in chains of different lengths.

    A replaced token is the first of an exponential race, whose rates are the residual that we return.
    """
    rng = torch.Generator().manual_seed(seed)
    k, requests, width = 1 + seed % 5, 12, (10, 50, 1000)[seed % 3]

    def softmax(*size: int) -> Tensor:
        scale = torch.rand(*size[:-1], 1, generator=rng) * 4
        return (torch.randn(*size, generator=rng) * scale).softmax(-1)

    p, q = softmax(requests, k + 1, width), softmax(requests, k, width)
    q = torch.where(torch.rand(requests, k, 1, generator=rng) < 0.3, p[:, :-1], q)
    drafted = torch.multinomial(q.flatten(0, 1), 1, generator=rng).view(requests, k)
    u = torch.rand(requests, k, generator=rng)
    counts = torch.randint(1, k + 1, (requests,), generator=rng)
    race = torch.empty(requests, width).exponential_(generator=rng).reciprocal()
    bonus = (p[torch.arange(requests), counts] * race).argmax(-1)

    rows = [(i, j) for i in range(requests) for j in range(int(counts[i]))]
    flat = tuple(torch.tensor(rows).T)
    ends, ids = counts.cumsum(0), drafted[flat].int()
    replaced = torch.empty_like(ids)
    vllm_kernels.sample_recovered_tokens_kernel[(requests, k)](
        replaced, ends, ids, q[flat], p[:, :-1][flat], race, width, 1024, False, False
    )
    emitted = torch.full((requests, k + 1), -1, dtype=torch.int32)
    vllm_kernels.rejection_random_sample_kernel[(requests,)](
        emitted,
        ends,
        ids,
        q[flat],
        p[:, :-1][flat],
        bonus,
        replaced,
        u[flat],
        torch.zeros(requests, dtype=torch.bool),
        k,
        width,
        None,
        False,
        False,
    )

    accepted, following = verify_rows(p, q, drafted, u, counts)
    assert int(accepted.sum()) > 0
    assert emitted.tolist() == with_next(drafted, accepted, (following * race).argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_greedy_drafts_are_accepted_as_in_vllm(vllm_kernels, seed):
    """The kernel of vLLM 0.32.0: drafted tokens that are the most probable ones are accepted."""
    rng = torch.Generator().manual_seed(seed)
    requests, k, width = 12, 4, 3
    logits = torch.randn(requests, k + 1, width, generator=rng)
    drafted = torch.randint(width, (requests, k), generator=rng)
    counts = torch.randint(1, k + 1, (requests,), generator=rng)
    best = logits.argmax(-1)
    flat = tuple(torch.tensor([(i, j) for i in range(requests) for j in range(int(counts[i]))]).T)
    emitted = torch.full((requests, k + 1), -1, dtype=torch.int32)
    vllm_kernels.rejection_greedy_sample_kernel[(requests,)](
        emitted,
        counts.cumsum(0),
        drafted[flat].int(),
        best[:, :-1][flat],
        best[torch.arange(requests), counts],
        None,
        k,
        None,
        None,
        False,
    )
    p = distribution(logits, SamplingParams())
    q = torch.nn.functional.one_hot(drafted, width).float()
    accepted, following = verify_rows(p, q, drafted, torch.rand(requests, k), counts)
    assert emitted.tolist() == with_next(drafted, accepted, following.argmax(-1))


def with_next(drafted: Tensor, accepted: Tensor, following: Tensor) -> list[list[int]]:
    """Return the emitted tokens of each request, filled with -1."""
    rows = []
    for ids, n, token in zip(drafted.tolist(), accepted.tolist(), following.tolist(), strict=True):
        rows.append([*ids[:n], token, *[-1] * (len(ids) - n)])
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_target_and_draft_are_filtered_as_in_vllm(seed):
    """vLLM 0.32.0: the PyTorch path of its filters, and what its drafts are drawn from."""
    filters = functions_of(
        "vllm",
        "v1/sample/ops/topk_topp_sampler.py",
        "apply_top_k_top_p_pytorch",
        "apply_top_k_only",
    )
    proposer = functions_of(
        "vllm",
        "v1/spec_decode/llm_base_proposer.py",
        "compute_probs_and_sample_next_token",
        empty_exponential_noise_like=lambda p, fp64: torch.empty_like(p),
        sample_with_exponential_noise=torch.div,
    )
    logits, sampling = random_logits(seed), random_sampling(seed, min_p=False)
    rule = rule_of("vllm")
    own = rule.target_sampling(sampling)
    top_k = torch.tensor([min(sampling.top_k, V)]) if sampling.top_k else None
    top_p = torch.tensor([sampling.top_p]) if sampling.top_p < 1 else None
    wanted = filters.apply_top_k_top_p_pytorch(logits / sampling.temperature, top_k, top_p, True)
    agrees(distribution(logits, own), wanted.softmax(-1))
    metadata = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.tensor([sampling.temperature]))
    _, q = proposer.compute_probs_and_sample_next_token(logits.clone(), metadata)
    agrees(distribution(logits, rule.draft_sampling(own)), q)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_the_target_is_filtered_as_in_sglang(seed):
    """SGLang 0.5.23: its PyTorch path of the filters where drafted tokens are verified."""
    sampler = functions_of("sglang", "srt/layers/sampler.py", "top_p_normalize_probs_torch")
    verifying = functions_of(
        "sglang",
        "srt/speculative/dflash_utils.py",
        "_dflash_top_k_renorm_prob",
        "_dflash_top_p_renorm_prob",
        top_k_renorm_prob=None,
        top_p_renorm_prob=None,
        is_npu=lambda: False,
        Optional=None,
        _dflash_npu_top_k_top_p_renorm_prob=lambda *_, **__: None,
        top_p_normalize_probs_torch=sampler.top_p_normalize_probs_torch,
    )
    logits, sampling = random_logits(seed), random_sampling(seed, min_p=False)
    wanted = torch.softmax(logits / sampling.temperature, -1)
    if sampling.top_k:
        wanted = verifying._dflash_top_k_renorm_prob(wanted, torch.tensor([sampling.top_k]))
    if sampling.top_p < 1:
        wanted = verifying._dflash_top_p_renorm_prob(wanted, torch.tensor([sampling.top_p]))
    agrees(distribution(logits, rule_of("sglang").target_sampling(sampling)), wanted)


@pytest.mark.slow
def test_prompt_lookup_is_vllms():
    """vLLM 0.32.0, without numba."""
    module = functions_of("vllm", "v1/spec_decode/ngram_proposer.py", "_find_longest_matched_ngram_and_propose_tokens")

    def of_vllm(text: list[int], longest: int, k: int) -> list[int]:
        find = module._find_longest_matched_ngram_and_propose_tokens
        return find(np.array(text), 1, longest, 10_000, k).tolist()

    assert looked_up(of_vllm, range(2000)) == []


def test_every_server_rule_is_a_value_that_changes_no_other_parameter():
    sampling = SamplingParams(temperature=0.7, top_k=5, top_p=0.5, max_tokens=9, seed=4, stop_token_ids=(3,))
    for name in SERVER_RULES:
        rule = rule_of(name)
        own = rule.target_sampling(sampling)
        assert replace(own, filters=sampling.filters) == sampling
        draft = rule.draft_sampling(own)
        assert replace(draft, filters=sampling.filters, temperature=0.7) == sampling
