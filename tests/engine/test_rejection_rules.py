"""Every verify rule emits the target's distribution: every draft and every outcome enumerated, in float64."""

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
    Never,
    Table,
    by_offset,
    error,
    greedy_with_softmax_q,
    length_of,
    leviathan,
    most_probable,
    one_draw_for_all_offsets,
    probabilities,
    rows_of,
    sampled,
    table,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.config.server_rules import SERVER_RULES, rule_of
from draftlab.engine.verify import Tokens, Uniforms, Verdict, block, distribution, match, rule_named
from draftlab.registry import SERVERS
from draftlab.sampling import SamplingParams

LOSSLESS = {
    "leviathan, a chain": (leviathan, sampled, CHAIN),
    "leviathan, certain tokens": (leviathan, most_probable, CHAIN),
    "leviathan, a chain of offsets": (leviathan, by_offset, CHAIN),
    "block, a chain of offsets": (block, by_offset, CHAIN),
    "match, a chain": (match, sampled, CHAIN),
    "match, the most probable": (match, most_probable, TREE),
    "match, drawn with replacement": (match, sampled, TREE),
    "block": (block, sampled, CHAIN),
    "block, certain tokens": (block, most_probable, CHAIN),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_what_is_emitted_is_the_targets(name):
    rule, drafting, parents = LOSSLESS[name]
    assert error(table(ROWS), drafting(table(DRAFTS), parents), rule, length=3) < 1e-12


@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.lists(probabilities(3), min_size=6, max_size=6))
def test_what_is_emitted_is_the_targets_whatever_has_no_chance(name, rows):
    """Zeros and one-hot distributions anywhere."""
    rule, drafting, parents = LOSSLESS[name]
    assert error(table(rows[:3]), drafting(table(rows[3:]), parents), rule) < 1e-12


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("case", EXTREMES)
def test_what_is_emitted_is_the_targets_at_the_extremes(name, case):
    rule, drafting, parents = LOSSLESS[name]
    p, q = EXTREMES[case]
    assert error(table(p), drafting(table(q), parents), rule) < 1e-12


# What must fail: known bugs of other engines, and each rule without the part that makes it hold.


def drawn_at_another_temperature(q: Table, parents):
    def hot(prefix):
        return distribution(q(prefix).log(), SamplingParams(temperature=0.8)).double()

    def drafting(chance) -> Tokens:
        tokens = sampled(hot, parents)(chance)
        return Tokens(ids=tokens.ids, parents=parents, q=rows_of(q, tokens))

    return drafting


def unsure_token_dropped(q: Table, parents, kept: int = 0):
    """p_min of llama.cpp before a ratio rule: what was drawn is thrown away because q is small.

    kept: 1 is the lossless form, in which drafting stops behind the unsure token.
    """

    def drafting(chance) -> Tokens:
        tokens = sampled(q, parents)(chance)
        assert tokens.q is not None
        unsure = [i for i, token in enumerate(tokens.ids) if tokens.q[i, token] < 0.35]
        n = unsure[0] + kept if unsure else len(tokens.ids)
        return Tokens(ids=tokens.ids[:n], parents=parents[:n], q=tokens.q[:n])

    return drafting


def residual_is_p(p: Tensor, tokens: Tokens, chance) -> Verdict:
    path, _ = leviathan(p, tokens, chance)
    return path, p[path[-1] + 1 if path else 0]


def block_with_leviathans_residual(p: Tensor, tokens: Tokens, chance) -> Verdict:
    path, rest = block(p, tokens, chance)
    n = len(path)
    return (path, rest) if n == len(tokens.ids) else leviathan(p, tokens, First(n))


class First:
    """The first n coins fall well."""

    def __init__(self, n):
        self.n = n

    def coin(self, chance):
        self.n -= 1
        return self.n >= 0

    def pick(self, probabilities):
        raise AssertionError


BROKEN = {
    "greedy draft, softmax q": (leviathan, greedy_with_softmax_q, CHAIN),
    "draft at another temperature": (leviathan, drawn_at_another_temperature, CHAIN),
    "draft at another temperature, block": (block, drawn_at_another_temperature, CHAIN),
    "unsure token dropped": (leviathan, unsure_token_dropped, CHAIN),
    "unsure token dropped, block": (block, unsure_token_dropped, CHAIN),
    "residual is p": (residual_is_p, sampled, CHAIN),
    "block with Leviathan's residual": (block_with_leviathans_residual, sampled, CHAIN),
    "offsets that share a draw": (leviathan, one_draw_for_all_offsets, CHAIN),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_same_test_rejects(name):
    rule, drafting, parents = BROKEN[name]
    assert error(table(FOUR), drafting(table(DRAFTS_OF_FOUR), parents), rule) > 1e-3


@pytest.mark.parametrize("rule", [leviathan, block])
def test_ending_the_draft_behind_an_unsure_token_is_lossless(rule):
    assert error(table(ROWS), unsure_token_dropped(table(DRAFTS), CHAIN, 1), rule, length=3) < 1e-12


def test_dropping_the_unsure_token_is_harmless_when_no_ratio_is_taken():
    assert error(table(ROWS), unsure_token_dropped(table(DRAFTS), CHAIN), match) < 1e-12


def test_block_verification_keeps_more_than_token_by_token():
    chain = sampled(table(DRAFTS), CHAIN)
    assert length_of(block, chain) > length_of(leviathan, chain) + 1e-3
    assert length_of(leviathan, chain) > length_of(match, chain) + 1e-3


def test_the_named_rules_of_servers_are_those_that_their_kinds_have():
    found = {f"{kind.name}-{each}".rstrip("-") for kind in SERVERS.loadable() for each in kind.rules}
    assert found == set(SERVER_RULES)


CUTS = SamplingParams(temperature=0.7, top_k=3, top_p=0.8)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=1.0), CUTS])
@pytest.mark.parametrize("server", SERVER_RULES)
def test_each_servers_rule_is_lossless_and_accepts_a_token_as_its_formula_says(server, sampling):
    """The filters of target and draft are the server's, in float64."""
    server_rule = rule_of(server)
    own = server_rule.target_sampling(sampling)
    p, q = filtered(FOUR, own), filtered(DRAFTS_OF_FOUR, server_rule.draft_sampling(own))
    rule, drafting = (
        rule_named(server_rule.verify) or leviathan,
        sampled if server_rule.draft else most_probable,
    )
    assert error(table(p), drafting(table(q), CHAIN), rule, length=3) < 1e-12
    said = torch.minimum(p[0], q[0]).sum() if server_rule.draft else p[0][q[0].argmax()]
    assert length_of(rule, drafting(table(q), (0,)), p) - 1 == pytest.approx(float(said), abs=1e-8)


def filtered(rows: list[Tensor], sampling: SamplingParams) -> list[Tensor]:
    found = [distribution(row.log().float(), sampling).double() for row in rows]
    return [row / row.sum() for row in found]


def test_a_draft_of_vllm_is_accepted_as_one_that_the_temperature_alone_changes():
    """At top-k 1 the target has one possible token, and the draft draws it with its own probability."""
    rule = rule_of("vllm")
    own = rule.target_sampling(SamplingParams(temperature=1.0, top_k=1))
    p, q = filtered(FOUR, own), filtered(DRAFTS_OF_FOUR, rule.draft_sampling(own))
    drafting = sampled(table(q), (0,))
    assert length_of(leviathan, drafting, p) - 1 == pytest.approx(float(DRAFTS_OF_FOUR[0][0]))


def test_a_certain_token_stands_alike_whether_one_by_one_as_a_block_or_by_the_targets_sample():
    chain = most_probable(table(DRAFTS), CHAIN)
    lengths = [length_of(rule, chain) for rule in (leviathan, block, match)]
    assert lengths == pytest.approx([lengths[0]] * 3, abs=1e-12)


def test_match_emits_what_plain_decoding_would_with_the_same_uniforms():
    rng = torch.Generator().manual_seed(0)
    for _ in range(50):
        p, u = torch.rand(4, 5, generator=rng).softmax(-1), torch.rand(4, generator=rng)
        plain = [Uniforms(u[i:]).pick(p[i]) for i in range(4)]
        ids = torch.randint(5, (3,), generator=rng).tolist()
        path, rest = match(p, Tokens(ids=ids, parents=CHAIN), Uniforms(u))
        written = [*(ids[i] for i in path), int(rest.argmax())]
        assert written == plain[: len(written)]


def test_rounding_never_makes_an_impossible_token():
    """p and q agree to the last bits in fp32; the residual must not be 0 / 0."""
    p = torch.rand(4, 1000).softmax(-1)
    q = (p[:3] * (1 + 1e-7)).float()
    for rule, u in itertools.product((leviathan, block), (0.0, 0.5, 1 - 2**-24)):
        _, rest = rule(p, Tokens(ids=[3, 9, 1], parents=CHAIN, q=q), Uniforms(torch.full((4,), u)))
        assert rest.isfinite().all()
        assert rest.sum() == pytest.approx(1, abs=rounding(torch.float32, 1000, 1))


def test_block_refuses_a_tree():
    with pytest.raises(ValueError, match="chains"):
        block(torch.stack(ROWS[:3]), Tokens(ids=[0, 1], parents=(0, 0)), Never())
