"""Divergences between the teacher's distribution p and the student's q, per token.

N tokens, V vocabulary. All take log-probabilities [N, V] (p constant) and give [N] in nats. The readable reference:
values are written so that they stay non-negative and exact when p and q nearly agree, where the textbook sum
cancels (``p (log p - log q)`` loses all digits in fp32 at an acceptance of 0.996).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.errors import UserError, did_you_mean

Divergence = Callable[[Tensor, Tensor], Tensor]


def fkl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Forward KL(p || q) = sum p (log p - log q), in [0, inf). Hinton et al. 2015, less the teacher's entropy."""
    return _kl_terms(log_p, log_q).sum(-1)


def rkl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Reverse KL(q || p), in [0, inf). Mode-seeking; Gu et al. 2024 (MiniLLM)."""
    return _kl_terms(log_q, log_p).sum(-1)


def jsd(beta: float) -> Divergence:
    """Generalised Jensen-Shannon: beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q.

    In [0, H(beta)], ln 2 at one half. beta weighs the teacher, as in GKD (Agarwal et al. 2024, eq. 1).
    """

    def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
        return (beta * _kl_terms(log_p, log_m) + (1 - beta) * _kl_terms(log_q, log_m)).sum(-1)

    return divergence


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """alpha = sum min(p, q) = 1 - total variation: the chance that a sampled draft token is accepted.

    Leviathan et al. 2023, corollary 3.6. In [0, 1].
    """
    return torch.minimum(log_p, log_q).exp().sum(-1)


def log_probs(logits: Tensor, temperature: float) -> Tensor:
    """fp32 log-softmax of logits / temperature, over the last axis."""
    return torch.log_softmax(logits.float() / temperature, dim=-1)


@dataclass(frozen=True, slots=True)
class Loss:
    """A named objective; divergence is None for cross-entropy, which needs no teacher."""

    name: str
    divergence: Divergence | None


def parse_loss(spec: str) -> Loss:
    """``ce``, ``fkl``, ``rkl`` or ``jsd(0.5)``.

    Raises:
        UserError: another name, or a beta outside (0, 1).
    """
    name, _, argument = spec.strip().lower().partition("(")
    if name == "jsd":
        return Loss(spec, jsd(_parse_beta(argument.rstrip(")") or "0.5")))
    if name in NO_ARGUMENT and not argument:
        return Loss(spec, NO_ARGUMENT[name])
    raise UserError(f"unknown loss {spec!r}{did_you_mean(name, [*NO_ARGUMENT, 'jsd(0.5)'])}")


def _parse_beta(text: str) -> float:
    try:
        beta = float(text)
    except ValueError:
        beta = math.nan
    if not 0 < beta < 1:
        raise UserError(f"jsd({text}): beta lies between 0 and 1; for its ends use fkl (0) or rkl (1)")
    return beta


def _kl_terms(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Terms of KL(a || b) in the form a (e^d - 1 - d) = b - a - a d, d = log b - log a: each is >= 0."""
    a, d = log_a.exp(), log_b - log_a
    near = a * (torch.expm1(d.clamp(-1, 1)) - d.clamp(-1, 1))
    return torch.where(d.abs() < 1, near, log_b.exp() - a - a * d)


NO_ARGUMENT: dict[str, Divergence | None] = {"ce": None, "fkl": fkl, "rkl": rkl}
