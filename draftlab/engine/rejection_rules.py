"""Verify rules for token trees and blocks: which drafted tokens to accept, and the next token's distribution.

N drafted tokens, V vocab. Pure functions. A rule receives its randomness, so that the same function decodes
(``Uniforms``) and can be proved lossless by enumerating all outcomes (tests). A draft is a tree of nodes: 0 is the last
token of the text, i + 1 the drafted token i; ``parents`` has the node that each token follows, and siblings are in the
order in which they were drawn. A chain is the tree 0, 1, 2, ... Row n of p is the target's distribution after node n.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftlab.engine.verify import draw
from draftlab.registry import REJECTION, RULES


class Chance(Protocol):
    """The randomness of a rule."""

    def coin(self, chance: Tensor) -> bool:
        """Return True with this probability; above 1 is certain."""
        ...

    def pick(self, probabilities: Tensor) -> int:
        """Draw an id from probabilities [V]."""
        ...


class Uniforms:
    """Uniform draws in [0, 1), [n], used in order; a rule needs at most one per drafted token and one more."""

    def __init__(self, uniform: Tensor) -> None:
        self.draws = iter(uniform)

    def coin(self, chance: Tensor) -> bool:
        return bool(next(self.draws) < chance)

    def pick(self, probabilities: Tensor) -> int:
        return int(draw(probabilities, next(self.draws)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Drafted tokens: ids [N] and q [N, V], the distributions they were drawn from, given their elder siblings."""

    ids: Sequence[int]
    parents: Sequence[int]
    q: Tensor | None = None  # deterministic, one-hot

    def children(self, node: int) -> list[int]:
        """Return the children of a node and of its siblings with the same token, which stand for the same text."""
        same = [node]
        if node:
            same = [
                i + 1
                for i in self.children(self.parents[node - 1])
                if self.ids[i] == self.ids[node - 1]
            ]
        return [i for i, parent in enumerate(self.parents) if parent in same]

    def path(self, node: int) -> list[int]:
        """Return the tokens from the root to node."""
        return [*self.path(self.parents[node - 1]), node - 1] if node else []

    def drawn_from(self, token: int, p: Tensor) -> Tensor:
        """Return the distribution [V] that a token was drawn from, of p's dtype."""
        return (
            torch.zeros_like(p[0]).index_fill_(0, _at(self.ids[token], p), 1)
            if self.q is None
            else self.q[token]
        )


# accepted tokens, root first; distribution [V] of the next token
Verdict = tuple[list[int], Tensor]
Rule = Callable[[Tensor, Tokens, Chance], Verdict]


@RULES.register("match")
def match(p: Tensor, tokens: Tokens, chance: Chance) -> Verdict:
    """Emit the target's own samples, and accept drafted tokens while they equal them (llama.cpp). Ignores q."""
    node = 0
    while True:
        token = chance.pick(p[node])
        child = next((c for c in tokens.children(node) if tokens.ids[c] == token), None)
        if child is None:
            return tokens.path(node), torch.zeros_like(p[0]).index_fill_(0, _at(token, p), 1)
        node = child + 1


@RULES.register("block")
def block(p: Tensor, tokens: Tokens, chance: Chance) -> Verdict:
    """Verify a chain as a whole; accepts no fewer tokens than verifying one by one (Sun et al. 2403.10444, alg. 2).

    Raises:
        ValueError: not a chain.
    """
    n = len(tokens.ids)
    if list(tokens.parents) != list(range(n)):
        raise ValueError("block verification needs a chain, not a tree")
    q = [tokens.drawn_from(i, p) for i in range(n)]
    accept = [torch.ones((), dtype=p.dtype, device=p.device)]
    for i, token in enumerate(tokens.ids):
        accept.append((accept[i] * p[i, token] / q[i][token]).clamp_max(1))
    if chance.coin(accept[n]):
        return list(range(n)), p[n]
    for length in range(n - 1, 0, -1):
        residual = (accept[length] * p[length] - q[length]).clamp_min(0)
        total = residual.sum()
        if total > 0 and chance.coin(total / (total + 1 - accept[length])):
            return list(range(length)), residual / total
    return [], normalised((p[0] - q[0]).clamp_min(0), p[0])


def rule_named(name: str) -> Rule | None:
    """Return the rule of a name, or None for "rejection", which needs none. Raises UserError: no such rule."""
    return None if name == REJECTION else RULES.get(name, f"--rule {name}")


def normalised(residual: Tensor, otherwise: Tensor) -> Tensor:
    """Normalise a residual; where p and q agree up to rounding it is zero, and rejection had no real chance."""
    total = residual.sum()
    return residual / total if total > 0 else otherwise


def _at(token: int, like: Tensor) -> Tensor:
    return torch.tensor([token], device=like.device)
