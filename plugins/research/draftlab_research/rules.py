"""Verify rules for token trees. They walk from the root and try the children of each node until a child is accepted.

N drafted tokens, V vocab. draftlab.engine.verify defines nodes, p, and the arguments and result of a Rule.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from draftlab.engine.verify import Chance, Tokens, Verdict, normalised
from draftlab.registry import RULES

HALVINGS = 20  # the interval around rho is halved until it is at most 2^-HALVINGS wide


@RULES.register("recursive")
def recursive(p: Tensor, tokens: Tokens, chance: Chance) -> Verdict:
    """Verify siblings one after another, each against the residual of p that the rejected siblings leave.

    After a rejection, the distribution q that the child was drawn from is subtracted from the residual. Children may be
    drawn independently (SpecInfer, 2305.09781, algorithm 2) or without replacement (Sequoia, 2402.12374). They may also
    be the most probable tokens, with one-hot q (EAGLE). For a single child the rule is that of Leviathan et al. (2023).
    """

    def select(residual: Tensor, children: list[int]) -> tuple[int | None, Tensor]:
        for child in children:
            token, q = tokens.ids[child], tokens.drawn_from(child, p)
            if chance.coin(residual[token] / q[token]):
                return child, residual
            residual = normalised((residual - q).clamp_min(0), residual)
        return None, residual

    return _descend(p, tokens, select)


@RULES.register("k-sequential")
def k_sequential(p: Tensor, tokens: Tokens, chance: Chance) -> Verdict:
    """Verify siblings that were drawn independently from the same q, by SpecTr's k-sequential selection.

    This is algorithm 3 of 2310.15141.
    """

    def select(row: Tensor, children: list[int]) -> tuple[int | None, Tensor]:
        q = tokens.drawn_from(children[0], p)
        rho = smallest_rho(row, q, len(children))
        for child in children:
            token = tokens.ids[child]
            if chance.coin(row[token] / (rho * q[token])):
                return child, row
        once = torch.minimum(q, row / rho)
        each = once.sum()
        accepted = once * (_any_of(each, len(children)) / each) if each > 0 else once
        return None, normalised((row - accepted).clamp_min(0), row)

    return _descend(p, tokens, select)


def smallest_rho(p: Tensor, q: Tensor, n: int) -> float:
    """Return the smallest rho in [1, n] with which k-sequential selection is lossless (SpecTr, theorem 2).

    The smallest rho accepts the most tokens. It solves 1 - (1 - beta)^n = rho beta, where beta = sum min(q, p / rho).
    The result is at most 2^-HALVINGS above it, and never below.

    p, q: Distributions of target and draft, [V]. n: Number of siblings.
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


def _descend(p: Tensor, tokens: Tokens, select: Callable[[Tensor, list[int]], tuple[int | None, Tensor]]) -> Verdict:
    node = 0
    while children := tokens.children(node):
        child, residual = select(p[node], children)
        if child is None:
            return tokens.path(node), residual
        node = child + 1
    return tokens.path(node), p[node]


def _any_of(chance: Tensor, n: int) -> Tensor:
    return 1 - (1 - chance) ** n
