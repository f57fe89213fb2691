"""Loss and gradients in one pass, a chunk of tokens at a time, so that logits of all tokens never exist at once.

N tokens, c tokens in a chunk, b tokens in a block, D hidden, V vocab, k listed tokens. The forward pass computes the
gradients with respect to hidden states and head (as Liger's fused linear losses, 2410.10989) by the rule of losses.py.
The backward pass only scales these gradients. The teacher's head is applied once per token. Heads are applied to a
chunk. The loss goes through a chunk in blocks that fit the processor's cache, and overwrites logits with gradients.

A student with a trimmed head has S of the V logits. The teacher's distribution is not renormalised over these S ids.
Acceptance is then the same as in the engine, which never accepts a lost id (an id outside the head). An additional
column, whose probability rounds to 0, stands for all lost ids. No gradient goes through this column. The losses are
then divergences of measures whose mass is less than 1: fkl leaves out the infinite part, p log p / q of the lost ids,
and counts their p; all other losses are exact, up to a constant. Cross-entropy leaves out tokens that the head lacks.
If the teacher lists k tokens, the bucket for all tokens that are not listed includes lost ids.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftlab.model.devices import exact_dtype
from draftlab.model.trimmed_head import TrimmedHead
from draftlab.training.losses import Loss, Pair, log_probs, wide

CPU_BUDGET, BUDGET = (
    128 << 20,
    1 << 30,
)  # bytes of fp32 logits in a chunk, for student and teacher together
CPU_ROWS, ROWS = (
    512,
    4096,
)  # most rows of a chunk, by device; more rows do not speed up matrix products
CPU_BLOCK, BLOCK = 1 << 19, 1 << 27  # bytes of an fp32 tensor [b, V]; about ten exist at a time
LOST = -80.0  # log-probability of lost ids and of an empty bucket
# rows that are added at a time to the head's gradient on a CPU, if the gradient has a wider dtype than the head
SLICE = 512


@dataclass(frozen=True, slots=True)
class Dense:
    """Distributions over all ids, as hidden states [N, D] and head [V, D], or as logits [N, V] without a head.

    rows: If tokens share distributions, the row of each token in `hidden`, ascending, [tokens]. log_total: If the
    teacher's logits are only those of a trimmed student's S ids, the log-normalisers over all ids at the loss's
    temperature, [N].
    """

    hidden: Tensor
    head: Tensor | None
    rows: Tensor | None = None
    log_total: Tensor | None = None

    @property
    def vocab(self) -> int:
        return self.hidden.shape[1] if self.head is None else self.head.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the logits."""
        return self.hidden.dtype if self.head is None else self.head.dtype

    def buffer(self, rows: int) -> Tensor:
        """Return an empty tensor for the logits of `rows` tokens, [rows, V]."""
        return self.hidden.new_empty(rows, self.vocab, dtype=self.dtype)

    def logits(self, rows: slice, buffer: Tensor | None = None) -> Tensor:
        """Return logits [c, V]. A head writes its logits into the buffer, if there is one."""
        if self.rows is None:
            return self._product(self.hidden[rows], buffer)
        distinct, of_token = self.rows[rows].unique_consecutive(return_inverse=True)
        return self._product(self.hidden[distinct], buffer)[of_token]

    def _product(self, hidden: Tensor, buffer: Tensor | None) -> Tensor:
        if self.head is None:
            return hidden
        return torch.mm(
            hidden.to(self.dtype),
            self.head.T,
            out=None if buffer is None else buffer[: len(hidden)],
        )

    def total(self, tokens: slice) -> Tensor | None:
        """Return the log-normalisers of some tokens, or None without log_total."""
        if self.log_total is None:
            return None
        return self.log_total[tokens if self.rows is None else self.rows[tokens]]


@dataclass(frozen=True, slots=True)
class TopK:
    """A teacher's k most probable tokens and the log mass of all other tokens: ids [N, k], log_p [N, k], tail [N]."""

    ids: Tensor
    log_p: Tensor
    tail: Tensor

    def __getitem__(self, rows: slice | Tensor) -> "TopK":
        return TopK(self.ids[rows], self.log_p[rows], self.tail[rows])


Teacher = Dense | TopK | None
# token slice, values and gradient of a chunk: see _chunks
Chunk = tuple[slice, Tensor, Tensor]
Chunks = Callable[[Dense], Iterator[Chunk]]


def chosen(teacher: Teacher, counted: Tensor, places: Tensor) -> Teacher:
    """Return a teacher's distributions at `places`, some of its `counted` positions. Places ascend, and may repeat."""
    rows = torch.searchsorted(counted, places)
    if isinstance(teacher, Dense):
        return replace(teacher, rows=rows)
    return None if teacher is None else teacher[rows]


class Sums(NamedTuple):
    """Weighted sums over tokens. Only objective carries a gradient.

    acceptance is exact for distributions over all ids. From k tokens and a tail, acceptance is a lower bound and
    acceptance + slack an upper bound. slack: The smaller tail mass of student and teacher.
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
    budget: int | None = None,
    trimmed: TrimmedHead | None = None,
) -> Sums:
    """Return weighted sums over tokens of the loss and of the reported values. Only one backward pass is possible.

    Args:
        hidden: Input of the head, [N, D], or logits [N, V] without a head.
        head: [V, D], or [S, D] if trimmed.     labels: Next tokens, [N].     weights: [N].
        temperature: Temperature of p and q in the divergence, but not in cross-entropy.
        trimmed: Ids of the student's logits. None for a student with all ids.
    """

    def chunks(student: Dense) -> Iterator[Chunk]:
        return _chunks(
            student, labels, weights, teacher, _Objective(loss, temperature, trimmed), budget
        )

    sums = _Fused.apply(hidden, head, weights, chunks, torch.is_grad_enabled())
    return Sums(sums[0], *sums.detach()[1:])


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor | None,
        weights: Tensor,
        chunks: Chunks,
        with_gradient: bool,
    ) -> Tensor:
        student, exact = _cast(hidden, head), torch.promote_types(hidden.dtype, torch.float32)
        sums = torch.zeros(5, dtype=exact_dtype(hidden.device), device=hidden.device)
        d_hidden = d_head = None
        if with_gradient and ctx.needs_input_grad[0]:
            d_hidden = torch.empty_like(hidden)
        if with_gradient and ctx.needs_input_grad[1] and head is not None:
            d_head = torch.zeros_like(head, dtype=exact)
        for rows, values, gradient in chunks(student):
            sums += (values * weights[rows]).sum(1)
            if d_hidden is not None:
                d_hidden[rows] = gradient if student.head is None else gradient @ student.head
            if d_head is not None:
                states = hidden[rows].to(student.dtype)
                if d_head.dtype == states.dtype:
                    d_head.addmm_(gradient.T, states)
                # CUDA's addmm with fp32 output would save 2 %, but adds to an fp32 sum only from torch 2.10 on
                else:
                    for part in _slices(len(d_head), SLICE if _on_cpu(d_head) else len(d_head)):
                        d_head[part].add_(gradient[:, part].T @ states)
        ctx.save_for_backward(d_hidden, d_head)
        return sums.to(exact)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale = upstream[0][0]
        # in place, because the head's gradient is large
        scaled = [None if g is None else g.mul_(scale) for g in ctx.saved_tensors]
        return (*scaled, None, None, None)


def _cast(hidden: Tensor, head: Tensor | None) -> Dense:
    """Return the student's distributions, with its head in the dtype of autocast."""
    device = hidden.device.type
    if (
        head is not None
        and torch.amp.is_autocast_available(device)
        and torch.is_autocast_enabled(device)
    ):
        head = head.to(torch.get_autocast_dtype(device))
    return Dense(hidden, head)


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _chunks(
    student: Dense,
    labels: Tensor,
    weights: Tensor,
    teacher: Teacher,
    objective: "_Objective",
    budget: int | None,
) -> Iterator[Chunk]:
    """Yield each chunk's token slice, its values [5, c], and the gradient of the weighted loss by its logits [c, V].

    All chunks share the memory of the gradient.
    """
    total, on_cpu = len(student.hidden), _on_cpu(student.hidden)
    budget = budget or (CPU_BUDGET if on_cpu else BUDGET)
    chunk = max(1, min(CPU_ROWS if on_cpu else ROWS, budget // (2 * 4 * student.vocab)))
    block = max(1, (CPU_BLOCK if on_cpu else BLOCK) // (4 * student.vocab))
    gradient = student.buffer(min(total, chunk))
    buffer = teacher.buffer(min(total, chunk)) if isinstance(teacher, Dense) else None
    for rows in _slices(total, chunk):
        z = student.logits(rows, gradient)
        listed = teacher[rows] if isinstance(teacher, TopK) else None
        y = teacher.logits(rows, buffer) if isinstance(teacher, Dense) else listed
        values = torch.empty(5, len(z), dtype=exact_dtype(z.device), device=z.device)
        for part in _slices(len(z), block):
            tokens = slice(rows.start + part.start, rows.start + part.stop)
            own = teacher.total(tokens) if isinstance(teacher, Dense) else None
            values[:, part], slope = objective.block(
                z[part], labels[tokens], None if y is None else y[part], own
            )
            torch.mul(slope, weights[tokens].unsqueeze(1), out=gradient[part])
        yield rows, values, gradient[: len(z)]


@dataclass(frozen=True, slots=True)
class _Objective:
    loss: Loss
    temperature: float
    trimmed: TrimmedHead | None

    def block(
        self, z: Tensor, labels: Tensor, teacher: Tensor | TopK | None, log_total: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return values [5, b] of tokens with logits z [b, V], and the gradient of each token's loss by z, [b, V].

        log_total: Same as in Dense.
        """
        loss, temperature = self.loss, self.temperature
        log_q1, labels = self._with_lost(log_probs(z, 1)), self._rows(labels).unsqueeze(1)
        ce = -log_q1.gather(1, labels).squeeze(1)
        if self.trimmed is not None:
            ce = torch.where(labels.squeeze(1) < z.shape[1], ce, 0.0)
        if teacher is None:
            objective, gradient = torch.zeros_like(ce), torch.zeros_like(log_q1)
            watched = [objective] * 3
        else:
            log_q = log_q1 if temperature == 1 else self._with_lost(log_probs(z, temperature))
            if isinstance(teacher, TopK):
                objective, watched, gradient = self._listed(log_q, teacher)
            else:
                log_p, whole = log_probs(teacher, temperature, log_total), log_total is None
                objective, watched, gradient = self._dense(log_q, log_p, whole)
            gradient = gradient if temperature == 1 else gradient.div_(temperature)
        if loss.cross_entropy:
            counted = (labels < z.shape[1]).to(log_q1)  # [b, 1]
            gradient.add_(log_q1.exp().mul_(counted), alpha=loss.cross_entropy)
            gradient.scatter_add_(1, labels, counted * -loss.cross_entropy)
        values = torch.stack([objective + loss.cross_entropy * ce, ce, *watched])
        return values, gradient[:, : z.shape[1]]

    def _dense(
        self, log_q: Tensor, log_p: Tensor, whole: bool
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return the divergence, [acceptance, slack, agreement] and the gradient.

        whole: Whether log_p covers all ids of the teacher; else log_p covers only the ids of a trimmed head.
        """
        top = log_p.max(-1, keepdim=True).indices
        if whole and self.trimmed is not None:
            top, log_p = self._rows(top), log_p.index_select(1, self.trimmed.ids)
        x = Pair.of(self._with_lost(log_p), log_q)
        value, slope = self.loss.divergence(x)
        gradient = slope.addcmul_(x.q, slope.sum(-1, keepdim=True), value=-1)
        return value, [x.alpha, torch.zeros_like(x.alpha), _tops(log_q, top)], gradient

    def _listed(self, log_q: Tensor, teacher: TopK) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return what _dense returns, for k listed tokens and a bucket.

        The bucket's slope is split over its tokens by their q.
        """
        ids, q, listed = self._rows(teacher.ids), log_q.exp(), teacher.log_p
        if self.trimmed is not None:
            listed = torch.where(ids < len(self.trimmed.ids), listed, LOST)
        log_p = wide(torch.cat([listed, teacher.tail.unsqueeze(1)], 1))  # [b, k + 1]
        rest = q.scatter_(1, ids, 0.0)
        # the log of an empty bucket is not finite
        tail = rest.sum(-1, keepdim=True).log().clamp_min(LOST)
        x = Pair.of(log_p, torch.cat([log_q.gather(1, ids), tail], 1))
        value, slope = self.loss.divergence(x)
        total = slope.sum(-1, keepdim=True)
        gradient = rest.mul_(slope[:, -1:] / x.q[:, -1:] - total)
        gradient.scatter_(1, ids, slope[:, :-1] - x.q[:, :-1] * total)
        slack = torch.minimum(x.p, x.q)[:, -1]
        top = ids.gather(1, teacher.log_p.argmax(-1, keepdim=True))
        return value, [x.alpha - slack, slack, _tops(log_q, top)], gradient

    def _rows(self, ids: Tensor) -> Tensor:
        """Return the column of each id in the student's logits; S for ids that a trimmed head lacks."""
        return ids if self.trimmed is None else self.trimmed.rows[ids]

    def _with_lost(self, log_probs: Tensor) -> Tensor:
        """Append a column for all ids that a trimmed head lacks, [b, S + 1]."""
        return log_probs if self.trimmed is None else pad(log_probs, (0, 1), value=LOST)


def _tops(log_q: Tensor, ids: Tensor) -> Tensor:
    """Return 1 where ids [b, 1] are the student's most probable tokens, else 0: [b]."""
    return (log_q.gather(1, ids).squeeze(1) == log_q.amax(-1)).to(log_q)
