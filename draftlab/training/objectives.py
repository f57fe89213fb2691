"""Objectives of training: a student with its loss, and modules that are trained with a student.

A parallel draft (PARD, 2504.18583) predicts several tokens from each position: at offset j, the j-th next token.
Training drops some of these predictions (conditional drop of tokens). A random share of the positions that predict
offset j also predict offset j + 1. By default, a step makes at most about 0.4 K T predictions per row.

Shapes: B rows, T predicted tokens per row, N tokens that count in the loss, K offsets of a parallel draft.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftlab.data import Batch
from draftlab.model import parallel
from draftlab.model.parallel import pack
from draftlab.model.trimmed_head import TrimmedHead, trimmed_head_of
from draftlab.training.fused_loss import Teacher, chosen, fused_loss
from draftlab.training.losses import Loss
from draftlab.training.teachers import OutputHead, logits_of


class Depths(Protocol):
    """A rule for the depth of each position: the number of tokens that a student predicts from it."""

    def drawn(self, batch: Batch, number: int) -> Batch:
        """Return the batch with random depths. The draw depends only on the seed and on `number`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """The offsets that a parallel draft learns. At offset j, from 1 to count, the draft predicts the j-th next token.

    Attributes:
        token: Id of the mask token.
        share: Share of the positions at one offset that also predict the next offset.
        floor: Lowest share of all positions that predict an offset.
    """

    count: int
    token: int
    share: float
    floor: float
    seed: int

    @property
    def cost(self) -> float:
        """Return how many tokens the draft reads for each token of the training text. Mask tokens count, too."""
        return sum(max(self.share**j, self.floor) for j in range(self.count))

    @property
    def config(self) -> dict[str, object]:
        """Return the entries of config.json that mark a parallel draft. PARD writes them, and vLLM reads them."""
        return {
            parallel.PARD_TOKEN: self.token,
            parallel.SPD_TYPE: "pard",
            parallel.OFFSETS: self.count,
        }

    def prepare(self, student: PreTrainedModel) -> None:
        """Set the embedding of the mask token to the mean of all embeddings.

        If the student already is a parallel draft with this mask token, its embedding stays.
        """
        if student.config.to_dict().get(parallel.PARD_TOKEN) != self.token:
            embedding = student.get_input_embeddings().get_parameter("weight")
            with torch.no_grad():
                embedding[self.token] = embedding.mean(0)

    def drawn(self, batch: Batch, number: int) -> Batch:
        """Return the batch with random depths. The draw depends only on the seed and on `number`.

        If n positions of a row count in the loss, at most max(share^(j - 1), floor) n of them predict offset j. A
        position that predicts offset j also predicts all lower offsets. All j tokens after it must count, so that no
        draft crosses the end of an answer.
        """
        counted = batch.mask > 0
        ahead = run_lengths(counted)
        order = random_ranks(counted, self.seed, number)
        positions = counted.sum(1, keepdims=True)
        depths = np.zeros(counted.shape, dtype=np.int64)
        for offset in range(1, self.count + 1):
            most = (positions * max(self.share ** (offset - 1), self.floor)).astype(np.int64)
            depths += (order < most) & (ahead >= offset)
        return replace(batch, depths=depths)


def random_ranks(counted: np.ndarray, seed: int, number: int) -> np.ndarray:
    """Return a random rank of each position in its row, [B, T]. Positions that count in the loss get the first ranks.

    counted: Whether each position counts, [B, T]. The ranks depend only on `counted`, `seed` and `number`.
    """
    rng = np.random.default_rng((seed, number + (1 << 32)))
    return np.where(counted, rng.random(counted.shape), np.inf).argsort(1).argsort(1)


def run_lengths(counted: np.ndarray) -> np.ndarray:
    """Return for each position the number of consecutive positions, from it on, that count in the loss, [B, T].

    counted: Whether each position counts, [B, T].
    """
    width = counted.shape[1]
    # index of the next position that does not count
    ends = np.where(counted, width, np.arange(width))
    return np.minimum.accumulate(ends[:, ::-1], 1)[:, ::-1] - np.arange(width)


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Return the tokens per target pass if drafted tokens are accepted independently.

    acceptance: Acceptance probability of each of the K drafted tokens, [K].
    """
    return 1 + float(np.cumprod(acceptance).sum())


Result = TypeVar("Result")


class Constraint(Protocol):
    """A module with its own parameters that is trained together with a student, such as pruning masks."""

    progress: float  # share of the run that is done

    def draw(
        self,
    ) -> None: ...  # samples the module's random values; called before every forward pass

    def penalty(self) -> Tensor: ...

    # AdamW's parameter groups, with their learning rates
    def groups(self) -> list[dict[str, Any]]: ...


class Objective(nn.Module):
    """A student and its loss in one module, so that the hooks of DDP and FSDP cover both in one forward pass.

    Subclasses define forward() with the arguments and the result of DistillStep.forward().

    Attributes:
        takes_packed: Whether rows of a batch may hold several sequences.
        rates: Factors of the learning rate for some of the student's parameters, by name.
        progress: Share of the training steps that are done. Schedules depend on it.
        depths: Rule for how many tokens are predicted from each position. None predicts the next token.
        temperature: Temperature of both distributions in the divergence.
        served: Temperature of both distributions without gradients, as in evaluation. It is above 0.
    """

    takes_packed = False
    served = 1.0
    rates: Mapping[str, float] = MappingProxyType({})
    progress = 0.0
    depths: Depths | None = None

    def __init__(self, student: Any, loss: Loss, temperature: float) -> None:
        super().__init__()
        self.student = student
        self.loss = loss
        self.temperature = temperature

    def around(self, work: Callable[[], Result]) -> Result:
        """Call `work`, which runs the student without `forward` of this objective. Return the result of `work`.

        With FSDP2, the weights outside of the layers are gathered for the call, as for `forward`.
        """
        return work()

    def sums(
        self,
        hidden: Tensor,
        head: Tensor | None,
        labels: Tensor,
        weights: Tensor,
        teacher: Teacher,
        trimmed: TrimmedHead | None = None,
        penalty: Tensor | float = 0.0,
    ) -> Tensor:
        """Return six sums over tokens as a tensor, [6], see StepSums. For the other arguments, see fused_loss."""
        loss = self.loss.at(self.progress)
        temperature = self.temperature if torch.is_grad_enabled() else self.served
        sums = fused_loss(hidden, head, labels, weights, teacher, loss, temperature, trimmed=trimmed)
        return torch.stack([*(value.detach() for value in sums), sums.objective + penalty])


class StepSums(NamedTuple):
    """The six sums over tokens that an objective returns in the last dimension of a tensor.

    The first five are those of fused_loss.Sums. trained: `objective` plus the penalty of a constraint. Only this sum
    has a gradient.
    """

    objective: Tensor
    cross_entropy: Tensor
    acceptance: Tensor
    slack: Tensor
    agreement: Tensor
    trained: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "StepSums":
        return cls(*values.unbind(-1))


class DistillStep(Objective):
    """A language model that learns from a teacher's distributions, from text, or from both."""

    def __init__(
        self,
        student: PreTrainedModel,
        loss: Loss,
        temperature: float,
        vocab: int | None = None,  # number of logits without padding
        constraint: Constraint | None = None,
        offsets: Offsets | None = None,
    ) -> None:
        super().__init__(student, loss, temperature)
        self.constraint = constraint
        self.depths = self.offsets = offsets
        self.head = OutputHead.of(student, vocab or logits_of(student))
        self.takes_packed = self.head.takes_packed

    @property
    def _no_split_modules(self) -> set[str] | list[str] | None:
        """Return the student's layer classes, which accelerate shards one by one (FSDP2)."""
        return self.student._no_split_modules

    def forward(
        self,
        ids: Tensor,
        mask: Tensor,
        teacher: Teacher,
        positions: Tensor | None = None,
        depths: Tensor | None = None,
    ) -> Tensor:
        """Return weighted sums over tokens, [1, 6], see StepSums.

        Without gradients, as in evaluation, a parallel draft has sums for each of K offsets, [K, 6].

        Args:
            ids: Token ids, [B, T + 1].
            mask: Weight of each next token in the loss, [B, T].
            teacher: The target's distributions at the N positions whose weight is not 0.
            positions: Position of each token in its sequence, [B, T], if rows hold several sequences.
            depths: Number of tokens that a parallel draft predicts from each position, [B, T].
        """
        if self.constraint is not None:
            self.constraint.progress = self.progress
            self.constraint.draw()
        counted = mask.flatten().nonzero().squeeze(1)
        if depths is None:
            hidden, head = self.head.hidden_and_weight(self.student, ids[:, :-1], counted, positions)
            return self._sums(hidden, head, ids, mask, counted, teacher).unsqueeze(0)
        assert self.offsets is not None  # only offsets draw depths
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
            each.append(self._sums(hidden[own], head, ids, mask, places, chosen(teacher, counted, places)))
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
        """Return the six sums over N chosen tokens, [6]. predicted: Their indices in the flattened mask, [N]."""
        labels = ids[:, 1:].flatten()[predicted]
        weights = mask.flatten()[predicted]
        # the penalty is multiplied by the number of tokens, because the objective is a sum over tokens
        penalty = 0.0 if self.constraint is None else self.constraint.penalty() * weights.sum()
        trimmed = trimmed_head_of(self.student)
        return self.sums(hidden, head, labels, weights, teacher, trimmed, penalty)
