"""The verify rule: which drafted tokens stand, and what the next token is drawn from. Pure functions.

K drafted tokens, V vocab. Greedy decoding is the same rule with one-hot distributions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Warp:
    """How logits become the distribution that is sampled from. Temperature 0 is greedy; top_k 0, top_p 1, min_p 0: no
    cut."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __call__(self, logits: Tensor) -> Tensor:
        return distribution(logits, self.temperature, self.top_k, self.top_p, self.min_p)


def distribution(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Next-token probabilities, [..., V], fp32. Temperature 0: one-hot on the largest logit, of a tie the lowest id.

    top_k (0: all), then top_p cut what is least probable, as transformers and vLLM do: of what top_k left, the fewest
    tokens that together have top_p stay, and at least one. min_p, last as in transformers: what is less probable than
    min_p times the most probable token goes.
    """
    if temperature == 0:
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    p = torch.softmax(logits.float() / temperature, -1)
    if top_k or top_p < 1:
        values, ids = p.topk(top_k, -1) if 0 < top_k < p.shape[-1] else p.sort(-1, descending=True)
        values = values / values.sum(-1, keepdim=True)
        values = values * (values.cumsum(-1) - values < top_p)  # what stands before it has not yet reached top_p
        p = torch.zeros_like(p).scatter_(-1, ids, values / values.sum(-1, keepdim=True))
    if min_p:
        p = p * (p >= min_p * p.amax(-1, keepdim=True))
        p = p / p.sum(-1, keepdim=True)
    return p


def draw(probabilities: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF sample: the first id whose cumulative probability exceeds u. [..., V], [...] -> ids [...].

    Exactly the distribution given, so q in the verify rule is what the draft sampled from. An id of probability 0 is
    never drawn, also where the cumulative sum falls short of 1 by rounding.
    """
    cumulative = probabilities.double().cumsum(-1)
    total = cumulative[..., -1:]
    edge = torch.minimum(u.to(cumulative).unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, edge, right=True).squeeze(-1)


def verify(p: Tensor, q: Tensor, drafted: Tensor, u: Tensor) -> tuple[int, Tensor]:
    """Accept a prefix of the drafted tokens, losslessly.

    Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.

    Args:
        p: target probabilities, [K + 1, V].
        q: probabilities the drafted tokens were drawn from, [K, V].
        drafted: token ids, [K].
        u: uniform draws in [0, 1), [K].

    Returns: number accepted, and the distribution [V] of the next token.
    """
    at = drafted.unsqueeze(-1)
    p_drafted, q_drafted = p[:-1].gather(-1, at).squeeze(-1), q.gather(-1, at).squeeze(-1)
    accepted = int((u.to(q) * q_drafted < p_drafted).long().cumprod(0).sum())  # u < p / q, without dividing
    if accepted == len(drafted):
        return accepted, p[accepted]
    residual = (p[accepted] - q[accepted]).clamp_min(0)
    total = residual.sum()
    # p and q agree up to rounding: rejection had no real chance, and p itself is the right distribution
    return accepted, residual / total if total > 0 else p[accepted]
