"""Sampling from logits, the rejection rule of speculative sampling, and two other verify rules: match and block.

K drafted tokens of a chain, N drafted tokens of a tree, V vocab. Greedy decoding uses the same rule with one-hot
distributions. All functions are pure. A rule receives its source of randomness as an argument. In decoding this is
``Uniforms``. In the tests that prove a rule lossless, it is an enumeration of all outcomes.

A draft is a tree of nodes. Node 0 is the last token of the text, and node i + 1 is drafted token i. ``parents[i]`` is
the node before drafted token i, so a chain has the parents 0, 1, 2, ... Siblings are in the order in which they were
drawn. p[n] is the target's distribution of the token after node n.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.model.devices import exact_dtype
from draftlab.registry import REJECTION, RULES
from draftlab.sampling import Filter, SamplingParams

BLOCK = 256  # number of ids whose probabilities are summed before an id is drawn
COLD = 1e-2  # at lower temperatures, logits / temperature could overflow


def check_logits(logits: Tensor, model: str) -> None:
    """Raise UserError if the largest logit is NaN or infinite. Other logits may be -inf, as with a trimmed LM head.

    model: Noun for the model in the message, such as "the target".
    """
    if not math.isfinite(float(logits.max())):
        dtype = str(logits.dtype).removeprefix("torch.")
        raise UserError(
            f"{model} computes NaN or infinite logits in {dtype}, because weights are damaged or values overflow; try "
            "--dtype float32, or download the checkpoint again"
        )


def most_probable(logits: Tensor) -> Tensor:
    """Return the ids [...] with the largest logits [..., V], the lowest id of several.

    On a CPU, NumPy takes a third of the time that torch takes.
    """
    if _is_array(logits):
        return torch.from_numpy(np.asarray(logits.detach().numpy().argmax(-1)))
    return logits.argmax(-1)


def _is_array(tensor: Tensor) -> bool:
    """Return whether NumPy can read the tensor. Subclasses of Tensor have no array."""
    is_float = tensor.dtype in (torch.float32, torch.float64)
    return type(tensor) is Tensor and tensor.device.type == "cpu" and is_float


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the probabilities of the next token, fp32 [..., V], from logits [..., V].

    The filters of `params` apply in their order. top_k keeps the k most probable tokens, and all that tie with the last
    of these. top_p keeps the fewest tokens whose probabilities sum to top_p or more. min_p is relative to the most
    probable token. At temperature 0, the id with the largest logit has probability 1. If several ids have the
    largest logit, the lowest of these ids has probability 1.
    """
    if params.temperature == 0:
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, most_probable(logits).unsqueeze(-1), 1.0)
    logits = logits.float()
    for name in params.active:
        logits = FILTER_FUNCTIONS[name](logits, getattr(params, name))
    return torch.softmax(logits, -1)


def _with_temperature(logits: Tensor, temperature: float) -> Tensor:
    if temperature < COLD:
        logits = logits - logits.amax(-1, keepdim=True)  # else the quotient overflows
    return logits / temperature


def _with_top_k(logits: Tensor, k: int) -> Tensor:
    last = logits.topk(min(k, logits.shape[-1]), -1).values[..., -1:]
    return logits.masked_fill(logits < last, -torch.inf)


def _with_top_p(logits: Tensor, top_p: float) -> Tensor:
    width = logits.shape[-1]
    if _is_array(logits):  # sorting is slow on a CPU; after top_k, few logits are finite
        width = max(1, int((logits > -torch.inf).sum(-1).max()))
    values, ids = logits.topk(width, -1) if width < logits.shape[-1] else logits.sort(-1, descending=True)
    p = values.softmax(-1)
    # keep a token if the more probable tokens have not reached top_p
    values = values.masked_fill(p.cumsum(-1) - p >= top_p, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(-1, ids, values)


def _with_min_p(logits: Tensor, min_p: float) -> Tensor:
    least = logits.amax(-1, keepdim=True) + math.log(min_p)
    return logits.masked_fill(logits < least, -torch.inf)


FILTER_FUNCTIONS: dict[Filter, Callable[[Tensor, Any], Tensor]] = {
    "temperature": _with_temperature,
    "top_k": _with_top_k,
    "top_p": _with_top_p,
    "min_p": _with_min_p,
}


def draw(probabilities: Tensor, u: Tensor) -> Tensor:
    """Sample ids [...] from probabilities [..., V] by the inverse CDF: the first id whose cumulative sum exceeds u.

    Samples follow `probabilities` exactly, because the verify rule needs drafted tokens that are drawn exactly from q.
    An id of probability 0 is never drawn, even if rounding leaves the cumulative sum below 1.

    u: Draws in [0, 1), [...].
    """
    if _is_array(probabilities):
        rows = probabilities.detach().numpy().reshape(-1, probabilities.shape[-1])
        ids = [_draw_from(row, at) for row, at in zip(rows, u.flatten().tolist(), strict=True)]
        return torch.from_numpy(np.array(ids, dtype=np.int64).reshape(u.shape))
    cumulative = probabilities.to(exact_dtype(probabilities.device)).cumsum(-1)
    total = cumulative[..., -1:]
    edge = torch.minimum(u.to(cumulative).unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, edge, right=True).squeeze(-1)


def _draw_from(probabilities: np.ndarray, u: float) -> int:
    """Do the same for one distribution: find the block of ids first, then the id. This takes half the time."""
    starts = np.arange(0, len(probabilities), BLOCK)
    ends = np.add.reduceat(probabilities, starts, dtype=np.float64).cumsum()
    edge = min(u * ends[-1], np.nextafter(ends[-1], 0))
    block = int(ends.searchsorted(edge, side="right"))
    if block:
        edge -= ends[block - 1]
    cumulative = probabilities[starts[block] :][:BLOCK].cumsum(dtype=np.float64)
    # the two sums of a block may round differently
    edge = min(edge, np.nextafter(cumulative[-1], 0))
    return int(starts[block] + cumulative.searchsorted(edge, side="right"))


def verify(p: Tensor, q: Tensor, drafted: Tensor, u: Tensor) -> tuple[int, Tensor]:
    """Accept a prefix of a chain of drafted tokens, losslessly.

    Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.

    Args:
        p: Probabilities of the target, [K + 1, V].
        q: Probabilities that the drafted tokens were drawn from, [K, V].
        drafted: Drafted token ids, [K].
        u: Uniform draws in [0, 1), [K].

    Returns: The number of accepted tokens, and the distribution [V] of the next token.
    """
    counts = torch.tensor([len(drafted)], device=p.device)
    accepted, following = verify_rows(p[None], q[None], drafted[None], u[None], counts)
    return int(accepted), following[0]


def verify_rows(p: Tensor, q: Tensor, drafted: Tensor, u: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Verify a batch of chains as verify() does. The host does not wait for the device.

    Args:
        p: Probabilities of the target, [B, K + 1, V].
        q: Probabilities that the drafted tokens were drawn from, [B, K, V].
        drafted: Drafted token ids, [B, K].
        u: Uniform draws in [0, 1), [B, K].
        counts: Number of valid drafted tokens of each chain, [B].

    Returns: The numbers of accepted tokens, [B], and the distributions of the next tokens, [B, V].
    """
    width = drafted.shape[1]
    at = drafted.unsqueeze(-1)
    p_drafted = p[:, :-1].gather(-1, at).squeeze(-1)
    q_drafted = q.gather(-1, at).squeeze(-1)
    passed = u.to(q) * q_drafted < p_drafted  # u < p / q, without dividing
    passed &= torch.arange(width, device=p.device) < counts.unsqueeze(1)
    accepted = passed.long().cumprod(1).sum(1)
    p_next = _picked(p, accepted)
    if width == 0:
        return accepted, p_next
    residual = (p_next - _picked(q, accepted.clamp_max(width - 1))).clamp_min(0)
    total = residual.sum(-1, keepdim=True)
    # A total of 0 means that p and q agree up to rounding, so a token was rejected only by rounding. Then p is used.
    rejected = (accepted < counts).unsqueeze(1) & (total > 0)
    return accepted, torch.where(rejected, residual / total, p_next)


def _picked(probabilities: Tensor, place: Tensor) -> Tensor:
    """Return the distributions [B, V] at the positions `place` [B] of probabilities [B, T, V]."""
    return probabilities[torch.arange(len(place), device=place.device), place]


class Chance(Protocol):
    """A source of randomness for a verify rule."""

    def coin(self, chance: Tensor) -> bool:
        """Return True with probability `chance`. A chance of 1 or more always gives True."""
        ...

    def pick(self, probabilities: Tensor) -> int:
        """Draw an id from probabilities [V]."""
        ...


class Uniforms:
    """A Chance that uses uniform draws in [0, 1), [n], in their order.

    For N drafted tokens, a rule needs at most N + 1 draws.
    """

    def __init__(self, uniform: Tensor) -> None:
        self.draws = iter(uniform)

    def coin(self, chance: Tensor) -> bool:
        return bool(next(self.draws) < chance)

    def pick(self, probabilities: Tensor) -> int:
        return int(draw(probabilities, next(self.draws)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The drafted tokens of one text.

    Args:
        ids: Token ids, [N].
        parents: The node before each token, [N].
        q: Distribution that each token was drawn from, [N, V]. It may depend on the siblings that were drawn before.
            None: the draft is deterministic, and q is one-hot.
    """

    ids: Sequence[int]
    parents: Sequence[int]
    q: Tensor | None = None

    def children(self, node: int) -> list[int]:
        """Return the indices of the drafted tokens that continue a node.

        A tree may have several nodes with the same tokens from the root. The children of all of them are returned.
        """
        same = [node]
        if node:
            same = [i + 1 for i in self.children(self.parents[node - 1]) if self.ids[i] == self.ids[node - 1]]
        return [i for i, parent in enumerate(self.parents) if parent in same]

    def path(self, node: int) -> list[int]:
        """Return the indices of the drafted tokens on the path from the root to `node`, root first."""
        return [*self.path(self.parents[node - 1]), node - 1] if node else []

    def drawn_from(self, token: int, p: Tensor) -> Tensor:
        """Return the distribution, [V], that a drafted token was drawn from: its row of q, or one-hot if q is None.

        token: Index of the drafted token. p: Probabilities of the target, whose dtype and device a one-hot result has.
        """
        return _one_hot(self.ids[token], p[0]) if self.q is None else self.q[token]


# result of a Rule: the indices of the accepted drafted tokens, root first, and the distribution [V] of the next token
Verdict = tuple[list[int], Tensor]
# a function of p [N + 1, V], the drafted tokens, and a source of randomness
Rule = Callable[[Tensor, Tokens, Chance], Verdict]


@RULES.register("match")
def match(p: Tensor, tokens: Tokens, chance: Chance) -> Verdict:
    """Sample every token from the target, and accept the drafted tokens that equal these samples, as llama.cpp does.

    q is not used. Arguments and result are those of a Rule.
    """
    node = 0
    while True:
        token = chance.pick(p[node])
        child = next((c for c in tokens.children(node) if tokens.ids[c] == token), None)
        if child is None:
            return tokens.path(node), _one_hot(token, p[0])
        node = child + 1


@RULES.register("block")
def block(p: Tensor, tokens: Tokens, chance: Chance) -> Verdict:
    """Verify a chain as a whole (Sun et al. 2403.10444, alg. 2). On average this accepts no fewer tokens than verify().

    Arguments and result are those of a Rule.

    Raises:
        ValueError: The draft is a token tree.
    """
    n = len(tokens.ids)
    if list(tokens.parents) != list(range(n)):
        raise ValueError("--rule block verifies only chains, but this draft is a token tree; use --rule match")
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
    """Return the verify rule with a name, or None for "rejection", which is built in.

    Raises:
        UserError: there is no rule with this name.
    """
    return None if name == REJECTION else RULES.get(name, f"--rule {name}")


def normalised(residual: Tensor, otherwise: Tensor) -> Tensor:
    """Return a residual distribution divided by its sum, or `otherwise` if the sum is 0, as when p equals q."""
    total = residual.sum()
    return residual / total if total > 0 else otherwise


def _one_hot(token: int, like: Tensor) -> Tensor:
    result = torch.zeros_like(like)
    result[token] = 1
    return result
