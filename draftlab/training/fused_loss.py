"""Loss and gradients in one pass, a chunk of tokens at a time, so that logits of all tokens never exist at once.

The forward pass also computes the gradients of hidden states and head, by the rule of losses.py. The backward pass only
scales them, as in Liger's fused linear losses (2410.10989). Heads are applied to a chunk of tokens at a time, and the
teacher's head only once per token. The loss goes through a chunk in blocks of tokens that fit in the processor's cache,
and overwrites the logits with their gradients.

A student with a trimmed head has only S of the V logits. An id outside the head is called a lost id. The teacher's
distribution is not renormalised over the S ids, so acceptance is the same as in the engine, where lost ids are never
drafted. One more column, whose probability rounds to 0, stands for all lost ids, and gets no gradient. The teacher's
distribution then sums to less than 1 over the S ids. The loss fkl would be infinite, so it leaves out p log(p / q) of
lost ids. All other divergences are exact, up to a constant. Cross-entropy leaves out lost ids.

A teacher may list only its k most probable tokens. All other tokens, lost ids included, then form one bucket.

Shapes: N tokens, c tokens in a chunk, b tokens in a block, D hidden, V vocab, S ids of a trimmed head, k listed tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftlab.model.devices import exact_dtype
from draftlab.model.trimmed_head import TrimmedHead
from draftlab.training.losses import Loss, Pair, log_probs, wide

# most bytes of fp32 logits in a chunk, for student and teacher together
CPU_BUDGET = 128 << 20
BUDGET = 1 << 30
# most rows of a chunk, by device; more rows do not speed up matrix products
CPU_ROWS = 512
ROWS = 4096
# bytes of an fp32 tensor [b, V]; about ten exist at a time
CPU_BLOCK = 1 << 19
BLOCK = 1 << 27
LOST = -80.0  # log-probability of lost ids and of an empty bucket
# rows that are added at a time to the head's gradient on a CPU, if the gradient has a wider dtype than the head
SLICE = 512


@dataclass(frozen=True, slots=True)
class Dense:
    """Distributions over all token ids, or over the S ids of a trimmed head, stored as hidden states and head.

    Attributes:
        hidden: Hidden states, [N, D], or logits, [N, V], if there is no head.
        head: Weight of the head, [V, D].
        rows: Row of `hidden` for each token, ascending, if several tokens share a distribution.
        log_total: Log of the sum of exp(logits / temperature) over all ids, [N]. Needed if the logits cover only S ids.
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

    @property
    def nbytes(self) -> int:
        """Return the bytes of the hidden states, or of the logits if there is no head."""
        return self.hidden.nbytes

    def buffer(self, rows: int) -> Tensor:
        """Return an empty tensor for the logits of `rows` tokens, [rows, V]."""
        return self.hidden.new_empty(rows, self.vocab, dtype=self.dtype)

    def logits(self, rows: slice, buffer: Tensor | None = None) -> Tensor:
        """Return the logits of a slice of c tokens, [c, V].

        buffer: Tensor to which the product of hidden states and head is written. None makes a new tensor.
        """
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
        """Return log_total of a slice of c tokens, [c], or None if there is no log_total."""
        if self.log_total is None:
            return None
        return self.log_total[tokens if self.rows is None else self.rows[tokens]]


@dataclass(frozen=True, slots=True)
class TopK:
    """A teacher's k most probable tokens: ids and log-probabilities, [N, k] each.

    tail: Log-probability of all other tokens together, [N].
    """

    ids: Tensor
    log_p: Tensor
    tail: Tensor

    def __getitem__(self, rows: slice | Tensor) -> "TopK":
        return TopK(self.ids[rows], self.log_p[rows], self.tail[rows])

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.log_p.nbytes + self.tail.nbytes

    def to(self, device: torch.device) -> "TopK":
        return TopK(self.ids.to(device), self.log_p.to(device), self.tail.to(device))


Teacher = Dense | TopK | None


def chosen(teacher: Teacher, counted: Tensor, places: Tensor) -> Teacher:
    """Return a teacher's distributions at chosen positions.

    Args:
        counted: Positions of the teacher's distributions, ascending.
        places: Positions to return, ascending. All are in `counted`, and they may repeat.
    """
    rows = torch.searchsorted(counted, places)
    if isinstance(teacher, Dense):
        return replace(teacher, rows=rows)
    return None if teacher is None else teacher[rows]


class Sums(NamedTuple):
    """Weighted sums over tokens. Only `objective` has a gradient.

    Attributes:
        objective: The loss.
        cross_entropy: Cross-entropy with the text in nats.
        acceptance: Acceptance probability, sum min(p, q), with p of the teacher and q of the student. If the teacher
            lists only k tokens, it is a lower bound.
        slack: Most by which the true acceptance can exceed this bound. It is 0 if the teacher covers all ids.
        agreement: 1 for each token at which student and teacher have the same argmax.
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
    """Return weighted sums of the loss and of metrics over tokens. Only one backward pass is possible.

    Args:
        hidden: Input of the student's head, [N, D], or logits, [N, V], if `head` is None.
        head: The student's head, [V, D], or [S, D] if it is trimmed to S ids.
        labels: Next tokens, [N].     weights: Weight of each token, [N].
        temperature: Temperature of both distributions in the divergence, but not in cross-entropy.
        budget: Bytes of logits in memory at a time. None uses the default of the device.
        trimmed: The student's trimmed head. None if the student's logits cover all ids.
    """
    objective = _Objective(labels, weights, teacher, loss, temperature, budget, trimmed)
    sums = _Fused.apply(hidden, head, objective, torch.is_grad_enabled())
    return Sums(sums[0], *sums.detach()[1:])


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor | None, objective: "_Objective", with_gradient: bool) -> Tensor:
        student = _cast(hidden, head)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        sums = torch.zeros(5, dtype=exact_dtype(hidden.device), device=hidden.device)
        d_hidden = d_head = None
        if with_gradient and ctx.needs_input_grad[0]:
            d_hidden = torch.empty_like(hidden)
        if with_gradient and ctx.needs_input_grad[1] and head is not None:
            d_head = torch.zeros_like(head, dtype=exact)
        for rows, values, gradient in objective.chunks(student):
            sums += (values * objective.weights[rows]).sum(1)
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
        return (*scaled, None, None)


def _cast(hidden: Tensor, head: Tensor | None) -> Dense:
    """Return the student's distributions. Under autocast, the head is cast to the dtype of autocast."""
    device = hidden.device.type
    if head is not None and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        head = head.to(torch.get_autocast_dtype(device))
    return Dense(hidden, head)


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


@dataclass(frozen=True, slots=True)
class _Objective:
    """The arguments of fused_loss, without the student's."""

    labels: Tensor
    weights: Tensor
    teacher: Teacher
    loss: Loss
    temperature: float
    budget: int | None
    trimmed: TrimmedHead | None

    def chunks(self, student: Dense) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield for each chunk of c tokens: its slice, the values of Sums per token, [5, c], and the gradient, [c, V].

        The gradient is that of the weighted loss with respect to the logits. The next chunk overwrites it.
        """
        teacher = self.teacher
        total = len(student.hidden)
        on_cpu = _on_cpu(student.hidden)
        budget = self.budget or (CPU_BUDGET if on_cpu else BUDGET)
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
                values[:, part], slope = self.block(z[part], self.labels[tokens], None if y is None else y[part], own)
                torch.mul(slope, self.weights[tokens].unsqueeze(1), out=gradient[part])
            yield rows, values, gradient[: len(z)]

    def block(
        self, z: Tensor, labels: Tensor, teacher: Tensor | TopK | None, log_total: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the five values of Sums for b tokens, [5, b], and the gradient for their logits, [b, V].

        Args:
            z: The student's logits, [b, V].
            teacher: The teacher's logits, [b, V], or its listed tokens.
            log_total: Log of the sum over all ids, as in Dense, [b].
        """
        loss = self.loss
        temperature = self.temperature
        log_q1 = self._with_lost(log_probs(z, 1))
        labels = self._rows(labels).unsqueeze(1)
        ce = -log_q1.gather(1, labels).squeeze(1)
        if self.trimmed is not None:
            ce = torch.where(labels.squeeze(1) < z.shape[1], ce, 0.0)
        if teacher is None:
            objective = torch.zeros_like(ce)
            gradient = torch.zeros_like(log_q1)
            watched = [objective] * 3
        else:
            log_q = log_q1 if temperature == 1 else self._with_lost(log_probs(z, temperature))
            if isinstance(teacher, TopK):
                objective, watched, gradient = self._listed(log_q, teacher)
            else:
                log_p = log_probs(teacher, temperature, log_total)
                whole = log_total is None
                objective, watched, gradient = self._dense(log_q, log_p, whole)
            gradient = gradient if temperature == 1 else gradient.div_(temperature)
        if loss.cross_entropy:
            counted = (labels < z.shape[1]).to(log_q1)  # [b, 1]
            gradient.add_(log_q1.exp().mul_(counted), alpha=loss.cross_entropy)
            gradient.scatter_add_(1, labels, counted * -loss.cross_entropy)
        values = torch.stack([objective + loss.cross_entropy * ce, ce, *watched])
        return values, gradient[:, : z.shape[1]]

    def _dense(self, log_q: Tensor, log_p: Tensor, whole: bool) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return the divergence, the list [acceptance, slack, agreement], and the gradient for the logits.

        whole: Whether log_p covers all V ids. If False, it covers only the S ids of a trimmed head.
        """
        top = log_p.max(-1, keepdim=True).indices
        if whole and self.trimmed is not None:
            top = self._rows(top)
            log_p = log_p.index_select(1, self.trimmed.ids)
        x = Pair.of(self._with_lost(log_p), log_q)
        value, slope = self.loss.divergence(x)
        gradient = slope.addcmul_(x.q, slope.sum(-1, keepdim=True), value=-1)
        return value, [x.alpha, torch.zeros_like(x.alpha), _tops(log_q, top)], gradient

    def _listed(self, log_q: Tensor, teacher: TopK) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return the same as _dense for a teacher that lists k tokens. All other tokens form one bucket.

        The gradient of the bucket is divided among its tokens in proportion to the student's probabilities.
        """
        ids = self._rows(teacher.ids)
        q = log_q.exp()
        listed = teacher.log_p
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
        """Return the column of each id in the student's logits, or S, the number of columns, for lost ids."""
        return ids if self.trimmed is None else self.trimmed.rows[ids]

    def _with_lost(self, log_probs: Tensor) -> Tensor:
        """Append the column of lost ids, [b, S + 1], if the student's head is trimmed."""
        return log_probs if self.trimmed is None else pad(log_probs, (0, 1), value=LOST)


def _tops(log_q: Tensor, ids: Tensor) -> Tensor:
    """Return 1 for each id, [b, 1], that is the student's most probable token, and otherwise 0, [b]."""
    return (log_q.gather(1, ids).squeeze(1) == log_q.amax(-1)).to(log_q)
