"""Speculative decoding changes nothing but the time: by enumeration, by equality, by chi-square."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.builders import build
from helpers.drafter_laws import Bigrams
from helpers.enumeration import probabilities
from helpers.prompts import PROMPT, RAGGED
from helpers.second_device import DEVICE, Elsewhere, SecondDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.config.server_rules import SERVER_RULES, DecodingRule, chosen_rule
from draftlab.drafters.lookup import LatestLookupDrafter
from draftlab.engine.generate import (
    Draft,
    ModelDrafter,
    decode,
    output_tokens,
    speculative_decode,
    verify_batch,
)
from draftlab.engine.verify import distribution, draw, rule_named, verify
from draftlab.model import llama
from draftlab.model.cuda_graphs import CudaGraphLlama
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.native_cpu import NativeLlama
from draftlab.registry import REJECTION
from draftlab.sampling import SamplingParams


def as_llama(family: str, seed: int, directory, **changes) -> llama.Llama:
    path = directory / f"{family}-{seed}"
    build(family, seed, **changes).save_pretrained(path)
    return llama.load(path, torch.float32)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return as_llama("llama", 1, tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def drafts(tmp_path_factory, target):
    """Unrelated, identical, and the target itself with noise (agrees now and then)."""
    root = tmp_path_factory.mktemp("drafts")
    noisy = build("llama", 1)
    torch.manual_seed(5)
    with torch.no_grad():
        for p in noisy.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    noisy.save_pretrained(root / "noisy")
    return {
        "unrelated": as_llama("qwen3", 2, root, num_hidden_layers=2),
        "identical": target,
        "noisy": llama.load(root / "noisy", torch.float32),
    }


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_sampled_step_of_chains_waits_once_for_the_device(monkeypatch, deterministic):
    """The result is the CPU's, where the rule is verified row by row."""
    rng, sampling = torch.Generator().manual_seed(3), SamplingParams(max_tokens=9, temperature=1.0)
    logits, counts = torch.randn(64, 4, 7, generator=rng), [0, 1, 2, 3] * 16
    q = torch.softmax(torch.randn(64, 3, 7, generator=rng), -1)
    ids, uniform = (
        torch.multinomial(q.flatten(0, 1), 1, generator=rng).view(64, 3),
        torch.rand(64, 4, generator=rng),
    )
    wanted = []
    for row, count in enumerate(counts):
        own = q[row, :count] if not deterministic else torch.nn.functional.one_hot(ids[row, :count], 7).float()
        accepted, rest = verify(
            torch.softmax(logits[row], -1)[: count + 1], own, ids[row, :count], uniform[row, :count]
        )
        last = int(draw(rest, uniform[row, -1]))
        wanted.append((list(range(accepted)), [*ids[row, :accepted].tolist(), last]))
    waits: list[Elsewhere] = []
    monkeypatch.setattr(Elsewhere, "tolist", lambda self: waits.append(self) or self.local.tolist())
    with SecondDevice():
        draft = Draft(ids=ids.to(DEVICE), q=None if deterministic else q.to(DEVICE), counts=counts)
        found = verify_batch(logits.to(DEVICE), draft, counts, sampling, uniform.to(DEVICE))
    assert found == wanted
    assert len({len(path) for path, _ in found}) >= 3
    assert len(waits) == 1


@given(probabilities(5), st.floats(0, 1, exclude_max=True))
@settings(deadline=None)
def test_draw_never_gives_an_impossible_token(p, u):
    assert p[draw(p, torch.tensor(u))] > 0


@pytest.mark.parametrize("vocab", [5, 256, 257, 1000, 49152])
def test_draw_gives_the_first_id_whose_cumulative_sum_exceeds_u(vocab):
    """Blocks of ids are summed first, and blocks may be empty. The ends of [0, 1) are drawn, too."""
    rng = torch.Generator().manual_seed(vocab)
    p = torch.softmax(4 * torch.randn(64, vocab, generator=rng), -1)
    p[:, ::3] = 0
    p[32:, : vocab // 2] = 0
    p /= p.sum(-1, keepdim=True)
    u = torch.rand(64, generator=rng)
    u[::4], u[1::4] = 0, 1 - 2**-24
    cumulative = p.numpy().astype(float).cumsum(1)
    wanted = [
        int((row <= min(at * row[-1], math.nextafter(row[-1], 0))).sum())
        for row, at in zip(cumulative, u.tolist(), strict=True)
    ]
    assert draw(p, u).tolist() == wanted


@pytest.fixture(scope="module")
def alone(target):
    """Return the greedy text of each ragged prompt, decoded alone."""
    return [output_tokens(decode(target, [prompt], SamplingParams(max_tokens=24)))[0] for prompt in RAGGED]


@pytest.mark.parametrize("rows", [1, 5])
def test_greedy_batches_equal_each_prompt_alone(target, drafts, alone, rows):
    sampling = SamplingParams(max_tokens=24)
    assert output_tokens(decode(target, RAGGED[:rows], sampling)) == alone[:rows]
    for k in (1, 4, 8):
        for draft in drafts.values():
            assert (
                output_tokens(speculative_decode(target, ModelDrafter(draft), RAGGED[:rows], k, sampling))
                == alone[:rows]
            )


def test_what_a_row_samples_depends_on_its_number_and_the_seed(target, drafts):
    """Its place in a batch does not matter."""

    def written(rows: list[int], k: int, numbers: list[int], seed: int = 3) -> list[list[int]]:
        sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=seed, max_tokens=16)
        prompts, drafter = [RAGGED[row] for row in rows], ModelDrafter(drafts["noisy"])
        steps = speculative_decode(target, drafter, prompts, k, sampling, numbers=numbers)
        return output_tokens(steps)

    for k in (0, 3):
        order = [4, 2, 0]
        together, turned = written([0, 2, 4], k, [0, 2, 4]), written(order, k, order)
        assert together == turned[::-1]
        assert written([2], k, [7]) != [together[1]] != written([2], k, [2], seed=4)


def test_seconds_of_rows_add_up_to_the_passes(target):
    """A clock that counts its own readings: four a pass, three spans of one each, however many rows share them."""
    ticks = itertools.count()
    steps = list(decode(target, RAGGED[:3], SamplingParams(max_tokens=5), lambda: next(ticks)))
    spent = [sum(getattr(s, f"{part}_seconds") for s in steps) for part in ("draft", "verify", "host")]
    assert spent == pytest.approx([5, 5, 5])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 8])
def test_a_draft_equal_to_the_target_is_always_accepted(target, k, temperature):
    sampling = SamplingParams(max_tokens=60, temperature=temperature, top_p=0.95 if temperature else 1)
    steps = list(speculative_decode(target, ModelDrafter(target), RAGGED[:2], k, sampling))
    assert all(step.accepted == step.drafted for step in steps)
    assert sum(len(s.tokens) for s in steps) == 120


@pytest.mark.parametrize("mode", ["eager", "native", "graphs", "hosted", "lookup"])
def test_every_way_to_decode_stops_at_the_first_of_several_ends(target, mode):
    (greedy,) = output_tokens(decode(target, [PROMPT], SamplingParams(max_tokens=16)))
    run: Any = {
        "native": NativeLlama,
        "graphs": CudaGraphLlama,
        "hosted": lambda _: HFDecoder(build("llama", 1)),
    }
    model = run[mode](target) if mode in run else target
    # a model that drafts for itself: all stands, so that ends come within blocks
    drafter = LatestLookupDrafter(3) if mode == "lookup" else ModelDrafter(model, 307)
    for at in range(0, 14, 3):
        ends = (greedy[at + 2], greedy[at])
        first = min(greedy.index(e) for e in ends)
        sampling = SamplingParams(max_tokens=16, stop_token_ids=ends)
        steps = list(speculative_decode(model, drafter, [PROMPT], 4, sampling))
        assert output_tokens(steps) == [greedy[: first + 1]]
        # nothing behind the end of text counts
        assert all(step.accepted <= len(step.tokens) for step in steps)


@pytest.mark.parametrize("length", range(1, 12, 2))
def test_length_limit_anywhere_in_a_block_is_exact(target, drafts, length):
    sampling = SamplingParams(max_tokens=length)
    expected = output_tokens(decode(target, [PROMPT], sampling))
    assert output_tokens(speculative_decode(target, ModelDrafter(drafts["noisy"]), [PROMPT], 5, sampling)) == expected
    assert len(expected[0]) == length


def bigram_pairs(seed: int) -> tuple[Bigrams, Bigrams]:
    rng = torch.Generator().manual_seed(seed)
    p = torch.randn(6, 6, generator=rng)
    return Bigrams(p * 1.5), Bigrams((p + 0.8 * torch.randn(6, 6, generator=rng)) * 1.5)


def chi_square(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    keep = expected >= 5
    merged_counts = torch.cat([counts[keep], counts[~keep].sum().view(1)])
    merged = torch.cat([expected[keep], expected[~keep].sum().view(1)])
    merged_counts, merged = merged_counts[merged > 0], merged[merged > 0]
    return float(((merged_counts - merged) ** 2 / merged).sum()), len(merged) - 1


def pair_statistic(target: Bigrams, drafter, sampling: SamplingParams, n: int, rule: DecodingRule) -> tuple[float, int]:
    """Chi-square of the second and third emitted tokens (drafted in one step) against the exact product."""
    own = rule.target_sampling(sampling)
    p = distribution(target.logits, own).double()
    by = {"rule": rule_named(rule.verify), "draft_sampling": rule.draft_sampling(own)}
    out = torch.tensor(output_tokens(speculative_decode(target, drafter, [[2]] * n, 2, own, **by)))
    counts = torch.bincount(out[:, 1] * 6 + out[:, 2], minlength=36).view(6, 6).double()
    expected = torch.einsum("a,ab,bc->bc", p[2], p, p) * n
    return chi_square(counts, expected)


def critical(degrees: int) -> float:
    """Wilson-Hilferty quantile of chi-square at 1 - 1e-6 (z = 4.753)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.753 * math.sqrt(2 / (9 * degrees))) ** 3


WARPS = [
    SamplingParams(temperature=0.9, max_tokens=3),
    SamplingParams(temperature=1.2, max_tokens=3, top_k=4, top_p=0.9, min_p=0.1),
]


@pytest.mark.parametrize(
    ("server", "warp"),
    [(None, WARPS[0]), *((server, WARPS[1]) for server in (None, *SERVER_RULES))],
)
def test_sampled_speculation_has_the_targets_distribution(server, warp):
    rule = chosen_rule(server, REJECTION)
    if "min_p" in rule.refused:
        warp = replace(warp, min_p=0.0)
    target, draft = bigram_pairs(0)
    value, degrees = pair_statistic(target, ModelDrafter(draft), warp, 2000, rule)
    assert value < critical(degrees)


class GreedyDraftSoftmaxQ(ModelDrafter):
    """The bug of transformers #32867: drafts greedily, claims to have sampled."""

    def propose(self, texts, count, sampling, uniform):
        return super().propose(texts, count, sampling, torch.full_like(uniform, 0.5))


def test_chi_square_rejects_a_draft_whose_q_is_not_what_it_sampled():
    target, draft = bigram_pairs(0)
    value, degrees = pair_statistic(target, GreedyDraftSoftmaxQ(draft), WARPS[0], 4000, DecodingRule(REJECTION))
    assert value > critical(degrees)
