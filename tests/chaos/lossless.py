"""Texts of EAGLE-3 and parallel drafts against transformers alone, on a pair that accepts often.

The oracle reads the target with transformers, without a cache, and nothing of draftlab. `make chaos` runs this file.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.builders import PASS_ROUNDING, build
from scipy.stats import chi2
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftlab.drafters.parallel import ParallelDrafter
from draftlab.engine.generate import Draft, Drafter, output_tokens, speculative_decode
from draftlab.heads.eagle3.decoder import EagleLlama
from draftlab.heads.eagle3.drafter import EagleDrafter
from draftlab.heads.eagle3.layout import Head, HeadShape
from draftlab.model import llama
from draftlab.sampling import SamplingParams

DRAFTERS = ("eagle", "parallel")
SAMPLED = ({"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9})
PROMPT = [0, 17, 44, 101, 9, 17, 44]
BATCH, BATCHES, TOKENS, K = 500, 40, 4, 3
LEAST = 5 / (BATCH * BATCHES)  # probability of a text that is expected five times


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a target whose next token follows mostly from the last, and the same with noise."""
    folder = tmp_path_factory.mktemp("lossless")
    model = build("llama", 1, num_hidden_layers=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter *= 0.02
        model.get_parameter("lm_head.weight").mul_(6)
        model.save_pretrained(folder / "target")
        for parameter in model.parameters():
            parameter += 0.003 * torch.randn_like(parameter)
        model.save_pretrained(folder / "noisy")
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def target(folder: Path) -> llama.Llama:
    return llama.load(folder / "target", torch.float32)


@pytest.fixture(params=DRAFTERS)
def drafter(request: pytest.FixtureRequest, folder: Path, target: llama.Llama) -> Drafter:
    if request.param == "parallel":
        draft = llama.load(folder / "noisy", torch.float32)
        draft.pard_token = 2
        return ParallelDrafter(draft, None)
    # the head's attention reads its last token alone, and copies the token's embedding to the output
    config = HeadShape(
        hidden=64,
        heads=8,
        kv_heads=8,
        head_dim=8,
        ffn=88,
        eps=1e-6,
        context=256,
        vocab=307,
        draft_vocab=307,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        target_hidden=64,
        layer_ids=(1, 2, 3),
        norm_before_residual=False,
        sliding_window=1,
    )
    torch.manual_seed(3)
    weights = {
        name: torch.ones(size) if name.endswith("norm.weight") else 0.005 * torch.randn(size)
        for name, size in config.sizes().items()
    }
    weights["layers.0.self_attn.v_proj.weight"][:, :64] += torch.eye(64)
    weights["layers.0.self_attn.o_proj.weight"] += torch.eye(64)
    weights["norm.weight"], weights["lm_head.weight"] = target.norm, target.head
    head = Head(config=config, weights=weights, ids=torch.arange(307), embedding=None)
    return EagleDrafter(target, EagleLlama(head, target.embed, Path("head")))


@torch.inference_mode()
def probabilities(oracle: Any, texts: Sequence[Sequence[int]], temperature: float, top_p: float = 1) -> Tensor:
    """Return the distributions of the next tokens of texts of one length, [n, V], in float64."""
    logits = torch.cat([oracle(part).logits[:, -1] for part in torch.tensor(texts).split(64)])
    p = (logits.double() / temperature).softmax(-1)
    ranked, ids = p.sort(dim=-1, descending=True)
    p = torch.zeros_like(p).scatter(1, ids, ranked * (ranked.cumsum(-1) - ranked < top_p))
    return p / p.sum(-1, keepdim=True)


def exact(oracle: Any, sampling: dict[str, float]) -> dict[tuple[int, ...], float]:
    """Return the probability of every text of TOKENS tokens after PROMPT that is at least LEAST."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        rows = probabilities(oracle, [[*PROMPT, *text] for text in texts], **sampling)
        texts = {
            (*text, token): before * p
            for (text, before), row in zip(texts.items(), rows.tolist(), strict=True)
            for token, p in enumerate(row)
            if before * p >= LEAST
        }
    return texts


def p_value(target: llama.Llama, drafter: Drafter, oracle: Any, sampling: dict[str, float]) -> float:
    """Return the p of the chi-square test of sampled texts, with all texts below LEAST as a cell."""
    counts, accepted, drafted = Counter[tuple[int, ...]](), 0, 0
    for seed in range(BATCHES):
        params = SamplingParams(max_tokens=TOKENS, seed=seed, **sampling)
        steps = list(speculative_decode(target, drafter, [PROMPT] * BATCH, K, params))
        counts.update(map(tuple, output_tokens(steps)))
        accepted += sum(step.accepted for step in steps)
        drafted += sum(step.drafted for step in steps)
    assert accepted > 0.4 * drafted
    cells, n = exact(oracle, sampling), counts.total()
    assert len(cells) > 100
    pairs = [(counts[text], n * p) for text, p in cells.items()]
    pairs.append((n - sum(seen for seen, _ in pairs), n - sum(wanted for _, wanted in pairs)))
    return float(chi2.sf(sum((seen - p) ** 2 / p for seen, p in pairs), len(cells)))


@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
def test_sampled_texts_have_the_targets_probabilities(target, drafter, oracle, sampling):
    assert p_value(target, drafter, oracle, sampling) > 1e-4


def test_a_false_q_is_found(target, drafter, oracle, monkeypatch):
    """The control: verification is told a distribution that the tokens were not drawn from."""
    propose = drafter.propose

    def false(*given: Any) -> Draft:
        draft = propose(*given)
        assert draft.q is not None
        return replace(draft, q=draft.q.sqrt() / draft.q.sqrt().sum(-1, keepdim=True))

    monkeypatch.setattr(drafter, "propose", false)
    assert p_value(target, drafter, oracle, SAMPLED[0]) < 1e-9


def test_greedy_texts_are_the_oracles(target, drafter, oracle):
    prompts = [PROMPT, [0, 5, 250, 31, 66, 3, 8, 12, 99], [0, 90, 91], [0, 7]]
    steps = list(speculative_decode(target, drafter, prompts, K, SamplingParams(max_tokens=32)))
    assert sum(step.accepted for step in steps) > 30
    for prompt, text in zip(prompts, output_tokens(steps), strict=True):
        logits = oracle(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
        gap = logits.max(-1).values - logits.gather(1, torch.tensor(text).unsqueeze(1)).squeeze(1)
        assert float(gap.max()) < PASS_ROUNDING * float(logits.abs().max())
