"""Divergences between the teacher's distribution p and the student's distribution q, per token.

A divergence D is a function of p and q, [N, A] each. It returns its value, [N], in nats, and its slope, [N, A]. The
slope is q dD/dq. A constant added to dD/dq makes no difference. The gradient of the loss with respect to the student's
logits z follows from the slope s: dD/dz = (s - q sum(s)) / temperature.

The formulas keep values non-negative and exact when p and q nearly agree. The textbook formula
``p (log p - log q)`` would not: in fp32, it loses all digits when the acceptance probability is 0.996.

Shapes: N tokens, A outcomes. The outcomes are all tokens, or k listed tokens and one bucket for all other tokens.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.registry import CROSS_ENTROPY, LOSSES

# below this alpha, -log alpha is continued as a constant, because its gradient has no bound
LOWEST_ALPHA = 1e-5
LARGEST_WEIGHT = 1e6  # a larger weight overflows gradients in float32
SWITCH = 0.2  # share of a run after which ``a -> b`` switches from a to b


@dataclass(frozen=True, slots=True)
class Pair:
    """The teacher's distribution p and the student's distribution q, with their logs, [N, A] each.

    N is the number of tokens, A the number of outcomes.

    alpha: Probability that a sampled draft token is accepted, [N]. It is sum min(p, q), or 1 - total variation
    (Leviathan et al. 2023, corollary 3.6).
    """

    log_p: Tensor
    log_q: Tensor
    p: Tensor
    q: Tensor
    alpha: Tensor

    @classmethod
    def of(cls, log_p: Tensor, log_q: Tensor) -> "Pair":
        p = log_p.exp()
        q = log_q.exp()
        return cls(log_p, log_q, p, q, torch.minimum(p, q).sum(-1))


Divergence = Callable[[Pair], tuple[Tensor, Tensor]]  # value [N] and slope [N, A]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of loss. Some kinds take a number, as in lk(3).

    Attributes:
        make: Function that returns the divergence for this number.
        default: Default of the number. None if the kind takes no number.
        high: Upper bound. The number must be above 0 and below `high`.
    """

    make: Callable[[Any], Divergence]
    default: float | None = None
    high: float = math.inf


def loss(name: str) -> Callable[[Divergence], Divergence]:
    """Return a decorator that registers a divergence as the value `name` of --loss."""

    def decorate(divergence: Divergence) -> Divergence:
        LOSSES.register(name)(Kind(lambda _: divergence))
        return divergence

    return decorate


@loss("fkl")
def fkl(x: Pair) -> tuple[Tensor, Tensor]:
    """Return the forward KL(p || q) = sum p (log p - log q), in [0, inf), and its slope.

    It is the cross-entropy of Hinton et al. 2015 minus the teacher's entropy.
    """
    return kl_terms(x.p, x.q, x.log_q - x.log_p).sum(-1), -x.p


@loss("rkl")
def rkl(x: Pair) -> tuple[Tensor, Tensor]:
    """Return the reverse KL(q || p), in [0, inf), and its slope.

    This loss is mode-seeking (MiniLLM, Gu et al. 2024).
    """
    gap = x.log_p - x.log_q
    return kl_terms(x.q, x.p, gap).sum(-1), -x.q * gap


@loss("tvd")
def tvd(x: Pair) -> tuple[Tensor, Tensor]:
    """Return the total variation 1 - alpha, in [0, 1], and its slope.

    The slope is -q where q < p, 0 where q > p, and -q / 2 where q = p.
    """
    return 1 - x.alpha, -0.5 * x.q * (1 + (x.p - x.q).sign())


@loss("nla")
def nla(x: Pair) -> tuple[Tensor, Tensor]:
    """Return -log alpha, the negative log of the acceptance probability, and its slope (LK losses, 2602.23881)."""
    alpha = x.alpha.clamp_min(LOWEST_ALPHA)
    return -alpha.log(), tvd(x)[1] * ((x.alpha > LOWEST_ALPHA) / alpha).unsqueeze(-1)


def jsd(beta: float) -> Divergence:
    """Return the generalised Jensen-Shannon divergence: beta KL(p || m) + (1 - beta) KL(q || m).

    m is the mixture beta p + (1 - beta) q, so beta is the weight of the teacher, as in GKD (Agarwal et al. 2024, eq.
    1). Values are in [0, H(beta)], where H is the binary entropy, with H(1/2) = ln 2.
    """

    def divergence(x: Pair) -> tuple[Tensor, Tensor]:
        m = torch.lerp(x.q, x.p, beta)
        # if m underflows, so do p and q, and their terms are 0
        log_m = m.clamp_min(torch.finfo(m.dtype).tiny).log()
        gap = log_m - x.log_q
        terms = beta * kl_terms(x.p, m, log_m - x.log_p) + (1 - beta) * kl_terms(x.q, m, gap)
        return terms.sum(-1), (beta - 1) * x.q * gap

    return divergence


def lk(eta: float) -> Divergence:
    """Return the divergence lambda fkl + (1 - lambda) tvd with lambda = exp(-eta alpha) (LK losses, 2602.23881).

    fkl has more weight where acceptance is low, and tvd where acceptance is high. Lambda has no gradient.
    """

    def divergence(x: Pair) -> tuple[Tensor, Tensor]:
        share = (-eta * x.alpha.detach()).exp()
        far, far_slope = fkl(x)
        near, near_slope = tvd(x)
        slope = torch.lerp(near_slope, far_slope, share.unsqueeze(-1))
        return share * far + (1 - share) * near, slope

    return divergence


LOSSES.register("jsd")(Kind(jsd, 0.5, high=1))
LOSSES.register("lk")(Kind(lk, 3.0))


def kl_terms(a: Tensor, b: Tensor, d: Tensor) -> Tensor:
    """Return terms b - a - a d, whose sum is KL(a || b). Each term is at least 0. d is log b - log a.

    b - a is computed as (a + b) tanh(d / 2), which never overflows, and keeps all digits when a and b nearly agree.
    """
    return (a + b) * (d / 2).tanh() - a * d


def log_probs(logits: Tensor, temperature: float, log_total: Tensor | None = None) -> Tensor:
    """Return the log-softmax of logits / temperature over the last axis, in fp32 or fp64.

    log_total: Log of the sum of exp(logits / temperature) over all tokens, [N]. It is needed if `logits` has only some
    of the tokens.
    """
    logits = wide(logits)
    logits = logits if temperature == 1 else logits / temperature
    return torch.log_softmax(logits, dim=-1) if log_total is None else logits - log_total.unsqueeze(-1)


def wide(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged in fp64."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True, slots=True)
class Loss:
    """A weighted sum of divergences and of cross-entropy with the text.

    Attributes:
        terms: Weight and function of each divergence.
        cross_entropy: Weight of the cross-entropy.
        until: Share of the training steps after which the loss `then` applies instead.
    """

    name: str
    terms: tuple[tuple[float, Divergence], ...]
    cross_entropy: float = 0.0
    until: float = 1.0
    then: "Loss | None" = None

    @property
    def needs_teacher(self) -> bool:
        return bool(self.terms) or (self.then is not None and self.then.needs_teacher)

    def at(self, progress: float) -> "Loss":
        """Return the loss that applies now. progress: Share of the training steps that are done, in [0, 1]."""
        return self if self.then is None or progress < self.until else self.then.at(progress)

    def divergence(self, x: Pair) -> tuple[Tensor, Tensor]:
        """Return the value, [N], and the slope, [N, A], of the weighted sum of divergences, without cross-entropy."""
        if not self.terms:
            return torch.zeros_like(x.log_q[..., 0]), torch.zeros_like(x.log_q)
        parts = [(weight, *divergence(x)) for weight, divergence in self.terms]
        value = torch.stack([weight * value for weight, value, _ in parts]).sum(0)
        return value, reduce(torch.add, [slope if weight == 1 else weight * slope for weight, _, slope in parts])


def parse_loss(spec: str) -> Loss:
    """Parse ``fkl``, ``jsd(0.5)``, ``0.9*fkl + 0.1*ce``, or a schedule: ``fkl -> lk(3)``, ``fkl@0.5 -> tvd``.

    Raises:
        UserError: A name is unknown, or a number is out of its range.
    """
    *earlier, last = spec.split("->")
    text, _, share = last.partition("@")
    if share:
        raise UserError(f"loss {spec!r}: the last loss applies until the end of training; leave out @{share.strip()}")
    parsed = _phase(text)
    for phase in reversed(earlier):
        text, _, share = phase.partition("@")
        until = _number(share, f"loss {spec!r}: @", 1) if share else SWITCH
        parsed = _phase(text, until, parsed)
    return parsed


def _phase(text: str, until: float = 1.0, then: Loss | None = None) -> Loss:
    terms = []
    ce = 0.0
    for part in text.split("+"):
        factor, star, name = part.rpartition("*")
        where = f"weight of the loss {name.strip()!r}: "
        weight = _number(factor, where, LARGEST_WEIGHT) if star else 1.0
        name = name.strip().lower()
        if name == CROSS_ENTROPY:
            ce += weight
        else:
            terms.append((weight, _divergence(name)))
    return Loss(text.strip(), tuple(terms), ce, until, then)


def _divergence(name: str) -> Divergence:
    """Parse NAME or NAME(ARGUMENT), and return the divergence."""
    match = re.fullmatch(r"([a-z_]+)(?:\(([^()]*)\))?", name)
    stem, argument = (match[1], match[2]) if match else (name, None)
    kind: Kind = LOSSES.get(stem, f"loss {name!r}")
    if argument is None:
        return kind.make(kind.default)
    if kind.default is None:
        raise UserError(f"loss {name!r}: {stem} has no parameter; write {stem}")
    return kind.make(_number(argument, f"loss {name!r}: ", kind.high))


def _number(text: str, what: str, high: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < high:
        raise UserError(f"{what}{text.strip()!r} must be a number above 0 and below {high:g}")
    return value
