"""Verify rules beside the plain one: which drafted tokens stand, and what the next one is drawn from. Pure functions.

N drafted tokens, V vocab. A rule is handed its chances, so the same function decodes (``Uniforms``) and is proved by
going through every outcome (tests/test_rules.py). A draft is a tree of nodes: 0 is the text's last token, i + 1 the
drafted token i; ``parents`` gives of each token the node that it follows, and siblings stand in the order in which they
were drawn. A chain is the tree 0, 1, 2, ... Row n of p is what the target says behind node n.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftlab.engine.verify import draw
from draftlab.errors import UserError, did_you_mean

HALVINGS = 20  # of the interval in which rho is looked for
TYPICAL_FLOOR, TYPICAL_SCALE = 0.09, 0.3  # epsilon and delta of Medusa's code (2401.10774)
LENIENCE = 0.5


class Chance(Protocol):
    """Where a rule's randomness comes from."""

    def coin(self, chance: Tensor) -> bool:
        """True with that chance; above 1 is certain."""
        ...

    def pick(self, probabilities: Tensor) -> int:
        """An id from probabilities [V]."""
        ...


class Uniforms:
    """Draws in [0, 1), [n], used up one by one; a rule needs at most one per drafted token, and one."""

    def __init__(self, uniform: Tensor) -> None:
        self.left = iter(uniform)

    def coin(self, chance: Tensor) -> bool:
        return bool(next(self.left) < chance)

    def pick(self, probabilities: Tensor) -> int:
        return int(draw(probabilities, next(self.left)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What was drafted: ids [N], and q [N, V], each row what that token was drawn from, given its elder siblings."""

    ids: Sequence[int]
    parents: Sequence[int]
    q: Tensor | None = None  # each token was certain, one-hot

    def children(self, node: int) -> list[int]:
        """Tokens behind a node, and behind its siblings with the same token: they stand for the same text."""
        same = [node]
        if node:
            same = [i + 1 for i in self.children(self.parents[node - 1]) if self.ids[i] == self.ids[node - 1]]
        return [i for i, parent in enumerate(self.parents) if parent in same]

    def path(self, node: int) -> list[int]:
        """Tokens from the first down to node."""
        return [*self.path(self.parents[node - 1]), node - 1] if node else []

    def drawn_from(self, token: int, p: Tensor) -> Tensor:
        """The distribution [V] that a token came from, of p's type."""
        return torch.zeros_like(p[0]).index_fill_(0, _at(self.ids[token], p), 1) if self.q is None else self.q[token]


Verdict = tuple[list[int], Tensor]  # drafted tokens that stand, root first; distribution [V] of the next one
Rule = Callable[[Tensor, Tokens, Chance], Verdict]


def recursive(p: Tensor, tokens: Tokens, chance: Chance) -> Verdict:
    """Siblings tried in turn, each against what the ones before left over of p; one child is Leviathan's rule.

    The residual of each trial is taken with the distribution that the child was drawn from. So it holds for children
    drawn independently (SpecInfer, 2305.09781, algorithm 2), for children drawn without replacement (Sequoia,
    2402.12374) and, with q one-hot, for the m most probable tokens (EAGLE).
    """

    def select(rest: Tensor, children: list[int]) -> tuple[int | None, Tensor]:
        for child in children:
            token, q = tokens.ids[child], tokens.drawn_from(child, p)
            if chance.coin(rest[token] / q[token]):
                return child, rest
            rest = _normalised((rest - q).clamp_min(0), rest)
        return None, rest

    return _descend(p, tokens, select)


def k_sequential(p: Tensor, tokens: Tokens, chance: Chance) -> Verdict:
    """SpecTr's selection among children drawn independently from one q (2310.15141, algorithm 3)."""

    def select(row: Tensor, children: list[int]) -> tuple[int | None, Tensor]:
        q = tokens.drawn_from(children[0], p)
        rho = smallest_rho(row, q, len(children))
        for child in children:
            token = tokens.ids[child]
            if chance.coin(row[token] / (rho * q[token])):
                return child, row
        once = torch.minimum(q, row / rho)
        each = once.sum()
        taken = once * (_any_of(each, len(children)) / each) if each > 0 else once
        return None, _normalised((row - taken).clamp_min(0), row)

    return _descend(p, tokens, select)


def match(p: Tensor, tokens: Tokens, chance: Chance) -> Verdict:
    """The target's own sample is emitted; drafts stand as long as they are it (llama.cpp). Looks at no q."""
    node = 0
    while True:
        token = chance.pick(p[node])
        child = next((c for c in tokens.children(node) if tokens.ids[c] == token), None)
        if child is None:
            return tokens.path(node), torch.zeros_like(p[0]).index_fill_(0, _at(token, p), 1)
        node = child + 1


def block(p: Tensor, tokens: Tokens, chance: Chance) -> Verdict:
    """The chain judged as a whole, never shorter than token by token in expectation (Sun et al. 2403.10444, alg. 2).

    Raises:
        ValueError: not a chain.
    """
    n = len(tokens.ids)
    if list(tokens.parents) != list(range(n)):
        raise ValueError("block verification judges a chain, not a tree")
    q = [tokens.drawn_from(i, p) for i in range(n)]
    kept = [torch.ones((), dtype=p.dtype, device=p.device)]
    for i, token in enumerate(tokens.ids):
        kept.append((kept[i] * p[i, token] / q[i][token]).clamp_max(1))
    if chance.coin(kept[n]):
        return list(range(n)), p[n]
    for length in range(n - 1, 0, -1):
        left = (kept[length] * p[length] - q[length]).clamp_min(0)
        total = left.sum()
        if total > 0 and chance.coin(total / (total + 1 - kept[length])):
            return list(range(length)), left / total
    return [], _normalised((p[0] - q[0]).clamp_min(0), p[0])


def typical(p: Tensor, tokens: Tokens, chance: Chance) -> Verdict:
    """LOSSY. Drafts stand that the target finds probable enough: p > min(eps, delta e^-H(p)) (Medusa, 2401.10774)."""

    def select(row: Tensor, children: list[int]) -> tuple[int | None, Tensor]:
        entropy = torch.special.entr(row).sum()
        floor = (TYPICAL_SCALE * torch.exp(-entropy)).clamp_max(TYPICAL_FLOOR)
        return next((c for c in children if row[tokens.ids[c]] > floor), None), row

    return _descend(p, tokens, select)


def lenient(p: Tensor, tokens: Tokens, chance: Chance) -> Verdict:
    """LOSSY. Leviathan's rule with q scaled down by a lenience (2211.17192, appendix A.5)."""

    def select(row: Tensor, children: list[int]) -> tuple[int | None, Tensor]:
        child = children[0]
        q = LENIENCE * tokens.drawn_from(child, p)
        if chance.coin(row[tokens.ids[child]] / q[tokens.ids[child]]):
            return child, row
        return None, _normalised((row - q).clamp_min(0), row)

    return _descend(p, tokens, select)


def smallest_rho(p: Tensor, q: Tensor, n: int) -> float:
    """The rho in [1, n] that accepts most; any above it is lossless too, none below (SpecTr, theorem 2).

    Solves 1 - (1 - beta)^n = rho beta with beta(rho) = sum min(q, p / rho), from above.
    """
    low, high = 1.0, float(n)
    while n > 1 and high - low > 2.0**-HALVINGS:
        middle = (low + high) / 2
        beta = torch.minimum(q, p / middle).sum()
        if _any_of(beta, n) > middle * beta:
            low = middle
        else:
            high = middle
    return high


RULES: dict[str, Rule] = {
    "recursive": recursive,
    "match": match,
    "block": block,
    "k-sequential": k_sequential,
    "typical": typical,
    "lenient": lenient,
}
LOSSY = frozenset({"typical", "lenient"})


def rule_named(name: str) -> Rule:
    """Raises UserError: no such rule."""
    if name not in RULES:
        raise UserError(f"no verify rule {name!r}; there are {', '.join(RULES)}{did_you_mean(name, RULES)}")
    return RULES[name]


def _descend(p: Tensor, tokens: Tokens, select: Callable[[Tensor, list[int]], tuple[int | None, Tensor]]) -> Verdict:
    node = 0
    while children := tokens.children(node):
        child, rest = select(p[node], children)
        if child is None:
            return tokens.path(node), rest
        node = child + 1
    return tokens.path(node), p[node]


def _normalised(left: Tensor, instead: Tensor) -> Tensor:
    """Where p and q agree up to rounding nothing is left, and rejection had no real chance: instead."""
    total = left.sum()
    return left / total if total > 0 else instead


def _any_of(chance: Tensor, n: int) -> Tensor:
    return 1 - (1 - chance) ** n


def _at(token: int, like: Tensor) -> Tensor:
    return torch.tensor([token], device=like.device)
