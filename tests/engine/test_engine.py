"""Speculative decoding changes nothing but the time: by enumeration, by equality, by chi-square."""

import itertools
import math
from typing import Any

import pytest
import torch
from builders import build, rounding
from drafter_laws import Bigrams
from enumeration import probabilities
from hypothesis import given, settings
from hypothesis import strategies as st
from second_device import DEVICE, Elsewhere, SecondDevice
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftlab.engine.drafters.ngram import PromptLookupDrafter
from draftlab.engine.generate import (
    Draft,
    Drafter,
    ModelDrafter,
    decode,
    output_tokens,
    speculative_decode,
    verify_batch,
)
from draftlab.engine.verify import distribution, draw, verify
from draftlab.model import llama
from draftlab.model.cuda_graphs import CudaGraphLlama
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.native_cpu import NativeLlama
from draftlab.sampling import SamplingParams

PROMPT = [0, 17, 44, 101, 9, 250, 31]


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


def test_equal_distributions_accept_everything_and_never_divide_by_zero():
    p = torch.rand(4, 50).softmax(-1)
    accepted, rest = verify(p, p[:3], torch.tensor([3, 9, 1]), torch.full((3,), 1 - 1e-7))
    assert accepted == 3
    torch.testing.assert_close(rest, p[3])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_sampled_step_of_chains_waits_once_for_the_device(monkeypatch, deterministic):
    """It decides what it decides on the CPU, where the rule is verified row by row."""
    rng, sampling = torch.Generator().manual_seed(3), SamplingParams(max_tokens=9, temperature=1.0)
    logits, counts = torch.randn(64, 4, 7, generator=rng), [0, 1, 2, 3] * 16
    q = torch.softmax(torch.randn(64, 3, 7, generator=rng), -1)
    ids, uniform = (
        torch.multinomial(q.flatten(0, 1), 1, generator=rng).view(64, 3),
        torch.rand(64, 4, generator=rng),
    )
    wanted = []
    for row, count in enumerate(counts):
        own = (
            q[row, :count]
            if not deterministic
            else torch.nn.functional.one_hot(ids[row, :count], 7).float()
        )
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


def test_draw_is_the_inverse_cdf():
    u = torch.linspace(0, 1, 10_001)[:-1]
    p = torch.tensor([0.1, 0.0, 0.6, 0.3])
    counts = torch.bincount(draw(p.expand(len(u), 4), u), minlength=4) / len(u)
    torch.testing.assert_close(counts, p, atol=2e-4, rtol=0)


def test_greedy_takes_the_lowest_id_of_a_tie():
    assert distribution(torch.tensor([1.0, 3.0, 3.0]), SamplingParams()).tolist() == [0, 1, 0]


RAGGED = [
    PROMPT,
    [0],
    [0, 90, 91, 92, 93, 4, 5, 6, 7, 8, 9, 11, 12],
    [0, 5, 250],
    [0, 77, 3, 3, 3, 3, 3, 180],
]


@pytest.fixture(scope="module")
def alone(target):
    """What each ragged prompt becomes by itself, greedily."""
    return [
        output_tokens(decode(target, [prompt], SamplingParams(max_tokens=24)))[0]
        for prompt in RAGGED
    ]


@pytest.mark.parametrize("rows", [1, 5])
def test_greedy_batches_equal_each_prompt_alone(target, drafts, alone, rows):
    sampling = SamplingParams(max_tokens=24)
    assert output_tokens(decode(target, RAGGED[:rows], sampling)) == alone[:rows]
    for k in (1, 4, 8):
        for draft in drafts.values():
            assert (
                output_tokens(
                    speculative_decode(target, ModelDrafter(draft), RAGGED[:rows], k, sampling)
                )
                == alone[:rows]
            )


@pytest.mark.parametrize("rows", [(0,), (0, 1), (0, 1, 2)])
def test_rows_end_on_their_own(target, drafts, alone, rows):
    """A row that has met an end of text idles, and the others go on as if it were not there."""
    ends = tuple(alone[row][5] for row in rows)
    sampling = SamplingParams(max_tokens=24, stop_token_ids=ends)
    expected = [
        text[: min([text.index(e) + 1 for e in ends if e in text], default=24)] for text in alone
    ]
    assert len({len(text) for text in expected}) > 1
    steps = list(speculative_decode(target, ModelDrafter(drafts["noisy"]), RAGGED, 3, sampling))
    assert output_tokens(steps) == expected
    last = max(i for i, step in enumerate(steps) if step.row == 0)
    assert last < len(steps) - 1
    assert [t for step in steps if step.row == 0 for t in step.tokens] == expected[0]


def test_what_a_row_samples_depends_on_its_number_and_the_seed_alone(target, drafts):
    """Wherever it stands in a batch."""

    def written(rows: list[int], k: int, numbers: list[int], seed: int = 3) -> list[list[int]]:
        sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=seed, max_tokens=16)
        prompts, drafter = [RAGGED[row] for row in rows], ModelDrafter(drafts["noisy"])
        steps = speculative_decode(target, drafter, prompts, k, sampling, numbers=numbers)
        return output_tokens(steps)

    for k in (0, 3):
        order = [4, 2, 0, 3, 1]
        together, turned = (written(rows, k, rows) for rows in ([0, 1, 2, 3, 4], order))
        assert [together[row] for row in order] == turned
        assert written([2], k, [2]) == [together[2]]
        assert written([2], k, [7]) != [together[2]] != written([2], k, [2], seed=4)


def test_seconds_of_rows_add_up_to_the_passes(target):
    """A clock that counts its own readings: four a pass, three spans of one each, however many rows share them."""
    ticks = itertools.count()
    steps = list(decode(target, RAGGED[:3], SamplingParams(max_tokens=5), lambda: next(ticks)))
    spent = [
        sum(getattr(s, f"{part}_seconds") for s in steps) for part in ("draft", "verify", "host")
    ]
    assert spent == pytest.approx([5, 5, 5])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_draft_equal_to_the_target_is_always_accepted(target, k, temperature):
    sampling = SamplingParams(
        max_tokens=60, temperature=temperature, top_p=0.95 if temperature else 1
    )
    steps = list(speculative_decode(target, ModelDrafter(target), RAGGED[:2], k, sampling))
    assert all(step.accepted == step.drafted for step in steps)
    assert sum(len(s.tokens) for s in steps) == 120


class AlwaysWrong(Drafter):
    """Drafts what greedy decoding would not say."""

    def __init__(self, right: list[int], start: int) -> None:
        self.right, self.start = right, start

    def reset(self, rows, capacity):
        pass

    def propose(self, texts, count, sampling, uniform):
        at = len(texts[0]) - self.start
        return Draft(
            ids=torch.tensor([[(self.right[at + i] + 1) % 307 for i in range(count)]]),
            q=None,
            counts=[count],
        )


def test_an_always_wrong_draft_costs_steps_but_no_tokens(target):
    sampling = SamplingParams(max_tokens=40)
    (right,) = output_tokens(decode(target, [PROMPT], sampling))
    steps = list(speculative_decode(target, AlwaysWrong(right, len(PROMPT)), [PROMPT], 4, sampling))
    assert output_tokens(steps) == [right]
    assert len(steps) == 40
    assert sum(s.accepted for s in steps) == 0


class Off(Drafter):
    """Drafts nothing for a row in every second step: a step with a draft follows one without."""

    def __init__(self, model) -> None:
        self.inner, self.calls = ModelDrafter(model), 0

    def reset(self, rows, capacity):
        self.inner.reset(rows, capacity)

    def propose(self, texts, count, sampling, uniform):
        self.calls += 1
        found = self.inner.propose(texts, count, sampling, uniform)
        counts = [count if (row + self.calls) % 2 else 0 for row in range(len(texts))]
        return Draft(ids=found.ids, q=found.q, counts=counts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_draft_go_on_by_one_token(target, temperature):
    sampling = SamplingParams(max_tokens=24, temperature=temperature)
    steps = [
        s
        for s in speculative_decode(target, Off(target), RAGGED[:2], 4, sampling)
        if s.drafted == 0
    ]
    assert all(len(s.tokens) == 1 for s in steps)
    assert len(steps) > 4
    if temperature == 0:
        off = output_tokens(speculative_decode(target, Off(target), RAGGED[:2], 4, sampling))
        assert off == output_tokens(decode(target, RAGGED[:2], sampling))


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
    drafter = PromptLookupDrafter(3) if mode == "lookup" else ModelDrafter(model, 307)
    for at in range(0, 14, 3):
        ends = (greedy[at + 2], greedy[at])
        first = min(greedy.index(e) for e in ends)
        sampling = SamplingParams(max_tokens=16, stop_token_ids=ends)
        steps = list(speculative_decode(model, drafter, [PROMPT], 4, sampling))
        assert output_tokens(steps) == [greedy[: first + 1]]
        # nothing behind the end of text counts
        assert all(step.accepted <= len(step.tokens) for step in steps)


@pytest.mark.parametrize("length", range(1, 12))
def test_length_limit_anywhere_in_a_block_is_exact(target, drafts, length):
    sampling = SamplingParams(max_tokens=length)
    expected = output_tokens(decode(target, [PROMPT], sampling))
    assert (
        output_tokens(
            speculative_decode(target, ModelDrafter(drafts["noisy"]), [PROMPT], 5, sampling)
        )
        == expected
    )
    assert len(expected[0]) == length


@torch.inference_mode()
def test_bfloat16_texts_leave_the_targets_only_where_widths_round_differently(family_dirs):
    """Tie-aware: behind the text so far, what was written is within the rounding of the most probable (checked at every
    token, not up to the first difference). A token that was not written is not."""
    half = llama.load(family_dirs["llama"], torch.bfloat16)
    (text,) = output_tokens(
        speculative_decode(half, ModelDrafter(half), [PROMPT], 4, SamplingParams(max_tokens=48))
    )
    ids = torch.tensor([PROMPT + text])

    def behind(width: int) -> Tensor:
        cache = half.new_cache(1, ids.shape[1])
        half.forward(ids[:, : len(PROMPT) - 1], cache)
        parts = ids[:, len(PROMPT) - 1 : -1].split(width, 1)
        return torch.cat([half.forward(part, cache)[0] for part in parts]).float()

    narrow = behind(1)
    # ten roundings a layer
    noise = rounding(torch.bfloat16, 10 * half.shape.layers, float(narrow.std()))
    # nothing, where sums are serial
    assert all((behind(width) - narrow).abs().max() <= noise for width in (2, 5))
    gaps = narrow.amax(1) - narrow.gather(1, torch.tensor(text)[:, None])[:, 0]
    assert gaps.max() <= 2 * noise
    others = narrow.amax(1) - narrow.gather(1, (torch.tensor(text)[:, None] + 1) % 307)[:, 0]
    assert others.median() > 2 * noise


def test_a_model_of_transformers_drafts_for_itself_and_for_the_engines_models(target):
    hosted, sampling = HFDecoder(build("llama", 1)), SamplingParams(max_tokens=20)
    expected = output_tokens(decode(target, RAGGED[:2], sampling))
    for model in (hosted, target):
        steps = list(speculative_decode(model, ModelDrafter(hosted, 307), RAGGED[:2], 3, sampling))
        assert output_tokens(steps) == expected
        assert all(step.accepted == step.drafted for step in steps)


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


def pair_statistic(target: Bigrams, drafter, warp: SamplingParams, n: int) -> tuple[float, int]:
    """Chi-square of the second and third emitted tokens (drafted in one step) against the exact product."""
    p = distribution(target.logits, warp).double()
    out = torch.tensor(output_tokens(speculative_decode(target, drafter, [[2]] * n, 2, warp)))
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


@pytest.mark.parametrize("warp", WARPS)
def test_sampled_speculation_has_the_targets_distribution(warp):
    target, draft = bigram_pairs(0)
    value, degrees = pair_statistic(target, ModelDrafter(draft), warp, 4000)
    assert value < critical(degrees)


class GreedyDraftSoftmaxQ(ModelDrafter):
    """The bug of transformers #32867: drafts greedily, claims to have sampled."""

    def propose(self, texts, count, sampling, uniform):
        return super().propose(texts, count, sampling, torch.full_like(uniform, 0.5))


class DraftAtAnotherTemperature(ModelDrafter):
    def propose(self, texts, count, sampling, uniform):
        drafted = super().propose(texts, count, SamplingParams(temperature=0.4), uniform)
        told = super().propose(texts, count, sampling, uniform)
        return Draft(ids=drafted.ids, q=told.q, counts=told.counts)


class CutsWithoutSaying(ModelDrafter):
    """The bug of transformers #47932: drafts from the two most probable tokens, claims the whole distribution."""

    def propose(self, texts, count, sampling, uniform):
        drafted = super().propose(
            texts, count, SamplingParams(temperature=sampling.temperature, top_k=2), uniform
        )
        told = super().propose(texts, count, sampling, uniform)
        return Draft(ids=drafted.ids, q=told.q, counts=told.counts)


@pytest.mark.parametrize(
    "broken", [GreedyDraftSoftmaxQ, DraftAtAnotherTemperature, CutsWithoutSaying]
)
def test_chi_square_rejects_a_draft_whose_q_is_not_what_it_sampled(broken):
    target, draft = bigram_pairs(0)
    value, degrees = pair_statistic(target, broken(draft), WARPS[0], 4000)
    assert value > critical(degrees)


def test_min_p_is_transformers():
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(2)) * 3
    ids = torch.zeros(8, 1, dtype=torch.long)
    warped = TemperatureLogitsWarper(0.7)(ids, logits)  # type: ignore[arg-type]
    for one in (TopKLogitsWarper(20), TopPLogitsWarper(0.95), MinPLogitsWarper(0.1)):
        warped = one(ids, warped)  # type: ignore[arg-type]
    found = distribution(logits, SamplingParams(temperature=0.7, top_k=20, top_p=0.95, min_p=0.1))
    torch.testing.assert_close(found, warped.softmax(-1))
