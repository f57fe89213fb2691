"""The verify rules for token trees emit the target's distribution. The tests enumerate all outcomes."""

import itertools

import pytest
import torch
from helpers.builders import rounding
from helpers.enumeration import (
    CHAIN,
    DRAFTS,
    DRAFTS_OF_FOUR,
    EXTREMES,
    FOUR,
    ROWS,
    TREE,
    WIDE,
    Never,
    Table,
    by_offset,
    distinct,
    error,
    greedy_with_softmax_q,
    length_of,
    most_probable,
    probabilities,
    rows_of,
    sampled,
    table,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.engine.verify import Tokens, Uniforms, Verdict, verify
from draftlab_research import rules
from draftlab_research.rules import k_sequential, recursive

LOSSLESS = {
    "recursive, a chain": (recursive, sampled, CHAIN),
    "recursive, drawn with replacement": (recursive, sampled, TREE),
    "recursive, drawn with replacement, wide": (recursive, sampled, WIDE),
    "recursive, drawn without replacement": (recursive, distinct, TREE),
    "recursive, drawn without replacement, wide": (recursive, distinct, WIDE),
    "recursive, the most probable": (recursive, most_probable, TREE),
    "recursive, a chain of offsets": (recursive, by_offset, CHAIN),
    "recursive, a tree of offsets": (recursive, by_offset, TREE),
    "k-sequential": (k_sequential, sampled, (0, 0, 1)),
    "k-sequential, three drafts": (k_sequential, sampled, WIDE),
    "k-sequential, three drafts of two tokens": (k_sequential, sampled, (0, 0, 1, 2)),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_what_is_emitted_is_the_targets(name):
    rule, drafting, parents = LOSSLESS[name]
    assert error(table(ROWS), drafting(table(DRAFTS), parents), rule, length=3) < 1e-12


@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.lists(probabilities(3), min_size=6, max_size=6))
def test_what_is_emitted_is_the_targets_whatever_has_no_chance(name, rows):
    """The random distributions of target and draft include zeros and one-hot distributions."""
    rule, drafting, parents = LOSSLESS[name]
    assert error(table(rows[:3]), drafting(table(rows[3:]), parents), rule) < 1e-12


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("case", EXTREMES)
def test_what_is_emitted_is_the_targets_at_the_extremes(name, case):
    rule, drafting, parents = LOSSLESS[name]
    p, q = EXTREMES[case]
    assert error(table(p), drafting(table(q), parents), rule) < 1e-12


@pytest.mark.parametrize(("rule", "drafting"), [(recursive, sampled), (recursive, distinct), (k_sequential, sampled)])
def test_six_tokens_three_drafts(rule, drafting):
    rng = torch.Generator().manual_seed(3)
    p, q = torch.rand(2, 6, generator=rng, dtype=torch.float64).pow(2)
    assert error(table([p / p.sum()]), drafting(table([q / q.sum()]), WIDE), rule, length=1) < 1e-12


def test_one_child_is_leviathans_rule():
    """With the same uniform draws, the result equals that of verify(), the vectorised rule of the engine."""
    rng = torch.Generator().manual_seed(1)
    for _ in range(50):
        p = torch.rand(4, 5, generator=rng).softmax(-1)
        q = torch.rand(3, 5, generator=rng).mul(3).softmax(-1)
        drafted, u = torch.randint(5, (3,), generator=rng), torch.rand(3, generator=rng)
        accepted, rest = verify(p, q, drafted, u)
        path, same = recursive(p, Tokens(ids=drafted.tolist(), parents=CHAIN, q=q), Uniforms(u))
        assert path == list(range(accepted))
        torch.testing.assert_close(rest, same)


def without_replacement_one_q(q: Table, parents):
    """Draw children without replacement, but report q as if each were drawn independently: a wrong draft."""

    def drafting(chance) -> Tokens:
        tokens = distinct(q, parents)(chance)
        return Tokens(ids=tokens.ids, parents=tokens.parents, q=rows_of(q, tokens))

    return drafting


def siblings_against_p(p: Tensor, tokens: Tokens, chance) -> Verdict:
    """Verify every sibling against p itself instead of the residual: a wrong rule that the test must detect."""
    for child in tokens.children(0):
        assert tokens.q is not None
        if chance.coin(p[0, tokens.ids[child]] / tokens.q[child, tokens.ids[child]]):
            return [child], p[child + 1]
    return [], recursive(p, Tokens(ids=tokens.ids[:1], parents=[0], q=tokens.q), Never())[1]


@pytest.fixture
def rho_of_one(monkeypatch):
    monkeypatch.setattr(rules, "smallest_rho", lambda p, q, n: 1.0)


BROKEN = {
    "greedy tree, softmax q": (recursive, greedy_with_softmax_q, TREE),
    "siblings against p": (siblings_against_p, sampled, WIDE),
    "without replacement, residual of q": (recursive, without_replacement_one_q, WIDE),
    "without replacement, k-sequential": (k_sequential, distinct, WIDE),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_same_test_rejects(name):
    rule, drafting, parents = BROKEN[name]
    assert error(table(FOUR), drafting(table(DRAFTS_OF_FOUR), parents), rule) > 1e-3


@pytest.mark.usefixtures("rho_of_one")
def test_the_same_test_rejects_a_rho_that_is_too_small():
    assert error(table(ROWS), sampled(table(DRAFTS), WIDE), k_sequential) > 1e-3


def test_more_drafts_keep_more():
    """Siblings without replacement are accepted more often than independent siblings, and both more than one child.

    K-sequential selection is within 1 - 1/e of the best rule (SpecTr, theorem 2).
    """
    one, three = sampled(table(DRAFTS), (0,)), sampled(table(DRAFTS), WIDE)
    least = length_of(recursive, one)
    assert least < length_of(k_sequential, three)
    assert least < length_of(recursive, three) < length_of(recursive, distinct(table(DRAFTS), WIDE))


def test_one_token_is_accepted_with_the_overlap_of_p_and_q():
    overlap = float(torch.minimum(ROWS[0], DRAFTS[0]).sum())
    for rule in (recursive, k_sequential):
        assert length_of(rule, sampled(table(DRAFTS), (0,))) - 1 == pytest.approx(overlap, abs=1e-8)


def test_rho_solves_spectrs_equation():
    p, q, n = ROWS[0], DRAFTS[0], 3
    rho = rules.smallest_rho(p, q, n)
    beta = torch.minimum(q, p / rho).sum()
    assert float(1 - (1 - beta) ** n) == pytest.approx(float(rho * beta), abs=rounding(torch.float32, 1000, 1))


def test_rounding_never_makes_an_impossible_token():
    """If p and q differ only in the last bits of fp32, the residual must not be 0 / 0."""
    p = torch.rand(4, 1000).softmax(-1)
    q = (p[:3] * (1 + 1e-7)).float()
    for rule, u in itertools.product((recursive, k_sequential), (0.0, 0.5, 1 - 2**-24)):
        _, rest = rule(p, Tokens(ids=[3, 9, 1], parents=CHAIN, q=q), Uniforms(torch.full((4,), u)))
        assert rest.isfinite().all()
        assert rest.sum() == pytest.approx(1, abs=rounding(torch.float32, 1000, 1))
