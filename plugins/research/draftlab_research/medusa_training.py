"""Train Medusa heads as a student of `draftlab distill`: the frozen target teaches the heads its later predictions.

B texts of a batch, N heads, T positions, D hidden. A batch has B N rows: one row for each text and head. In row k of a
text, position t holds the state of head k at position t - k. Head k there predicts the same token as the target does at
position t, and learns from the target's distribution. The heads share no trained weight, so the paper's weights of the
heads' losses (0.8^k) would not change AdamW's steps, and are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from draftlab.data import Batch, HeldOut
from draftlab.model import checkpoint
from draftlab.model.devices import exact
from draftlab.training.checkpointer import best_weights, select_device
from draftlab.training.fused_loss import Dense
from draftlab.training.loop import Batches
from draftlab.training.losses import parse_loss
from draftlab.training.objectives import DistillStep
from draftlab.training.optimizers import training_dtype
from draftlab.training.run import Distillation, OpenStudent
from draftlab.training.teachers import logits_of
from draftlab.training.trainer import TrainingSetup, rounded_to
from draftlab_research.drafting.medusa import apply_heads, write

# forward KL divergence from the target's to the head's distribution of the same token
LOSS = parse_loss("fkl")


def open_heads(count: int, job: Distillation) -> OpenStudent:
    """Load the frozen target of a distillation, and open its training text. Return `count` new heads with both.

    Raises:
        UserError: The text cannot be used.
    """
    target = job.target
    assert target is not None  # a head reads the target's states
    dtype, device = training_dtype(job.loop.dtype), select_device(job.hardware.device)
    student = Heads(FrozenTarget(checkpoint.load_model(target, dtype, device)), count).to(device)
    batches, heldout = job.text.open(target, job.loop)
    stored = checkpoint.stored_dtype(target)
    setup = replace(heads_setup(student, batches, heldout), rounded=rounded_to(stored))

    def write_best(work: Path, state: Path) -> dict[str, object]:
        """Write the heads with the best evaluation. Return the held-out acceptance and agreement of each head."""
        best = best_weights(state, "student")
        written = {name: weight.to(stored) for name, weight in best.items()}
        write(work, written, target)
        return {"heads": evaluate_heads(student, written, setup)}

    return OpenStudent(module=student, setup=setup, write=write_best)


class FrozenTarget:
    """The frozen target. It caches the states of the last texts, because heads and teacher read the same states."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval().requires_grad_(False)
        self.last_ids, self.last_states = torch.empty(0), torch.empty(0)

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """Return the last hidden states, [B, T, D], of token ids [B, T]."""
        if self.last_ids.device != ids.device or not torch.equal(self.last_ids, ids):
            self.last_ids = ids
            self.last_states = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        return self.last_states

    @property
    def head(self) -> nn.Module:
        return cast(nn.Module, self.model.get_output_embeddings())


class Heads(nn.Module):
    """The student: a frozen target with Medusa heads, which are the only parameters.

    The weights of a head start at zero. Because of its residual connection, its logits are then those of the target.
    """

    def __init__(self, target: FrozenTarget, count: int) -> None:
        super().__init__()
        self.target = target
        hidden = target.model.config.get_text_config().hidden_size
        self.heads = nn.ParameterList(torch.zeros(hidden, hidden) for _ in range(count))

    @property
    def device(self) -> torch.device:
        return self.heads[0].device

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> CausalLMOutput:
        return CausalLMOutput(logits=self.get_output_embeddings()(self.states(input_ids)))

    def states(self, ids: Tensor) -> Tensor:
        """Return the inputs of the target's LM head for each text and head, [B N, T, D].

        The states of head k are shifted by k positions. Its first k positions are meaningless, and masked in the loss.

        ids: Token ids, [B N, T], with each text in N consecutive rows.
        """
        count = len(self.heads)
        states = self.target(ids[::count])
        # [B, T, N, D]
        hidden = apply_heads(states.to(self.heads[0]), torch.stack(list(self.heads))).to(states)
        shifted = [head.roll(k, 1) for k, head in enumerate(hidden.unbind(2), 1)]
        return torch.stack(shifted, 1).flatten(0, 1)[: len(ids)]

    def get_decoder(self) -> Any:
        return lambda input_ids, use_cache: BaseModelOutput(last_hidden_state=cast(Any, self.states(input_ids)))

    def get_output_embeddings(self) -> nn.Module:
        return self.target.head


@dataclass(frozen=True, slots=True)
class SelfTeacher:
    """The target as teacher of Medusa heads, for repeated batches.

    count: Number of heads.
    """

    target: FrozenTarget
    count: int
    takes_packed: bool = False

    @property
    def vocab(self) -> int:
        return logits_of(self.target.model)

    def distributions(self, batch: Batch) -> Dense:
        ids = torch.from_numpy(batch.ids[:: self.count, :-1]).to(self.target.model.device)
        states = self.target(ids).repeat_interleave(self.count, 0)  # [B N, T, D]
        counted = torch.from_numpy(batch.mask).flatten().nonzero().squeeze(1).to(states.device)
        return Dense(states.flatten(0, 1)[counted], self.target.head.get_parameter("weight").detach())


@dataclass(frozen=True, slots=True)
class RepeatedBatches:
    batches: Batches
    count: int

    def batch(self, step: int) -> Batch:
        return RepeatedBatch.of(self.batches.batch(step), self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedBatch(Batch):
    """A batch that repeats each row of `base` for each of `count` heads, in consecutive rows, which stay together.

    The first k positions of the row for head k are masked, because head k has no state from k positions earlier there.
    """

    base: Batch
    count: int

    @classmethod
    def of(cls, base: Batch, count: int) -> "RepeatedBatch":
        mask = base.mask.repeat(count, 0)
        for k in range(1, count + 1):
            mask[k - 1 :: count, :k] = 0
        return cls(base.ids.repeat(count, 0), mask, base=base, count=count)

    def parts(self, tokens: int) -> list[Batch]:
        if tokens:
            tokens = max(1, tokens // self.count)
        return [RepeatedBatch.of(part, self.count) for part in self.base.parts(tokens)]

    def shard(self, index: int, count: int) -> Batch:
        return RepeatedBatch.of(self.base.shard(index, count), self.count)


def heads_setup(student: Heads, batches: Batches, heldout: HeldOut) -> TrainingSetup:
    """Return the training setup of Medusa heads. Its batches repeat each text for each head, see RepeatedBatch."""
    count = len(student.heads)
    batches_of_heads = [RepeatedBatch.of(batch, count) for batch in heldout.batches]
    repeated = replace(heldout, batches=batches_of_heads)
    return TrainingSetup(
        teacher=SelfTeacher(student.target, count),
        batches=RepeatedBatches(batches, count),
        heldout=repeated,
        loss=LOSS,
    )


@torch.no_grad()
def evaluate_heads(student: Heads, weights: Mapping[str, Tensor], setup: TrainingSetup) -> list[dict[str, float]]:
    """Return the held-out acceptance and agreement of each head, in [0, 1], teacher-forced.

    Agreement is the share of tokens at which head and target have the same argmax.

    weights: Weights of the heads, by parameter name.
    """
    student.load_state_dict(weights)
    count = len(student.heads)
    teacher = SelfTeacher(student.target, count)
    step = DistillStep(cast(PreTrainedModel, student), LOSS, 1.0)
    sums, tokens = torch.zeros(count, 6, dtype=torch.float64), [0.0] * count
    for batch in setup.heldout.batches:
        for k in range(count):
            mask = batch.mask * (np.arange(len(batch.mask)) % count == k)[:, None]
            ids, counted = (
                torch.from_numpy(batch.ids).to(student.device),
                torch.from_numpy(mask).to(student.device),
            )
            sums[k] += exact(step(ids, counted, teacher.distributions(Batch(batch.ids, mask)))[0]).cpu()
            tokens[k] += float(mask.sum())
    return [{"acceptance": float(s[2] / n), "agreement": float(s[4] / n)} for s, n in zip(sums, tokens, strict=True)]
