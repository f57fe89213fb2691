"""Sampling from logits, the rejection rule of speculative sampling, and verify rules for token trees and blocks.

K drafted tokens of a chain, N drafted tokens of a tree, V vocab. Greedy decoding is the same rule with one-hot
distributions. All functions are pure. A rule receives its randomness: ``Uniforms`` in decoding, an enumeration of all
outcomes in the tests that prove it lossless. A draft is a tree of nodes: node 0 is the last token of the text, node
i + 1 is drafted token i. ``parents`` has the node that each drafted token follows. Siblings are in the order in which
they were drawn. A chain has the parents 0, 1, 2, ... Row n of p is the target's distribution after node n.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.model.devices import exact_dtype
from draftlab.registry import REJECTION, RULES
from draftlab.sampling import SamplingParams

COLD = 1e-2


def check_logits(logits: Tensor, model: str) -> None:
    """Raises UserError: the largest logit is NaN or infinite. Single logits may be -inf, for ids that a head lacks."""
    if not math.isfinite(float(logits.max())):
        dtype = str(logits.dtype).removeprefix("torch.")
        raise UserError(
            f"{model} computes NaN or infinite logits in {dtype}: its weights are damaged, or overflow in "
            f"{dtype}; try --dtype float32"
        )


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return next-token probabilities, [..., V], fp32. Temperature 0 is one-hot on the lowest id of the largest logit.

    Filters apply in the order of transformers and vLLM: top_k; top_p among the remaining tokens (the fewest tokens
    whose sum reaches top_p, at least one); min_p relative to the most probable token.
    """
    if params.temperature == 0:
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(
            -1, logits.argmax(-1, keepdim=True), 1.0
        )
    logits = logits.float()
    if params.temperature < COLD:
        logits = logits - logits.amax(-1, keepdim=True)  # else the quotient overflows
    p = torch.softmax(logits / params.temperature, -1)
    if params.top_k or params.top_p < 1:
        values, ids = (
            p.topk(params.top_k, -1)
            if 0 < params.top_k < p.shape[-1]
            else p.sort(-1, descending=True)
        )
        values = values / values.sum(-1, keepdim=True)
        # keep a token if the more probable tokens have not reached top_p
        values = values * (values.cumsum(-1) - values < params.top_p)
        p = torch.zeros_like(p).scatter_(-1, ids, values / values.sum(-1, keepdim=True))
    if params.min_p:
        p = p * (p >= params.min_p * p.amax(-1, keepdim=True))
        p = p / p.sum(-1, keepdim=True)
    return p


def draw(probabilities: Tensor, u: Tensor) -> Tensor:
    """Sample by the inverse CDF: the first id whose cumulative probability exceeds u. [..., V], [...] -> ids [...].

    Samples follow `probabilities` exactly, as the verify rule needs of q. An id of probability 0 is never drawn, even
    if rounding leaves the cumulative sum below 1.
    """
    cumulative = probabilities.to(exact_dtype(probabilities.device)).cumsum(-1)
    total = cumulative[..., -1:]
    edge = torch.minimum(
        u.to(cumulative).unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total))
    )
    return torch.searchsorted(cumulative, edge, right=True).squeeze(-1)


def verify(p: Tensor, q: Tensor, drafted: Tensor, u: Tensor) -> tuple[int, Tensor]:
    """Accept a prefix of the drafted tokens, losslessly.

    Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.

    Args:
        p: target probabilities, [K + 1, V].
        q: draft probabilities that the drafted tokens were drawn from, [K, V].
        drafted: token ids, [K].
        u: uniform draws in [0, 1), [K].

    Returns: number accepted, and the distribution [V] of the next token.
    """
    counts = torch.tensor([len(drafted)], device=p.device)
    accepted, following = verify_rows(p[None], q[None], drafted[None], u[None], counts)
    return int(accepted), following[0]


def verify_rows(
    p: Tensor, q: Tensor, drafted: Tensor, u: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Verify a batch of rows as ``verify`` does, without waiting for the device.

    p: [B, K + 1, V]. q: [B, K, V]. drafted, u: [B, K]. counts: Number of valid drafted tokens of each row, [B].

    Returns: numbers accepted, [B], and the distributions of the next tokens, [B, V].
    """
    width, at = drafted.shape[1], drafted.unsqueeze(-1)
    p_drafted, q_drafted = p[:, :-1].gather(-1, at).squeeze(-1), q.gather(-1, at).squeeze(-1)
    passed = u.to(q) * q_drafted < p_drafted  # u < p / q, without dividing
    passed &= torch.arange(width, device=p.device) < counts.unsqueeze(1)
    accepted = passed.long().cumprod(1).sum(1)
    p_next = _picked(p, accepted)
    if width == 0:
        return accepted, p_next
    residual = (p_next - _picked(q, accepted.clamp_max(width - 1))).clamp_min(0)
    total = residual.sum(-1, keepdim=True)
    # a total of 0 means that p and q agree up to rounding, and the token was rejected by rounding: p itself is right
    rejected = (accepted < counts).unsqueeze(1) & (total > 0)
    return accepted, torch.where(rejected, residual / total, p_next)


def _picked(probabilities: Tensor, place: Tensor) -> Tensor:
    """Return the probabilities [B, V] at position `place` [B] of each row, from [B, T, V]."""
    return probabilities[torch.arange(len(place), device=place.device), place]


class Chance(Protocol):
    """Source of the randomness of a rule."""

    def coin(self, chance: Tensor) -> bool:
        """Return True with probability `chance`, and always if `chance` is 1 or more."""
        ...

    def pick(self, probabilities: Tensor) -> int:
        """Draw an id from probabilities [V]."""
        ...


class Uniforms:
    """Uniform draws in [0, 1), [n], used in order. For N drafted tokens a rule needs at most N + 1 draws."""

    def __init__(self, uniform: Tensor) -> None:
        self.draws = iter(uniform)

    def coin(self, chance: Tensor) -> bool:
        return bool(next(self.draws) < chance)

    def pick(self, probabilities: Tensor) -> int:
        return int(draw(probabilities, next(self.draws)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Drafted tokens: ids [N], and q [N, V], the distribution of each token given the siblings drawn before it."""

    ids: Sequence[int]
    parents: Sequence[int]
    q: Tensor | None = None  # None is deterministic: one-hot

    def children(self, node: int) -> list[int]:
        """Return the children of a node, and of its duplicates: nodes with the same path of tokens."""
        same = [node]
        if node:
            same = [
                i + 1
                for i in self.children(self.parents[node - 1])
                if self.ids[i] == self.ids[node - 1]
            ]
        return [i for i, parent in enumerate(self.parents) if parent in same]

    def path(self, node: int) -> list[int]:
        """Return the indices of the tokens from the root to `node`."""
        return [*self.path(self.parents[node - 1]), node - 1] if node else []

    def drawn_from(self, token: int, p: Tensor) -> Tensor:
        """Return the distribution [V] that a token was drawn from; without q, one-hot in p's dtype."""
        return (
            torch.zeros_like(p[0]).index_fill_(0, _at(self.ids[token], p), 1)
            if self.q is None
            else self.q[token]
        )


# indices of accepted tokens, root first; distribution [V] of the next token
Verdict = tuple[list[int], Tensor]
Rule = Callable[[Tensor, Tokens, Chance], Verdict]


@RULES.register("match")
def match(p: Tensor, tokens: Tokens, chance: Chance) -> Verdict:
    """Emit the target's own samples, and accept drafted tokens that equal these samples, as llama.cpp does.

    q is not used.
    """
    node = 0
    while True:
        token = chance.pick(p[node])
        child = next((c for c in tokens.children(node) if tokens.ids[c] == token), None)
        if child is None:
            return tokens.path(node), torch.zeros_like(p[0]).index_fill_(0, _at(token, p), 1)
        node = child + 1


@RULES.register("block")
def block(p: Tensor, tokens: Tokens, chance: Chance) -> Verdict:
    """Verify a chain as a whole (Sun et al. 2403.10444, alg. 2), accepting on average no fewer tokens than verify.

    Raises:
        ValueError: The draft is a token tree.
    """
    n = len(tokens.ids)
    if list(tokens.parents) != list(range(n)):
        raise ValueError("the rule block verifies chains, and this draft is a token tree")
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
    """Return the rule with a name, or None for "rejection", the default. Raises UserError: there is no such rule."""
    return None if name == REJECTION else RULES.get(name, f"--rule {name}")


def normalised(residual: Tensor, otherwise: Tensor) -> Tensor:
    """Normalise a residual. A zero residual gives `otherwise`: p and q agree up to rounding."""
    total = residual.sum()
    return residual / total if total > 0 else otherwise


def _at(token: int, like: Tensor) -> Tensor:
    return torch.tensor([token], device=like.device)
