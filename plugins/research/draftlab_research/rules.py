"""Verify rules for token trees. From the root on, they try the children of a node one after another.

N drafted tokens, V vocab. draftlab.engine.verify defines nodes and p.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from draftlab.engine.verify import Chance, Tokens, Verdict, normalised
from draftlab.registry import RULES

HALVINGS = 20  # number of times that the interval around rho is halved


@RULES.register("recursive")
def recursive(p: Tensor, tokens: Tokens, chance: Chance) -> Verdict:
    """Verify siblings one after another, each against the residual of p that the rejected siblings leave.

    The residual after a rejection uses the distribution that the child was drawn from. The rule covers children that
    were drawn independently (SpecInfer, 2305.09781, algorithm 2) or without replacement (Sequoia, 2402.12374), and,
    with one-hot q, the most probable tokens as children (EAGLE). For a single child it is Leviathan's rule.
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

    The smallest rho accepts the most tokens. It solves 1 - (1 - beta)^n = rho beta, where beta = sum min(q, p / rho),
    and is approached from above.

    n: Number of siblings.
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
