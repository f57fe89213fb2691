"""Divergences between the teacher's distribution p and the student's q, per token: the readable reference.

N tokens, A atoms: the vocabulary, or k tokens and one bucket for the rest. Everything takes log-probabilities [N, A].
Values are [N] in nats, written so that they stay non-negative and exact when p and q nearly agree, where the textbook
sum cancels (``p (log p - log q)`` loses all digits in fp32 at an acceptance of 0.996). Slopes are q h [N, A] with
h = dD/dq up to a constant; with them every loss has one gradient with respect to the student's logits z:
dD/dz = (q h - q sum(q h)) / temperature.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.errors import UserError, did_you_mean

Function = Callable[[Tensor, Tensor], Tensor]
LOWEST_ALPHA = 1e-5  # below it -log alpha is flat: its gradient would have no bound
SWITCH = 0.2  # share of a run after which ``a -> b`` goes from a to b


@dataclass(frozen=True, slots=True)
class Divergence:
    """value(log_p, log_q) -> [N] in nats, and slope(log_p, log_q) -> q dD/dq [N, A]."""

    value: Function
    slope: Function


def _fkl_slope(log_p: Tensor, log_q: Tensor) -> Tensor:
    return -log_p.exp()


def _tvd_value(log_p: Tensor, log_q: Tensor) -> Tensor:
    return 1 - acceptance(log_p, log_q)


def _tvd_slope(log_p: Tensor, log_q: Tensor) -> Tensor:
    """With a half where both are equal, so that p = q has no gradient."""
    below = (log_q < log_p).to(log_q) + 0.5 * (log_q == log_p).to(log_q)
    return -log_q.exp() * below


# Forward KL(p || q) = sum p (log p - log q), in [0, inf). Hinton et al. 2015, less the teacher's entropy.
FKL = Divergence(lambda log_p, log_q: kl_terms(log_p, log_q).sum(-1), _fkl_slope)

# Reverse KL(q || p), in [0, inf). Mode-seeking; Gu et al. 2024 (MiniLLM).
RKL = Divergence(
    lambda log_p, log_q: kl_terms(log_q, log_p).sum(-1), lambda log_p, log_q: log_q.exp() * (log_q - log_p)
)

# Total variation, 1 - alpha, in [0, 1].
TVD = Divergence(_tvd_value, _tvd_slope)


def jsd(beta: float) -> Divergence:
    """Generalised Jensen-Shannon: beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q.

    In [0, H(beta)], ln 2 at one half. beta weighs the teacher, as in GKD (Agarwal et al. 2024, eq. 1).
    """

    def mixed(log_p: Tensor, log_q: Tensor) -> Tensor:
        return torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))

    def value(log_p: Tensor, log_q: Tensor) -> Tensor:
        log_m = mixed(log_p, log_q)
        return (beta * kl_terms(log_p, log_m) + (1 - beta) * kl_terms(log_q, log_m)).sum(-1)

    def slope(log_p: Tensor, log_q: Tensor) -> Tensor:
        return (1 - beta) * log_q.exp() * (log_q - mixed(log_p, log_q))

    return Divergence(value, slope)


def _nla() -> Divergence:
    """-log alpha, in [0, inf): the negative log of the chance to be accepted (LK losses, 2602.23881)."""

    def value(log_p: Tensor, log_q: Tensor) -> Tensor:
        return -acceptance(log_p, log_q).clamp_min(LOWEST_ALPHA).log()

    def slope(log_p: Tensor, log_q: Tensor) -> Tensor:
        alpha = acceptance(log_p, log_q).unsqueeze(-1)
        return _tvd_slope(log_p, log_q) * torch.where(alpha > LOWEST_ALPHA, 1 / alpha.clamp_min(LOWEST_ALPHA), 0.0)

    return Divergence(value, slope)


NLA = _nla()


def lk(eta: float) -> Divergence:
    """lambda FKL + (1 - lambda) TVD with lambda = exp(-eta alpha), held constant in the gradient (2602.23881).

    Forward KL where the draft is far off, total variation where it is near.
    """

    def share(log_p: Tensor, log_q: Tensor) -> Tensor:
        return (-eta * acceptance(log_p, log_q).detach()).exp()

    def value(log_p: Tensor, log_q: Tensor) -> Tensor:
        part = share(log_p, log_q)
        return part * FKL.value(log_p, log_q) + (1 - part) * TVD.value(log_p, log_q)

    def slope(log_p: Tensor, log_q: Tensor) -> Tensor:
        part = share(log_p, log_q).unsqueeze(-1)
        return part * _fkl_slope(log_p, log_q) + (1 - part) * _tvd_slope(log_p, log_q)

    return Divergence(value, slope)


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """alpha = sum min(p, q) = 1 - total variation: the chance that a sampled draft token is accepted.

    Leviathan et al. 2023, corollary 3.6. In [0, 1].
    """
    return torch.minimum(log_p, log_q).exp().sum(-1)


def log_probs(logits: Tensor, temperature: float) -> Tensor:
    """log-softmax of logits / temperature over the last axis, in fp32 at least."""
    logits = wide(logits)
    return torch.log_softmax(logits if temperature == 1 else logits / temperature, dim=-1)


def wide(x: Tensor) -> Tensor:
    """fp32, or fp64 where it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def kl_terms(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Terms of KL(a || b) in the form a (e^d - 1 - d) = b - a - a d, d = log b - log a: each is >= 0."""
    a, d = log_a.exp(), log_b - log_a
    near = a * (torch.expm1(d.clamp(-1, 1)) - d.clamp(-1, 1))
    return torch.where(d.abs() < 1, near, log_b.exp() - a - a * d)


@dataclass(frozen=True, slots=True)
class Loss:
    """A weighted sum of divergences and of cross-entropy with the text, and what it becomes later in the run."""

    name: str
    terms: tuple[tuple[float, Divergence], ...]
    cross_entropy: float = 0.0
    until: float = 1.0  # share of the run
    then: "Loss | None" = None

    @property
    def needs_teacher(self) -> bool:
        return bool(self.terms) or (self.then is not None and self.then.needs_teacher)

    def at(self, progress: float) -> "Loss":
        """The loss that holds at a share of the run."""
        return self if self.then is None or progress < self.until else self.then.at(progress)

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """[N], without cross-entropy."""
        return sum((w * d.value(log_p, log_q) for w, d in self.terms), torch.zeros(log_q.shape[:-1]).to(log_q))

    def slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """q dD/dq [N, A], without cross-entropy."""
        parts = [d.slope(log_p, log_q) if w == 1 else w * d.slope(log_p, log_q) for w, d in self.terms]
        return sum(parts[1:], parts[0])


def parse_loss(spec: str) -> Loss:
    """``fkl``, ``jsd(0.5)``, ``0.9*fkl + 0.1*ce``, or a schedule: ``fkl -> lk(3)``, ``fkl@0.5 -> tvd``.

    Raises:
        UserError: an unknown name, or a number out of its range.
    """
    later: Loss | None = None
    phases = spec.split("->")
    for number, phase in reversed(list(enumerate(phases))):
        text, _, share = phase.partition("@")
        last = number == len(phases) - 1
        if share and last:
            raise UserError(f"loss {spec!r}: the last phase goes to the end; leave out @{share.strip()}")
        until = 1.0 if last else _number(share, f"loss {spec!r}: @", 0, 1) if share else SWITCH
        later = _phase(text, until, later)
    assert later is not None
    return later


def _phase(text: str, until: float, then: Loss | None) -> Loss:
    terms, ce = [], 0.0
    for part in text.split("+"):
        factor, star, name = part.rpartition("*")
        weight = _number(factor, f"weight of {name.strip()!r}: ", 0, math.inf) if star else 1.0
        divergence = _divergence(name.strip().lower())
        if divergence is None:
            ce += weight
        else:
            terms.append((weight, divergence))
    return Loss(text.strip(), tuple(terms), ce, until, then)


def _divergence(name: str) -> Divergence | None:
    match = re.fullmatch(r"([a-z]+)(?:\(([^()]*)\))?", name)
    stem, argument = (match[1], match[2]) if match else (name, None)
    if stem in PLAIN and argument is None:
        return PLAIN[stem]
    if stem == "jsd":
        beta = _number(argument or "0.5", "for its ends use fkl (0) or rkl (1); jsd: beta ", 0, 1)
        return jsd(beta)
    if stem == "lk":
        return lk(_number(argument or "3", "lk: eta ", 0, math.inf))
    raise UserError(f"unknown loss {name!r}{did_you_mean(stem, [*PLAIN, 'jsd(0.5)', 'lk(3)'])}")


def _number(text: str, what: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low < value < high:
        raise UserError(
            f"{what}{text.strip()!r} is not a number above {low:g}"
            + (f" and below {high:g}" if high < math.inf else "")
        )
    return value


PLAIN: dict[str, Divergence | None] = {"ce": None, "fkl": FKL, "rkl": RKL, "tvd": TVD, "nla": NLA}
