"""Verify rules by enumeration: every draft and every outcome of a step, in float64."""

from collections.abc import Callable, Iterator, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from draftlab.engine.verify import Tokens, Verdict, distribution, verify
from draftlab.sampling import SamplingParams

# what was written behind the prompt -> distribution [V]
Table = Callable[[tuple[int, ...]], Tensor]
CHAIN = (0, 1, 2)
WIDE = (0, 0, 0)
TREE = (0, 0, 1, 1, 2)


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


def emitted(p: Table, drafting, rule, length: int, verified=None) -> Tensor:
    """Exact distribution of the first tokens that one step (and plain decoding behind it) emits, [V] * length.

    verified: Rows of a target pass over the drafted tokens, [K + 1, V], by the tokens; by default those of p.
    """

    def step(chance: Outcome) -> tuple[list[int], Tensor]:
        tokens = drafting(chance)
        if verified is not None:
            rows = verified(tokens)
        else:
            nodes = range(len(tokens.ids) + 1)
            rows = torch.stack([p(tuple(tokens.ids[i] for i in tokens.path(n))) for n in nodes])
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
    """Return probabilities that depend on the last token and on the number of tokens, so that branches differ."""
    return lambda prefix: rows[(len(prefix) + sum(prefix[-1:])) % len(rows)]


def sampled(q: Table, parents: Sequence[int]):
    """Children drawn independently."""

    def drafting(chance) -> Tokens:
        tokens = Tokens(ids=[], parents=parents)
        for parent in parents:
            tokens.ids.append(chance.pick(q(prefix_of(tokens, parent))))  # type: ignore[attr-defined]
        return Tokens(ids=tokens.ids, parents=parents, q=rows_of(q, tokens))

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
            row = q(prefix_of(built, index[parent])).clone()
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
            tokens.ids.append(int(q(prefix_of(tokens, parent)).sort(descending=True, stable=True).indices[place]))  # type: ignore[attr-defined]
        return tokens

    return drafting


def _levels(parents: Sequence[int]) -> list[int]:
    """Return the number of tokens between each token and the text."""
    levels: list[int] = []
    for parent in parents:
        levels.append(levels[parent - 1] + 1 if parent else 0)
    return levels


def by_offset(q: Table, parents: Sequence[int]):
    """Return a parallel draft: a token's q knows its offset alone; every token is drawn by itself."""

    def drafting(chance) -> Tokens:
        rows = [q((0,) * level) for level in _levels(parents)]
        return Tokens(ids=[chance.pick(row) for row in rows], parents=parents, q=torch.stack(rows))

    return drafting


def one_draw_for_all_offsets(q: Table, parents: Sequence[int]):
    """Return a control: all tokens come from one uniform draw by their inverse CDFs."""

    def drafting(chance) -> Tokens:
        rows = [q((0,) * level) for level in _levels(parents)]
        edges = torch.cat([row.cumsum(0) for row in rows]).clamp(0, 1).unique()
        low = torch.cat([edges.new_zeros(1), edges])[:-1]
        u = low[chance.pick((edges - low).clamp_min(0))]
        ids = [int(torch.searchsorted(row.cumsum(0), u, right=True).clamp_max(len(row) - 1)) for row in rows]
        return Tokens(ids=ids, parents=parents, q=torch.stack(rows))

    return drafting


def prefix_of(tokens: Tokens, node: int) -> tuple[int, ...]:
    return tuple(tokens.ids[i] for i in tokens.path(node))


def rows_of(q: Table, tokens: Tokens) -> Tensor:
    return torch.stack([q(prefix_of(tokens, parent)) for parent in tokens.parents])


def exact(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


ROWS = exact([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.7, 0.1, 0.2], [0, 0.4, 0.6])


DRAFTS = exact([0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8])


# more than one token has more of p than of q
FOUR = exact([0.4, 0.3, 0.2, 0.1], [0.1, 0.5, 0.1, 0.3])


DRAFTS_OF_FOUR = exact([0.1, 0.15, 0.3, 0.45], [0.4, 0.1, 0.4, 0.1])


def probabilities(v: int):
    weights = st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0, 5.0, 0.3]), min_size=v, max_size=v)
    return weights.filter(any).map(lambda w: torch.tensor(w, dtype=torch.float64) / sum(w))


def warped(logits: list[float], temperature: float, **cuts) -> Tensor:
    """Return a distribution as decoding makes it, scaled to sum to 1 in float64."""
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
    "top-p of the target only": (
        [warped([2.0, 1.0, 0.5], 1.0, top_p=0.6)],
        [warped([1.0, 1.5, 0.5], 1.0)],
    ),
}


def length_of(rule, drafting, target: Sequence[Tensor] = ROWS) -> float:
    """Expected tokens per step."""

    def step(chance):
        tokens = drafting(chance)
        p = table(target)
        rows = torch.stack([p(prefix_of(tokens, n)) for n in range(len(tokens.ids) + 1)])
        return len(rule(rows, tokens, chance)[0]) + 1

    return sum(weight * n for weight, n in outcomes(step))  # type: ignore[operator]


def greedy_with_softmax_q(q: Table, parents):
    def drafting(chance) -> Tokens:
        tokens = most_probable(q, parents)(chance)
        return Tokens(ids=tokens.ids, parents=parents, q=rows_of(q, tokens))

    return drafting


class Never:
    def coin(self, chance):
        return False

    def pick(self, probabilities):
        raise AssertionError


def leviathan(p: Tensor, tokens: Tokens, chance) -> Verdict:
    """Return the engine's rule (Leviathan et al. 2023, algorithm 1), with coins in place of draws."""
    if not tokens.ids:
        return [], p[0]
    q, u = torch.stack([tokens.drawn_from(n, p) for n in range(len(tokens.ids))]), []
    for n, token in enumerate(tokens.ids):
        accept = (p[n][token] / q[n][token]).clamp_max(1)
        u.append(accept / 2 if chance.coin(accept) else (1 + accept) / 2)
    accepted, rest = verify(p, q, torch.tensor(tokens.ids), torch.stack(u))
    return list(range(accepted)), rest
