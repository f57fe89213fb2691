"""Speculative decoding changes nothing but the time: by enumeration, by equality, by chi-square."""

import itertools
import math

import pytest
import torch
from conftest import build
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab import llama
from draftlab.engine.generate import ModelDrafter, Sampling, Step, plain, speculative
from draftlab.engine.verify import distribution, draw, verify

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


def tokens_of(steps: list[Step]) -> list[int]:
    return [t for step in steps for t in step.tokens]


def probabilities(v: int):
    weights = st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0, 5.0, 0.3]), min_size=v, max_size=v)
    return weights.filter(any).map(lambda w: torch.tensor(w, dtype=torch.float64) / sum(w))


def emitted_distribution(p: list[Tensor], q: list[Tensor], rule=verify) -> Tensor:
    """Exact joint of the first two emitted tokens, [V, V], over every draft and accept outcome, in float64.

    p, q: context-free distributions per position, K + 1 and K of them. The uniforms are enumerated by cutting [0, 1)
    at each accept threshold; a missing second token (rejection at the first) is drawn from p as the next step would.
    """
    v, k = len(p[0]), len(q)
    joint = torch.zeros(v, v, dtype=torch.float64)
    for drafted in itertools.product(range(v), repeat=k):
        weight = math.prod(float(q[i][t]) for i, t in enumerate(drafted))
        if weight == 0:
            continue
        chances = [min(1.0, float(p[i][t] / q[i][t])) for i, t in enumerate(drafted)]
        for outcome in itertools.product([True, False], repeat=k):
            share = math.prod(c if ok else 1 - c for c, ok in zip(chances, outcome, strict=True))
            if share == 0:
                continue
            u = torch.tensor([c / 2 if ok else (1 + c) / 2 for c, ok in zip(chances, outcome, strict=True)])
            accepted, rest = rule(torch.stack(p), torch.stack(q), torch.tensor(drafted), u.double())
            if accepted == 0:
                joint += weight * share * torch.outer(rest, p[1])
            elif accepted == 1:
                joint[drafted[0]] += weight * share * rest
            else:
                joint[drafted[0], drafted[1]] += weight * share
    return joint


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4).flatmap(lambda v: st.lists(probabilities(v), min_size=5, max_size=5)))
def test_emitted_distribution_is_the_targets(ps):
    p, q = ps[:3], ps[3:]
    torch.testing.assert_close(emitted_distribution(p, q), torch.outer(p[0], p[1]), atol=1e-12, rtol=0)


def residual_is_p(p, q, drafted, u):
    accepted, _ = verify(p, q, drafted, u)
    return accepted, p[accepted]


def only_rejected_token_taken_out(p, q, drafted, u):
    accepted, rest = verify(p, q, drafted, u)
    if accepted == len(drafted):
        return accepted, rest
    rest = p[accepted].clone()
    rest[drafted[accepted]] = 0
    return accepted, rest / rest.sum() if rest.sum() > 0 else p[accepted]


def lenient(p, q, drafted, u):
    return verify(p, q, drafted, u * 0.5)


@pytest.mark.parametrize("broken", [residual_is_p, only_rejected_token_taken_out, lenient])
def test_enumeration_rejects_known_bugs(broken):
    p = [torch.tensor(row, dtype=torch.float64) for row in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [1.0, 0, 0])]
    q = [torch.tensor(row, dtype=torch.float64) for row in ([0.2, 0.5, 0.3], [0.6, 0.3, 0.1])]
    assert (emitted_distribution(p, q, broken) - torch.outer(p[0], p[1])).abs().max() > 0.01


def test_equal_distributions_accept_everything_and_never_divide_by_zero():
    p = torch.rand(4, 50).softmax(-1)
    accepted, rest = verify(p, p[:3], torch.tensor([3, 9, 1]), torch.full((3,), 1 - 1e-7))
    assert accepted == 3
    torch.testing.assert_close(rest, p[3])


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
    assert distribution(torch.tensor([1.0, 3.0, 3.0]), 0).tolist() == [0, 1, 0]


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("draft", ["unrelated", "identical", "noisy"])
def test_greedy_speculation_equals_plain_decoding(target, drafts, draft, k):
    sampling = Sampling(max_new_tokens=64)
    expected = tokens_of(list(plain(target, PROMPT, sampling)))
    assert tokens_of(list(speculative(target, ModelDrafter(drafts[draft]), PROMPT, k, sampling))) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_draft_equal_to_the_target_is_always_accepted(target, k, temperature):
    sampling = Sampling(max_new_tokens=60, temperature=temperature)
    steps = list(speculative(target, ModelDrafter(target), PROMPT, k, sampling))
    assert all(step.accepted == step.drafted for step in steps)
    assert sum(len(s.tokens) for s in steps) == 60


class AlwaysWrong:
    """Drafts what greedy decoding would not say."""

    def __init__(self, right: list[int], start: int) -> None:
        self.right, self.start = right, start

    def reset(self, capacity):
        pass

    def propose(self, tokens, count, sampling, uniform):
        at = len(tokens) - self.start
        wrong = torch.tensor([(self.right[at + i] + 1) % 307 for i in range(count)])
        return wrong, torch.nn.functional.one_hot(wrong, 307).float()


def test_an_always_wrong_draft_costs_steps_but_no_tokens(target):
    sampling = Sampling(max_new_tokens=40)
    right = tokens_of(list(plain(target, PROMPT, sampling)))
    steps = list(speculative(target, AlwaysWrong(right, len(PROMPT)), PROMPT, 4, sampling))
    assert tokens_of(steps) == right
    assert len(steps) == 40
    assert sum(s.accepted for s in steps) == 0


@pytest.mark.parametrize("at", range(1, 12))
def test_eos_anywhere_in_a_block_stops_as_in_plain_decoding(target, at):
    greedy = tokens_of(list(plain(target, PROMPT, Sampling(max_new_tokens=16))))
    sampling = Sampling(max_new_tokens=16, eos_id=greedy[at])
    expected = tokens_of(list(plain(target, PROMPT, sampling)))
    assert expected[-1] == greedy[at]
    assert tokens_of(list(speculative(target, ModelDrafter(target), PROMPT, 4, sampling))) == expected


@pytest.mark.parametrize("length", range(1, 12))
def test_length_limit_anywhere_in_a_block_is_exact(target, drafts, length):
    sampling = Sampling(max_new_tokens=length)
    expected = tokens_of(list(plain(target, PROMPT, sampling)))
    steps = list(speculative(target, ModelDrafter(drafts["noisy"]), PROMPT, 5, sampling))
    assert tokens_of(steps) == expected
    assert len(expected) == length


def test_sampling_is_repeatable_by_seed(target, drafts):
    def run(seed):
        drafter = ModelDrafter(drafts["noisy"])
        return tokens_of(
            list(speculative(target, drafter, PROMPT, 3, Sampling(temperature=1.0, seed=seed, max_new_tokens=20)))
        )

    assert run(3) == run(3)
    assert run(3) != run(4)


class Table:
    """A context-free target or draft over a few ids: the engine's loop without a network."""

    device = torch.device("cpu")

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def new_cache(self, rows, capacity):
        return llama.Cache(torch.zeros(1, 1, 1, capacity, 1), torch.zeros(1, 1, 1, capacity, 1))

    def forward(self, ids, cache, last=0):
        cache.used += ids.shape[1]
        return self.logits[ids][:, -last:]  # a bigram model: the row of the token just fed


def bigram_pairs(seed: int) -> tuple[Table, Table]:
    rng = torch.Generator().manual_seed(seed)
    p = torch.randn(6, 6, generator=rng)
    return Table(p * 1.5), Table((p + 0.8 * torch.randn(6, 6, generator=rng)) * 1.5)


def chi_square(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    keep = expected >= 5
    merged_counts = torch.cat([counts[keep], counts[~keep].sum().view(1)])
    merged = torch.cat([expected[keep], expected[~keep].sum().view(1)])
    merged_counts, merged = merged_counts[merged > 0], merged[merged > 0]
    return float(((merged_counts - merged) ** 2 / merged).sum()), len(merged) - 1


def pair_statistic(target: Table, drafter, temperature: float, n: int) -> tuple[float, int]:
    """Chi-square of the second and third emitted tokens (drafted in one step) against the exact product."""
    p = torch.softmax(target.logits / temperature, -1).double()
    counts = torch.zeros(6, 6, dtype=torch.float64)
    for seed in range(n):
        sampling = Sampling(temperature=temperature, seed=seed, max_new_tokens=3)
        out = tokens_of(list(speculative(target, drafter, [2], 2, sampling)))  # type: ignore[arg-type]
        counts[out[1], out[2]] += 1
    expected = torch.einsum("a,ab,bc->bc", p[2], p, p) * n
    return chi_square(counts, expected)


def critical(degrees: int) -> float:
    """Wilson-Hilferty quantile of chi-square at 1 - 1e-6 (z = 4.753)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.753 * math.sqrt(2 / (9 * degrees))) ** 3


def test_sampled_speculation_has_the_targets_distribution():
    target, draft = bigram_pairs(0)
    value, degrees = pair_statistic(target, ModelDrafter(draft), 0.9, 4000)  # type: ignore[arg-type]
    assert value < critical(degrees)


class GreedyDraftSoftmaxQ(ModelDrafter):
    """The bug of transformers #32867: drafts greedily, claims to have sampled."""

    def propose(self, tokens, count, sampling, uniform):
        return super().propose(tokens, count, sampling, torch.full_like(uniform, 0.5))


class DraftAtAnotherTemperature(ModelDrafter):
    def propose(self, tokens, count, sampling, uniform):
        drafted, _ = super().propose(tokens, count, Sampling(temperature=0.4), uniform)
        _, q = super().propose(tokens, count, sampling, uniform)
        return drafted, q


@pytest.mark.parametrize("broken", [GreedyDraftSoftmaxQ, DraftAtAnotherTemperature])
def test_chi_square_rejects_a_draft_whose_q_is_not_what_it_sampled(broken):
    target, draft = bigram_pairs(0)
    value, degrees = pair_statistic(target, broken(draft), 0.9, 4000)
    assert value > critical(degrees)
