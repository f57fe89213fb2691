"""Verify rules for token trees, which try the children of a node in turn, from the root on.

N drafted tokens, V vocab. Nodes and p are defined in draftlab.engine.verify.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from draftlab.engine.verify import Chance, Tokens, Verdict, normalised
from draftlab.registry import RULES

HALVINGS = 20  # number of times that the interval around rho is halved


@RULES.register("recursive")
def recursive(p: Tensor, tokens: Tokens, chance: Chance) -> Verdict:
    """Verify siblings in turn, each against the residual of p that the siblings before it leave.

    The residual of each trial uses the distribution that the child was drawn from. The rule covers children drawn
    independently (SpecInfer, 2305.09781, algorithm 2) or without replacement (Sequoia, 2402.12374), and, with q
    one-hot, the m most probable tokens (EAGLE). For one child it is Leviathan's rule.
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
    """Select among children drawn independently from one q (SpecTr, 2310.15141, algorithm 3)."""

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
    """Return the smallest rho in [1, n] that is lossless, which accepts the most tokens (SpecTr, theorem 2).

    The solution of 1 - (1 - beta)^n = rho beta, with beta(rho) = sum min(q, p / rho), is approached from above.
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


def _descend(
    p: Tensor, tokens: Tokens, select: Callable[[Tensor, list[int]], tuple[int | None, Tensor]]
) -> Verdict:
    node = 0
    while children := tokens.children(node):
        child, residual = select(p[node], children)
        if child is None:
            return tokens.path(node), residual
        node = child + 1
    return tokens.path(node), p[node]


def _any_of(chance: Tensor, n: int) -> Tensor:
    return 1 - (1 - chance) ** n
