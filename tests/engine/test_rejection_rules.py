"""Every verify rule emits the target's distribution: every draft and every outcome enumerated, in float64."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.config.server_rules import SERVER_RULES
from draftlab.engine import rejection_rules
from draftlab.engine.rejection_rules import RULES, Tokens, Uniforms, Verdict, block, k_sequential, match, recursive
from draftlab.engine.verify import distribution, verify
from draftlab.sampling import SamplingParams

Table = Callable[[tuple[int, ...]], Tensor]  # what was written behind the prompt -> distribution [V]


class Outcome:
    """One way that all chances can fall, as far as it is decided; weight is its probability."""

    def __init__(self, decided: list[int]) -> None:
        self.decided, self.at, self.weight, self.open = decided, 0, 1.0, []

    def _fall(self, probabilities: list[float]) -> int:
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        if self.at == len(self.decided):
            self.open += [[*self.decided, other] for other in possible[1:]]
            self.decided = [*self.decided, possible[0]]
        chosen = self.decided[self.at]
        self.at += 1
        self.weight *= probabilities[chosen]
        return chosen

    def coin(self, chance: Tensor) -> bool:
        c = min(1.0, float(chance))
        return self._fall([1 - c, c]) == 1

    def pick(self, probabilities: Tensor) -> int:
        return self._fall(probabilities.tolist())


def outcomes(run: Callable[[Outcome], object]) -> Iterator[tuple[float, object]]:
    waiting: list[list[int]] = [[]]
    while waiting:
        outcome = Outcome(waiting.pop())
        result = run(outcome)
        waiting += outcome.open
        yield outcome.weight, result


def joint(table: Table, length: int) -> Tensor:
    """Exact distribution of the next tokens, [V] * length."""
    if length == 0:
        return torch.ones((), dtype=torch.float64)

    def grown(prefix: tuple[int, ...]) -> Tensor:
        row = table(prefix)
        if len(prefix) == length - 1:
            return row
        return torch.stack([row[t] * grown((*prefix, t)) for t in range(len(row))])

    return grown(())


def emitted(p: Table, drafting, rule, length: int) -> Tensor:
    """Exact distribution of the first tokens that one step (and plain decoding behind it) emits, [V] * length."""

    def step(chance: Outcome) -> tuple[list[int], Tensor]:
        tokens = drafting(chance)
        rows = torch.stack([p(tuple(tokens.ids[i] for i in tokens.path(n))) for n in range(len(tokens.ids) + 1)])
        path, rest = rule(rows, tokens, chance)
        return [tokens.ids[i] for i in path], rest

    total = torch.zeros([len(p(()))] * length, dtype=torch.float64)
    for weight, (written, rest) in outcomes(step):  # type: ignore[misc]
        at = tuple(written[:length])
        if len(written) >= length:
            total[at] += weight
        else:
            shifted = lambda prefix: rest if not prefix else p((*written, *prefix))  # noqa: B023, E731
            total[at] += weight * joint(shifted, length - len(written))
    return total


def error(p: Table, drafting, rule, length: int = 2) -> float:
    return float((emitted(p, drafting, rule, length) - joint(p, length)).abs().max())


def table(rows: Sequence[Tensor]) -> Table:
    """By how many tokens there are and the last one, so that branches differ."""
    return lambda prefix: rows[(len(prefix) + sum(prefix[-1:])) % len(rows)]


def sampled(q: Table, parents: Sequence[int]):
    """Children drawn independently."""

    def drafting(chance) -> Tokens:
        tokens = Tokens(ids=[], parents=parents)
        for parent in parents:
            tokens.ids.append(chance.pick(q(_prefix(tokens, parent))))  # type: ignore[attr-defined]
        return Tokens(ids=tokens.ids, parents=parents, q=_rows(q, tokens))

    return drafting


def distinct(q: Table, parents: Sequence[int]):
    """Children drawn without replacement; fewer where q has fewer tokens."""

    def drafting(chance) -> Tokens:
        ids: list[int] = []
        kept: list[int] = []
        rows: list[Tensor] = []
        index: dict[int, int] = {0: 0}
        for i, parent in enumerate(parents):
            if parent not in index:
                continue
            built = Tokens(ids=ids, parents=kept)
            row = q(_prefix(built, index[parent])).clone()
            row[[ids[c] for c, above in enumerate(kept) if above == index[parent]]] = 0
            if row.sum() == 0:
                continue
            row /= row.sum()
            kept.append(index[parent])
            rows.append(row)
            ids.append(chance.pick(row))
            index[i + 1] = len(ids)
        return Tokens(ids=ids, parents=kept, q=torch.stack(rows))

    return drafting


def most_probable(q: Table, parents: Sequence[int]):
    """Children that are certain: the m most probable tokens."""

    def drafting(chance) -> Tokens:
        tokens = Tokens(ids=[], parents=parents)
        for i, parent in enumerate(parents):
            place = sum(above == parent for above in parents[:i])
            tokens.ids.append(int(q(_prefix(tokens, parent)).sort(descending=True, stable=True).indices[place]))  # type: ignore[attr-defined]
        return tokens

    return drafting


def _levels(parents: Sequence[int]) -> list[int]:
    """How many tokens are between each token and the text."""
    levels: list[int] = []
    for parent in parents:
        levels.append(levels[parent - 1] + 1 if parent else 0)
    return levels


def by_offset(q: Table, parents: Sequence[int]):
    """A parallel draft: a token's q knows its offset alone; every token is drawn by itself."""

    def drafting(chance) -> Tokens:
        rows = [q((0,) * level) for level in _levels(parents)]
        return Tokens(ids=[chance.pick(row) for row in rows], parents=parents, q=torch.stack(rows))

    return drafting


def one_draw_for_all_offsets(q: Table, parents: Sequence[int]):
    """A control: all tokens come from one uniform draw by their inverse CDFs."""

    def drafting(chance) -> Tokens:
        rows = [q((0,) * level) for level in _levels(parents)]
        edges = torch.cat([row.cumsum(0) for row in rows]).clamp(0, 1).unique()
        low = torch.cat([edges.new_zeros(1), edges])[:-1]
        u = low[chance.pick((edges - low).clamp_min(0))]
        ids = [int(torch.searchsorted(row.cumsum(0), u, right=True).clamp_max(len(row) - 1)) for row in rows]
        return Tokens(ids=ids, parents=parents, q=torch.stack(rows))

    return drafting


def _prefix(tokens: Tokens, node: int) -> tuple[int, ...]:
    return tuple(tokens.ids[i] for i in tokens.path(node))


def _rows(q: Table, tokens: Tokens) -> Tensor:
    return torch.stack([q(_prefix(tokens, parent)) for parent in tokens.parents])


CHAIN = (0, 1, 2)
WIDE = (0, 0, 0)
TREE = (0, 0, 1, 1, 2)
LOSSLESS = {
    "recursive, a chain": (recursive, sampled, CHAIN),
    "recursive, drawn with replacement": (recursive, sampled, TREE),
    "recursive, drawn with replacement, wide": (recursive, sampled, WIDE),
    "recursive, drawn without replacement": (recursive, distinct, TREE),
    "recursive, drawn without replacement, wide": (recursive, distinct, WIDE),
    "recursive, the most probable": (recursive, most_probable, TREE),
    "recursive, a chain of offsets": (recursive, by_offset, CHAIN),
    "recursive, a tree of offsets": (recursive, by_offset, TREE),
    "block, a chain of offsets": (block, by_offset, CHAIN),
    "match, a chain": (match, sampled, CHAIN),
    "match, the most probable": (match, most_probable, TREE),
    "match, drawn with replacement": (match, sampled, TREE),
    "block": (block, sampled, CHAIN),
    "block, certain tokens": (block, most_probable, CHAIN),
    "k-sequential": (k_sequential, sampled, (0, 0, 1)),
    "k-sequential, three drafts": (k_sequential, sampled, WIDE),
    "k-sequential, three drafts of two tokens": (k_sequential, sampled, (0, 0, 1, 2)),
}


def exact(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


ROWS = exact([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.7, 0.1, 0.2], [0, 0.4, 0.6])
DRAFTS = exact([0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8])
FOUR = exact([0.4, 0.3, 0.2, 0.1], [0.1, 0.5, 0.1, 0.3])  # more than one token has more of p than of q
DRAFTS_OF_FOUR = exact([0.1, 0.15, 0.3, 0.45], [0.4, 0.1, 0.4, 0.1])


def probabilities(v: int):
    weights = st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0, 5.0, 0.3]), min_size=v, max_size=v)
    return weights.filter(any).map(lambda w: torch.tensor(w, dtype=torch.float64) / sum(w))


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


def warped(logits: list[float], temperature: float, **cuts) -> Tensor:
    """As decoding makes it, and then summing to 1 in float64, too."""
    row = distribution(torch.tensor(logits), SamplingParams(temperature=temperature, **cuts)).double()
    return row / row.sum()


EXTREMES = {
    "equal": (ROWS, ROWS),
    "disjoint": (exact([0.4, 0.6, 0, 0]), exact([0, 0, 0.3, 0.7])),
    "greedy draft": (ROWS, exact([0, 1, 0])),
    "greedy target": (exact([0, 0, 1], [1, 0, 0]), DRAFTS),
    "temperature and top-k alike": (
        [warped([2.0, 1.0, 0.5], 0.7, top_k=2), warped([0.1, 0.3, 0.9], 0.7, top_k=2)],
        [warped([1.0, 1.5, 0.5], 0.7, top_k=2), warped([0.7, 0.3, 0.2], 0.7, top_k=2)],
    ),
    "top-p of the target only": ([warped([2.0, 1.0, 0.5], 1.0, top_p=0.6)], [warped([1.0, 1.5, 0.5], 1.0)]),
}


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
    """The same uniforms, the same verdict as the vectorised form that the engine runs."""
    rng = torch.Generator().manual_seed(1)
    for _ in range(50):
        p = torch.rand(4, 5, generator=rng).softmax(-1)
        q = torch.rand(3, 5, generator=rng).mul(3).softmax(-1)
        drafted, u = torch.randint(5, (3,), generator=rng), torch.rand(3, generator=rng)
        accepted, rest = verify(p, q, drafted, u)
        path, same = recursive(p, Tokens(ids=drafted.tolist(), parents=CHAIN, q=q), Uniforms(u))
        assert path == list(range(accepted))
        torch.testing.assert_close(rest, same)


# What must fail: known bugs of other engines, and each rule without the part that makes it hold.


def greedy_with_softmax_q(q: Table, parents):
    def drafting(chance) -> Tokens:
        tokens = most_probable(q, parents)(chance)
        return Tokens(ids=tokens.ids, parents=parents, q=_rows(q, tokens))

    return drafting


def raw_q_drawn_from_top_2(q: Table, parents):
    def cut(prefix):
        return distribution(q(prefix).log(), SamplingParams(temperature=1.0, top_k=2)).double()

    def drafting(chance) -> Tokens:
        tokens = sampled(cut, parents)(chance)
        return Tokens(ids=tokens.ids, parents=parents, q=_rows(q, tokens))

    return drafting


def drawn_at_another_temperature(q: Table, parents):
    def hot(prefix):
        return distribution(q(prefix).log(), SamplingParams(temperature=0.8)).double()

    def drafting(chance) -> Tokens:
        tokens = sampled(hot, parents)(chance)
        return Tokens(ids=tokens.ids, parents=parents, q=_rows(q, tokens))

    return drafting


def unsure_token_dropped(q: Table, parents):
    """p_min of llama.cpp before a ratio rule: what was drawn is thrown away because q is small."""

    def drafting(chance) -> Tokens:
        tokens = sampled(q, parents)(chance)
        assert tokens.q is not None
        n = next((i for i, t in enumerate(tokens.ids) if tokens.q[i, t] < 0.35), len(tokens.ids))
        return Tokens(ids=tokens.ids[:n], parents=parents[:n], q=tokens.q[:n])

    return drafting


def unsure_token_kept(q: Table, parents):
    """The lossless form: drafting stops behind the unsure token."""

    def drafting(chance) -> Tokens:
        tokens = sampled(q, parents)(chance)
        assert tokens.q is not None
        n = next((i + 1 for i, t in enumerate(tokens.ids) if tokens.q[i, t] < 0.35), len(tokens.ids))
        return Tokens(ids=tokens.ids[:n], parents=parents[:n], q=tokens.q[:n])

    return drafting


def without_replacement_one_q(q: Table, parents):
    """Children drawn without replacement, judged as if each had been drawn from q."""

    def drafting(chance) -> Tokens:
        tokens = distinct(q, parents)(chance)
        return Tokens(ids=tokens.ids, parents=tokens.parents, q=_rows(q, tokens))

    return drafting


def residual_is_p(p: Tensor, tokens: Tokens, chance) -> Verdict:
    path, _ = recursive(p, tokens, chance)
    return path, p[path[-1] + 1 if path else 0]


def only_the_token_taken_out(p: Tensor, tokens: Tokens, chance) -> Verdict:
    path, rest = recursive(p, tokens, chance)
    node = path[-1] + 1 if path else 0
    if not tokens.children(node):
        return path, rest
    rest = p[node].clone()
    rest[[tokens.ids[c] for c in tokens.children(node)]] = 0
    return path, rest / rest.sum() if rest.sum() > 0 else p[node]


def siblings_against_p(p: Tensor, tokens: Tokens, chance) -> Verdict:
    """Every sibling tried against p itself."""
    for child in tokens.children(0):
        assert tokens.q is not None
        if chance.coin(p[0, tokens.ids[child]] / tokens.q[child, tokens.ids[child]]):
            return [child], p[child + 1]
    return [], recursive(p, Tokens(ids=tokens.ids[:1], parents=[0], q=tokens.q), Never())[1]


class Never:
    def coin(self, chance):
        return False

    def pick(self, probabilities):
        raise AssertionError


def block_with_leviathans_residual(p: Tensor, tokens: Tokens, chance) -> Verdict:
    path, rest = block(p, tokens, chance)
    n = len(path)
    return (path, rest) if n == len(tokens.ids) else recursive(p, tokens, First(n))


class First:
    """The first n coins fall well."""

    def __init__(self, n):
        self.n = n

    def coin(self, chance):
        self.n -= 1
        return self.n >= 0

    def pick(self, probabilities):
        raise AssertionError


@pytest.fixture
def rho_of_one(monkeypatch):
    monkeypatch.setattr(rejection_rules, "smallest_rho", lambda p, q, n: 1.0)


def typical(p, tokens, chance):
    """Medusa's typical acceptance (2401.10774), which is lossy: p > min(0.09, 0.3 e^-H(p))."""
    for n, token in enumerate(tokens.ids):
        floor = (0.3 * torch.exp(-torch.special.entr(p[n]).sum())).clamp_max(0.09)
        if p[n][token] <= floor:
            return list(range(n)), p[n]
    return list(range(len(tokens.ids))), p[len(tokens.ids)]


def lenient(p, tokens, chance):
    """Leviathan's rule with q scaled down (2211.17192, appendix A.5), which is lossy."""
    for n, token in enumerate(tokens.ids):
        q = 0.5 * tokens.drawn_from(n, p)
        if not chance.coin(p[n][token] / q[token]):
            residual = (p[n] - q).clamp_min(0)
            return list(range(n)), residual / residual.sum()
    return list(range(len(tokens.ids))), p[len(tokens.ids)]


BROKEN = {
    "greedy draft, softmax q": (recursive, greedy_with_softmax_q, CHAIN),
    "greedy tree, softmax q": (recursive, greedy_with_softmax_q, TREE),
    "raw q, drawn from the top 2": (recursive, raw_q_drawn_from_top_2, CHAIN),
    "draft at another temperature": (recursive, drawn_at_another_temperature, CHAIN),
    "draft at another temperature, block": (block, drawn_at_another_temperature, CHAIN),
    "unsure token dropped": (recursive, unsure_token_dropped, CHAIN),
    "unsure token dropped, block": (block, unsure_token_dropped, CHAIN),
    "residual is p": (residual_is_p, sampled, CHAIN),
    "only the rejected token taken out": (only_the_token_taken_out, sampled, CHAIN),
    "siblings against p": (siblings_against_p, sampled, WIDE),
    "without replacement, residual of q": (recursive, without_replacement_one_q, WIDE),
    "without replacement, k-sequential": (k_sequential, distinct, WIDE),
    "block with Leviathan's residual": (block_with_leviathans_residual, sampled, CHAIN),
    "offsets that share a draw": (recursive, one_draw_for_all_offsets, CHAIN),
    "typical": (typical, sampled, CHAIN),
    "lenient": (lenient, sampled, CHAIN),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_same_test_rejects(name):
    rule, drafting, parents = BROKEN[name]
    assert error(table(FOUR), drafting(table(DRAFTS_OF_FOUR), parents), rule) > 1e-3


@pytest.mark.usefixtures("rho_of_one")
def test_the_same_test_rejects_a_rho_that_is_too_small():
    assert error(table(ROWS), sampled(table(DRAFTS), WIDE), k_sequential) > 1e-3


@pytest.mark.parametrize("rule", [recursive, block])
def test_ending_the_draft_behind_an_unsure_token_is_lossless(rule):
    assert error(table(ROWS), unsure_token_kept(table(DRAFTS), CHAIN), rule, length=3) < 1e-12


def test_dropping_the_unsure_token_is_harmless_when_no_ratio_is_taken():
    assert error(table(ROWS), unsure_token_dropped(table(DRAFTS), CHAIN), match) < 1e-12


def length_of(rule, drafting) -> float:
    """Expected tokens per step."""

    def step(chance):
        tokens = drafting(chance)
        p = table(ROWS)
        rows = torch.stack([p(_prefix(tokens, n)) for n in range(len(tokens.ids) + 1)])
        return len(rule(rows, tokens, chance)[0]) + 1

    return sum(weight * n for weight, n in outcomes(step))  # type: ignore[operator]


def test_block_verification_keeps_more_than_token_by_token():
    chain = sampled(table(DRAFTS), CHAIN)
    assert length_of(block, chain) > length_of(recursive, chain) + 1e-3
    assert length_of(recursive, chain) > length_of(match, chain) + 1e-3


def test_more_drafts_keep_more():
    """Without replacement beats with; both beat one draft. K-sequential is within 1 - 1/e of the best (theorem 2)."""
    one, three = sampled(table(DRAFTS), (0,)), sampled(table(DRAFTS), WIDE)
    least = length_of(recursive, one)
    assert least < length_of(k_sequential, three)
    assert least < length_of(recursive, three) < length_of(recursive, distinct(table(DRAFTS), WIDE))


def test_one_token_is_accepted_with_the_overlap_of_p_and_q():
    overlap = float(torch.minimum(ROWS[0], DRAFTS[0]).sum())
    for rule in (recursive, block, k_sequential):
        assert length_of(rule, sampled(table(DRAFTS), (0,))) - 1 == pytest.approx(overlap, abs=1e-8)
    matched = float((ROWS[0] * DRAFTS[0]).sum())
    assert length_of(match, sampled(table(DRAFTS), (0,))) - 1 == pytest.approx(matched, abs=1e-12)


@pytest.mark.parametrize("server", SERVER_RULES)
def test_each_servers_rule_is_lossless_and_accepts_a_token_as_its_formula_says(server):
    name, draft_temperature = SERVER_RULES[server]
    rule, drafting = RULES.get(name) or recursive, sampled if draft_temperature is None else most_probable
    assert error(table(ROWS), drafting(table(DRAFTS), CHAIN), rule, length=3) < 1e-12
    p, q = ROWS[0], DRAFTS[0]
    said = torch.minimum(p, q).sum() if draft_temperature is None else p[q.argmax()]
    assert length_of(rule, drafting(table(DRAFTS), (0,))) - 1 == pytest.approx(float(said), abs=1e-8)


def test_a_certain_token_stands_alike_whether_one_by_one_as_a_block_or_by_the_targets_sample():
    chain = most_probable(table(DRAFTS), CHAIN)
    lengths = [length_of(rule, chain) for rule in (recursive, block, match)]
    assert lengths == pytest.approx([lengths[0]] * 3, abs=1e-12)


def test_rho_solves_spectrs_equation():
    p, q, n = ROWS[0], DRAFTS[0], 3
    rho = rejection_rules.smallest_rho(p, q, n)
    beta = torch.minimum(q, p / rho).sum()
    assert float(1 - (1 - beta) ** n) == pytest.approx(float(rho * beta), abs=1e-5)


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
    for rule, u in itertools.product((recursive, block, k_sequential), (0.0, 0.5, 1 - 2**-24)):
        _, rest = rule(p, Tokens(ids=[3, 9, 1], parents=CHAIN, q=q), Uniforms(torch.full((4,), u)))
        assert rest.isfinite().all()
        assert rest.sum() == pytest.approx(1, abs=1e-5)


def test_block_refuses_a_tree():
    with pytest.raises(ValueError, match="a chain"):
        block(torch.stack(ROWS[:3]), Tokens(ids=[0, 1], parents=(0, 0)), Never())
