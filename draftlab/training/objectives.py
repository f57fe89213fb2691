"""Objectives of training: a student with its loss, and modules that are trained with it.

B rows, T predicted tokens per row, N of them that count, K offsets of a parallel draft (PARD, 2504.18583). Conditional
drop of tokens (COD): of the positions that predict offset j, a random share goes on to offset j + 1, so that a step
costs about a third of all K T predictions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftlab.data import Batch
from draftlab.model import parallel
from draftlab.model.parallel import pack
from draftlab.model.trimmed_head import trimmed_head_of
from draftlab.training.fused_loss import Teacher, chosen, fused_loss
from draftlab.training.losses import Loss
from draftlab.training.teachers import OutputHead, logits_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """Offsets of a parallel draft. token: the mask token. share, floor: of the positions of each offset, see drawn."""

    count: int
    token: int
    share: float
    floor: float
    seed: int

    @property
    def cost(self) -> float:
        """Return the tokens that a step reads, relative to those of its text."""
        return sum(max(self.share**j, self.floor) for j in range(self.count))

    @property
    def config(self) -> dict[str, object]:
        """Return what config.json says of a parallel draft, as PARD's do and vLLM reads."""
        return {
            parallel.PARD_TOKEN: self.token,
            parallel.SPD_TYPE: "pard",
            parallel.OFFSETS: self.count,
        }

    def prepare(self, student: PreTrainedModel) -> None:
        """Give the mask token the mean embedding, unless the student is a parallel draft with this token already."""
        if student.config.to_dict().get(parallel.PARD_TOKEN) != self.token:
            embedding = student.get_input_embeddings().get_parameter("weight")
            with torch.no_grad():
                embedding[self.token] = embedding.mean(0)

    def drawn(self, batch: Batch, number: int) -> Batch:
        """Return the batch with the offsets to predict from each position, a function of seed and number.

        Of a row's n positions that count, max(share^(j - 1), floor) n predict offset j, always among those of j - 1,
        and only where all tokens up to j count: a draft does not cross the end of an answer.
        """
        rng = np.random.default_rng((self.seed, number + (1 << 32)))
        counted = batch.mask > 0
        ahead = _run_lengths(counted)
        # random rank in its row
        order = np.where(counted, rng.random(counted.shape), np.inf).argsort(1).argsort(1)
        positions = counted.sum(1, keepdims=True)
        depths = np.zeros(counted.shape, dtype=np.int64)
        for offset in range(1, self.count + 1):
            most = (positions * max(self.share ** (offset - 1), self.floor)).astype(np.int64)
            depths += (order < most) & (ahead >= offset)
        return replace(batch, depths=depths)


def _run_lengths(counted: np.ndarray) -> np.ndarray:
    """Return how many positions in a row count from each on, [B, T]."""
    ahead = np.zeros(counted.shape, dtype=np.int64)
    for t in range(counted.shape[1] - 1, -1, -1):
        ahead[:, t] = np.where(
            counted[:, t], 1 + (ahead[:, t + 1] if t + 1 < counted.shape[1] else 0), 0
        )
    return ahead


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Return the tokens per target pass of K drafted tokens that are accepted independently with these chances."""
    return 1 + float(np.cumprod(acceptance).sum())


Result = TypeVar("Result")


class Constraint(Protocol):
    """A module that is trained along with a student, such as masks, with parameters of its own."""

    progress: float  # share of the run that is done

    def draw(self) -> None: ...  # called before every forward pass, to sample what is random

    def penalty(self) -> Tensor: ...

    # groups of parameters for AdamW, with their rates
    def groups(self) -> list[dict[str, Any]]: ...


class Objective(nn.Module):
    """Student and loss in one forward pass, so that the hooks of DDP and FSDP cover both.

    It is called and returns as DistillStep. takes_packed: rows of a batch may hold several sequences. rates: shares of
    the learning rate, of the student's parameters by name.
    """

    takes_packed = False
    rates: Mapping[str, float] = MappingProxyType({})
    progress = 0.0

    def set_progress(self, progress: float) -> None:
        """Set the share of the run that is done, on which schedules depend."""
        self.progress = progress

    def around(self, work: Callable[[], Result]) -> Result:
        """Do work with passes of the student alone: FSDP2 gathers for it, too, the weights outside of its layers."""
        return work()


class DistillStep(Objective):
    """A language model that learns from a teacher's distributions, from text, or from both."""

    def __init__(
        self,
        student: PreTrainedModel,
        loss: Loss,
        temperature: float,
        vocab: int | None = None,  # logits that count: fewer where one of both heads is padded
        constraint: Constraint | None = None,
        offsets: Offsets | None = None,
    ) -> None:
        super().__init__()
        self.student = student
        self.loss = loss
        self.temperature = temperature
        self.constraint = constraint
        self.offsets = offsets
        self.head = OutputHead.of(student, vocab or logits_of(student))
        self.takes_packed = self.head.takes_packed

    @property
    def _no_split_modules(self) -> set[str] | list[str] | None:
        """The layers that accelerate shards one by one (FSDP2): the student's."""
        return self.student._no_split_modules

    def set_progress(self, progress: float) -> None:
        super().set_progress(progress)
        if self.constraint is not None:
            self.constraint.progress = progress

    def forward(
        self,
        ids: Tensor,
        mask: Tensor,
        teacher: Teacher,
        positions: Tensor | None = None,
        depths: Tensor | None = None,
    ) -> Tensor:
        """Return sums over tokens, [G, 6]: objective, cross-entropy, acceptance, its slack, agreement, total cost.

        ids: [B, T + 1]. mask: [B, T], weights of the next tokens. teacher: of the N tokens whose weight is not zero.
        positions, depths: See Batch. G is 1; for a parallel draft without gradients the number of offsets, each by
        itself.
        """
        if self.constraint is not None:
            self.constraint.draw()
        counted = mask.flatten().nonzero().squeeze(1)
        if depths is None:
            hidden, head = self.head.hidden_and_weight(
                self.student, ids[:, :-1], counted, positions
            )
            return self._sums(hidden, head, ids, mask, counted, teacher).unsqueeze(0)
        assert self.offsets is not None  # depths are theirs
        packed = pack(ids[:, :-1], depths, self.offsets.token, positions)
        attention_mask = packed.mask.unsqueeze(1)
        hidden, head = self.head.hidden_and_weight(
            self.student, packed.ids, packed.predicting, packed.positions, attention_mask
        )
        groups: list[Any] = [slice(None)]
        if not torch.is_grad_enabled():
            groups = [packed.offset == n for n in range(1, self.offsets.count + 1)]
        each = []
        for own in groups:
            places = packed.predicted[own]
            each.append(
                self._sums(hidden[own], head, ids, mask, places, chosen(teacher, counted, places))
            )
        return torch.stack(each)

    def _sums(
        self,
        hidden: Tensor,
        head: Tensor | None,
        ids: Tensor,
        mask: Tensor,
        predicted: Tensor,
        teacher: Teacher,
    ) -> Tensor:
        """Return the sums over tokens that are predicted at places of the mask, [6]."""
        labels, weights = ids[:, 1:].flatten()[predicted], mask.flatten()[predicted]
        loss, trimmed = self.loss.at(self.progress), trimmed_head_of(self.student)
        sums = fused_loss(
            hidden, head, labels, weights, teacher, loss, self.temperature, trimmed=trimmed
        )
        # the penalty counts on every token, as the objective is a sum over tokens
        total = sums.objective + (
            0 if self.constraint is None else self.constraint.penalty() * weights.sum()
        )
        watched = [sums.objective, sums.cross_entropy, sums.acceptance, sums.slack, sums.agreement]
        return torch.stack([*(w.detach() for w in watched), total])
