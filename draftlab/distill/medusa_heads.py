"""Medusa heads as a student of the one loop: the target is frozen, and teaches what it will itself say later.

B rows of text, N heads, T positions, D hidden. A batch has B N rows: each text once for every head. Row k of a text
holds, at each position, the states of head k from k positions before, so that it predicts the same token as the target
does there, and is taught by the target's distribution there. No head shares a trained weight with another, so the
paper's weights of the heads' losses (0.8^k) would change nothing that AdamW sees, and are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from draftlab.data import Batch, HeldOut
from draftlab.distill.fused_loss import Dense
from draftlab.distill.losses import parse_loss
from draftlab.distill.on_policy import Batches
from draftlab.distill.teachers import logits_of
from draftlab.distill.trainer import DistillStep, TrainingSetup
from draftlab.engine.drafters.medusa import ahead

LOSS = "fkl"  # to the target's own distribution at the token that a head predicts


class Trunk:
    """The target, run once for what heads and teacher both ask of the same texts."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval().requires_grad_(False)
        self.asked, self.states = torch.empty(0), torch.empty(0)

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """Last hidden states, [B, T, D]."""
        if not torch.equal(self.asked, ids):
            self.asked = ids
            self.states = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        return self.states


class Heads(nn.Module):
    """The student: the heads alone are its parameters, zero at the start, where each repeats the target's own head."""

    def __init__(self, trunk: Trunk, count: int) -> None:
        super().__init__()
        self.trunk = trunk
        hidden = trunk.model.config.get_text_config().hidden_size
        self.heads = nn.ParameterList(torch.zeros(hidden, hidden) for _ in range(count))

    @property
    def device(self) -> torch.device:
        return self.heads[0].device

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> CausalLMOutput:
        return CausalLMOutput(logits=self.get_output_embeddings()(self.states(input_ids)))

    def states(self, ids: Tensor) -> Tensor:
        """What enters the target's head, [B N, T, D]; of head k that of the first k positions is not to be used."""
        count = len(self.heads)
        states = self.trunk(ids[::count])
        hidden = ahead(states.to(self.heads[0]), torch.stack(list(self.heads))).to(states)  # [B, T, N, D]
        shifted = [head.roll(k, 1) for k, head in enumerate(hidden.unbind(2), 1)]
        return torch.stack(shifted, 1).flatten(0, 1)[: len(ids)]

    def get_decoder(self) -> Any:
        return lambda input_ids, use_cache: BaseModelOutput(last_hidden_state=cast(Any, self.states(input_ids)))

    def get_output_embeddings(self) -> nn.Module:
        return cast(nn.Module, self.trunk.model.get_output_embeddings())


@dataclass(frozen=True, slots=True)
class OwnTeacher:
    """The target's distributions of rows that hold each text once for every head."""

    trunk: Trunk
    count: int

    @property
    def vocab(self) -> int:
        return logits_of(self.trunk.model)

    def look(self, batch: Batch) -> Dense:
        ids = torch.from_numpy(batch.ids[:: self.count, :-1]).to(self.trunk.model.device)
        states = self.trunk(ids).repeat_interleave(self.count, 0)  # [B N, T, D]
        counted = torch.from_numpy(batch.mask).flatten().nonzero().squeeze(1).to(states.device)
        head = cast(nn.Module, self.trunk.model.get_output_embeddings()).get_parameter("weight")
        return Dense(states.flatten(0, 1)[counted], head.detach())


@dataclass(frozen=True, slots=True)
class EachHead:
    """Batches with each text once for every head."""

    batches: Batches
    count: int

    def batch(self, step: int) -> Batch:
        return each_head(self.batches.batch(step), self.count)


def each_head(batch: Batch, count: int) -> Batch:
    """Each row count times; in head k's the first k positions do not count, behind which it has nothing to predict."""
    mask = batch.mask.repeat(count, 0)
    for k in range(1, count + 1):
        mask[k - 1 :: count, :k] = 0
    return Batch(batch.ids.repeat(count, 0), mask)


def setup(student: Heads, batches: Batches, heldout: HeldOut) -> TrainingSetup:
    """Of one process and whole batches: rows of a text must stay together."""
    count = len(student.heads)
    spread = replace(heldout, batches=[each_head(batch, count) for batch in heldout.batches])
    return TrainingSetup(
        teacher=cast(Any, OwnTeacher(student.trunk, count)), batches=EachHead(batches, count), heldout=spread
    )


@torch.no_grad()
def by_head(student: Heads, weights: Mapping[str, Tensor], setup: TrainingSetup) -> list[dict[str, float]]:
    """Held-out acceptance and agreement of each head with these weights, teacher-forced."""
    student.load_state_dict(weights)
    count = len(student.heads)
    teacher = OwnTeacher(student.trunk, count)
    step = DistillStep(cast(PreTrainedModel, student), parse_loss(LOSS), 1.0)
    sums, tokens = torch.zeros(count, 6, dtype=torch.float64), [0.0] * count
    for batch in setup.heldout.batches:
        for k in range(count):
            mask = batch.mask * (np.arange(len(batch.mask)) % count == k)[:, None]
            ids, counted = torch.from_numpy(batch.ids).to(student.device), torch.from_numpy(mask).to(student.device)
            sums[k] += step(ids, counted, teacher.look(Batch(batch.ids, mask))).double().cpu()
            tokens[k] += float(mask.sum())
    return [{"acceptance": float(s[2] / n), "agreement": float(s[4] / n)} for s, n in zip(sums, tokens, strict=True)]
