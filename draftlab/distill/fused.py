"""Loss and gradients together, a chunk of tokens at a time, so that logits of all tokens never exist at once.

N tokens, c of them in a chunk, D hidden, V vocab, k listed tokens. Gradients with respect to hidden states and head
are made in the forward pass (the idea of Liger's fused linear losses, 2410.10989) by the one rule of losses.py; the
backward pass multiplies them by what comes from above. The teacher's head is applied once per token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftlab.distill.losses import Loss, acceptance, log_probs, wide

BUDGET = 128_000_000  # bytes of a chunk's buffers
BUFFERS = 10  # fp32 [c, V] buffers that live at once


@dataclass(frozen=True, slots=True)
class Dense:
    """A teacher's whole distribution: hidden [N, D] and head [V, D]; or logits [N, V] and no head."""

    hidden: Tensor
    head: Tensor | None

    def log_probs(self, rows: slice, temperature: float) -> Tensor:
        found = self.hidden[rows]
        return log_probs(found if self.head is None else found @ self.head.T, temperature)


@dataclass(frozen=True, slots=True)
class TopK:
    """A teacher's k most probable tokens and the mass of all others: ids [N, k], log_p [N, k], tail [N], log."""

    ids: Tensor
    log_p: Tensor
    tail: Tensor


Teacher = Dense | TopK | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums over tokens by their weights. Only objective carries a gradient.

    acceptance is exact for a whole distribution; from k tokens and a tail it is the lower end of what it can be, and
    slack what it may be more (the tail's smaller mass).
    """

    objective: Tensor
    cross_entropy: Tensor
    acceptance: Tensor
    slack: Tensor
    agreement: Tensor


def fused_loss(
    hidden: Tensor,
    head: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    teacher: Teacher,
    loss: Loss,
    temperature: float,
    budget: int = BUDGET,
) -> Sums:
    """Weighted sums over tokens of the loss and of what it is watched by.

    Args:
        hidden: what enters the head, [N, D]; with no head, logits [N, V].
        head: [V, D].     labels: next tokens, [N].     weights: [N].
        temperature: softens p and q in the divergence, not in cross-entropy.
    """
    sums = _Fused.apply(hidden, head, labels, weights, teacher, loss, temperature, budget, torch.is_grad_enabled())
    objective, (ce, alpha, slack, agreement) = sums[0], sums.detach()[1:].unbind()
    return Sums(objective=objective, cross_entropy=ce, acceptance=alpha, slack=slack, agreement=agreement)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor | None,
        labels: Tensor,
        weights: Tensor,
        teacher: Teacher,
        loss: Loss,
        temperature: float,
        budget: int,
        with_gradient: bool,
    ) -> Tensor:
        vocab = hidden.shape[1] if head is None else head.shape[0]
        chunk = max(1, budget // (4 * BUFFERS * vocab))
        sums = torch.zeros(5, dtype=torch.float64, device=hidden.device)
        needs = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if with_gradient and needs[0] else None
        d_head = None
        if with_gradient and head is not None and needs[1]:
            d_head = torch.zeros_like(wide(head))
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            z = hidden[rows] if head is None else hidden[rows] @ head.T
            part, gradient = _chunk(wide(z), labels[rows], weights[rows], teacher, rows, loss, temperature)
            sums += part
            if d_head is not None:
                d_head += gradient.T.to(z.dtype) @ hidden[rows].to(z.dtype)
            if d_hidden is not None:
                d_hidden[rows] = gradient if head is None else gradient.to(z.dtype) @ head.to(z.dtype)
        ctx.gradients = d_hidden, None if d_head is None or head is None else d_head.to(head.dtype)
        return wide(sums.to(hidden.dtype))

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = ctx.gradients
        scale = above[0][0]
        scaled = [None if g is None else g * scale for g in (d_hidden, d_head)]
        return (*scaled, None, None, None, None, None, None, None)


def _chunk(
    z: Tensor, labels: Tensor, weights: Tensor, teacher: Teacher, rows: slice, loss: Loss, temperature: float
) -> tuple[Tensor, Tensor]:
    """Sums [5] of a chunk with logits z [c, V], and the gradient of the objective with respect to z."""
    log_q1 = log_probs(z, 1)
    labels = labels.unsqueeze(1)
    ce = -log_q1.gather(1, labels).squeeze(1)
    if teacher is None or not loss.terms:
        values = [loss.cross_entropy * ce, ce, *[torch.zeros_like(ce)] * 3]
        gradient = torch.zeros_like(z)
    else:
        log_q = log_q1 if temperature == 1 else log_probs(z, temperature)
        divergence = _dense if isinstance(teacher, Dense) else _listed
        objective, watched, gradient = divergence(log_q, teacher, rows, loss, temperature)  # type: ignore[arg-type]
        values = [objective + loss.cross_entropy * ce, ce, *watched]
    if loss.cross_entropy:
        gradient += loss.cross_entropy * log_q1.exp()
        gradient.scatter_add_(1, labels, torch.full_like(ce, -loss.cross_entropy).unsqueeze(1))
    gradient *= weights.unsqueeze(1)
    return (torch.stack(values).double() * weights).sum(1), gradient


def _dense(
    log_q: Tensor, teacher: Dense, rows: slice, loss: Loss, temperature: float
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Value, [acceptance, slack, agreement], and gradient, with all of the teacher's distribution."""
    log_p = teacher.log_probs(rows, temperature)
    alpha = acceptance(log_p, log_q)
    agree = (log_p.argmax(-1) == log_q.argmax(-1)).float()
    slope = loss.slope(log_p, log_q)
    gradient = (slope - log_q.exp() * slope.sum(-1, keepdim=True)) / temperature
    return loss.value(log_p, log_q), [alpha, torch.zeros_like(alpha), agree], gradient


def _listed(
    log_q: Tensor, teacher: TopK, rows: slice, loss: Loss, temperature: float
) -> tuple[Tensor, list[Tensor], Tensor]:
    """The same with k tokens and a bucket as atoms; every token in the bucket gets the bucket's slope by its share."""
    ids = teacher.ids[rows]
    log_p = wide(torch.cat([teacher.log_p[rows], teacher.tail[rows].unsqueeze(1)], 1))  # [c, k + 1]
    rest = log_q.scatter(1, ids, -torch.inf)
    tail = torch.logsumexp(rest, -1, keepdim=True).clamp_min(-80.0)  # an empty bucket would have no finite log
    atoms = torch.cat([log_q.gather(1, ids), tail], 1)
    shared = torch.minimum(log_p, atoms).exp()
    slope = loss.slope(log_p, atoms)
    gradient = (rest - tail).exp() * slope[:, -1:]  # 0 at the listed tokens
    gradient.scatter_(1, ids, slope[:, :-1])
    gradient = (gradient - log_q.exp() * slope.sum(-1, keepdim=True)) / temperature
    agree = (ids.gather(1, log_p[:, :-1].argmax(-1, keepdim=True)).squeeze(1) == log_q.argmax(-1)).float()
    return loss.value(log_p, atoms), [shared[:, :-1].sum(-1), shared[:, -1], agree], gradient
