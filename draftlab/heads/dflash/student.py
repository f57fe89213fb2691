"""The student dflash: layers that draft a block of tokens in one pass, trained on the states of the frozen target."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor
from transformers import Qwen3Config

from draftlab.console import note
from draftlab.errors import UserError
from draftlab.heads.base import TargetSizes, read_tensors
from draftlab.heads.dflash import layout
from draftlab.heads.dflash.layout import DFlashShape
from draftlab.heads.dflash.module import Anchors, BlockHead, BlockObjective
from draftlab.heads.training import HeadStudent, Layers, costs, open_teacher, sample, served_temperature, texts_of
from draftlab.model import parallel
from draftlab.model.trimmed_head import output_head
from draftlab.reading import reading
from draftlab.training.checkpointer import load_or_make
from draftlab.training.losses import parse_loss
from draftlab.training.run import Distillation, OpenStudent
from draftlab.training.students.base import student
from draftlab.training.trainer import TrainingSetup


@student("dflash")
class DFlashStudent(HeadStudent):
    """Options of a DFlash head.

    block_size: Number of tokens of a block: the last token of the text, then block_size - 1 drafted tokens. num_layers:
    Number of layers of the head. Default: a sixth of the target's layers, at least 1 and at most 5. layer_ids: Layers
    of the target whose states the head reads, such as 2+12+21. Default: layers 2, n / 2 and n - 3 of a target with n
    layers. mask_token_id: Id of the mask token. Default: an id that no text has. anchors: Share of the predicted
    positions at which a block begins. The positions are drawn anew in each step. gamma: Drafted token k has the weight
    exp(-(k - 1) / gamma) in the loss. Default: half the block size.
    """

    free = frozenset({"anchors", "gamma"})
    unused = HeadStudent.unused | {"vocab"}
    lr_share = 1.0  # gives 0.004; on the embedded target tiny, 0.008 was even better after 60 steps
    block_size: int = Field(8, ge=2, le=32)
    num_layers: int | None = Field(None, ge=1, le=100)
    layer_ids: Layers = None
    mask_token_id: int | None = Field(None, ge=0)
    anchors: float = Field(0.125, gt=0, le=1)
    gamma: float | None = Field(None, gt=0)

    def layers_of(self, job: Distillation) -> Sequence[int]:
        _, config, _ = head_of(self, job)
        return config.layer_ids

    def facts(self, job: Distillation) -> Mapping[str, object]:
        _, config, _ = head_of(self, job)
        weights = sum(math.prod(size) for size in config.sizes().values())
        described = f"blocks of {config.block_size} tokens, {config.layers} layers"
        passes = self.anchors * config.block_size
        return costs(job, described, config.layer_ids, weights, passes)

    def open(self, job: Distillation, state: Path) -> OpenStudent:
        return open_head(self, job, state)


def head_of(spec: DFlashStudent, job: Distillation) -> tuple[dict[str, object], DFlashShape, Qwen3Config]:
    """Return the config.json of the head to train, the sizes of the head, and the Qwen3Config of its layers.

    Raises:
        UserError: The head does not fit the target, or predicts only some of the target's token ids.
    """
    target = job.target
    assert target is not None  # a head reads the target's states
    if job.draft is not None:
        config, layer, content = layout.read_shape(job.draft, target, "dflash")
        if config.draft_vocab < config.vocab:
            raise UserError(
                f"--draft {job.draft} predicts only {config.draft_vocab} of the target's {config.vocab} token ids, but "
                "distill trains only DFlash heads that predict all ids; leave --draft out to train a new head"
            )
        return dict(content), config, layer
    sizes = TargetSizes.of(target)
    layers = spec.num_layers or min(5, max(1, sizes.layers // 6))
    token = parallel.unused_id(target, sizes.vocab) if spec.mask_token_id is None else spec.mask_token_id
    content = layout.new_json(target, layers, spec.layer_ids, spec.block_size, token)
    return content, *layout.parse_shape(content, target, Path(f"--student {spec.text}"))


def open_head(spec: DFlashStudent, job: Distillation, state: Path) -> OpenStudent:
    """Load the target and freeze it. Return the DFlash head with its teacher, loss and text.

    Raises:
        UserError: The target, the text or the head of --draft cannot be used.
    """
    target = job.target
    assert target is not None  # a head reads the target's states
    content, config, layer = head_of(spec, job)
    batches, heldout = texts_of(job, target, state)
    teacher = open_teacher(job, config.layer_ids, None)
    torch.manual_seed(job.loop.seed)
    student = BlockHead(config, layer, teacher.embedding, output_head(teacher.model))
    student.to(teacher.device)
    if job.draft is not None:
        tensors = read_tensors(job.draft, lambda name: name.removeprefix("model."))
        with reading(f"--draft {job.draft} is not a DFlash head with the target's embedding and LM head"):
            student.load_state_dict(tensors)
    note(f"the mask token has the id {config.mask_token_id}")

    def measure() -> dict[str, Tensor]:
        sampled = sample(teacher, batches, job.loop, job.text.seq_len, "measuring the target's states")
        return {"scale": sampled.states.pow(2).mean(0).sqrt().clamp_min(config.eps).cpu()}

    student.scale.copy_(load_or_make(state, "start.pt", measure)["scale"])
    if job.draft is not None:
        student.fc.weight.data.mul_(student.scale)
    loss = parse_loss(job.loss)
    gamma = spec.gamma or config.block_size / 2
    anchors = Anchors(spec.anchors, config.most, job.loop.seed)
    setup = TrainingSetup(
        teacher=teacher,
        batches=batches,
        heldout=heldout,
        loss=loss,
        served=served_temperature(job),
        rounded=student.rounded(target),
        objective=BlockObjective(student, loss, job.temperature, gamma, anchors),
    )

    def write(work: Path, state: Path) -> dict[str, object]:
        """Write the head of the best evaluation, in z-lab's layout. There are no notes."""
        layout.write(work, content, student.best_weights(state, target))
        return {}

    return OpenStudent(module=student, setup=setup, write=write)
