"""Mask training on disk: masks under their constraint, with the weights frozen, adapted by LoRA or free."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftlab.config.prune import PruneMasksConfig
from draftlab.console import note
from draftlab.data import open_batches, open_heldout
from draftlab.distill.checkpointer import best_weights
from draftlab.distill.lora import adapt, merged_weights
from draftlab.distill.losses import parse_loss
from draftlab.distill.optimizers import training_dtype
from draftlab.distill.run import fit
from draftlab.distill.trackers import check, tracked
from draftlab.distill.trainer import TrainingSetup
from draftlab.distill.training_setup import reweighing
from draftlab.model import checkpoint, hub
from draftlab.model.shape import Shape
from draftlab.model.tokenizer import common_vocabulary
from draftlab.output import Output
from draftlab.prune.cut import Keep
from draftlab.prune.masks.hard_concrete import Masks
from draftlab.prune.masks.masked_model import Folded, masked
from draftlab.prune.source import Source

MASKS_FILE = "masks/masks.safetensors"  # in a directory: runtimes load every safetensors file beside config.json
LORA_RANK = 16
HELDOUT_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedMasks:
    masks: Masks
    keep: Keep
    weights: Folded

    @property
    def basis(self) -> Tensor:
        """[D, D']: maps the source's residual stream to the draft's, soft masks included."""
        hidden = self.masks.deterministic().hidden.detach().cpu()
        return torch.diag(hidden)[:, self.keep.hidden]


def train_masks(config: PruneMasksConfig, source: Source, shape: Shape, output: Output) -> TrainedMasks:
    """Train masks that cut the source to shape; checkpoints in output.state, from which a killed run resumes.

    Raises:
        UserError: unequal vocabularies, or a loss that is not finite.
    """
    check(config.report_to)
    masks = Masks(source.shape, shape, config.seed)
    student = _student(config, source)
    setup = _setup(config, source, student)
    with masked(student, masks, float(str(source.config["rms_norm_eps"]))), tracked(config.report_to, output) as log:
        fit(student, setup, config, state=output.state, what="masks", constraint=masks, log=log)
    with torch.no_grad():  # under FSDP the module holds a part of its parameters
        for name, trained in best_weights(output.state, "constraint").items():
            masks.get_parameter(name).copy_(trained)
    gaps = ", ".join(f"{name} {gap:.3f}" for name, gap in masks.gaps().items())
    note(f"expected minus target sparsity: {gaps}")
    weights = Folded(_trained_weights(config, source, output.state), source.shape, masks.deterministic())
    return TrainedMasks(masks=masks, keep=masks.keep(), weights=weights)


def _setup(config: PruneMasksConfig, source: Source, student: PreTrainedModel) -> TrainingSetup:
    tokenizer = checkpoint.load_tokenizer(source.directory)
    teacher, loss = None, parse_loss(config.loss)
    if loss.needs_teacher:
        target = hub.locate(config.target) if config.target else source.directory
        common_vocabulary(source.directory, target)
        teacher = checkpoint.load_model(target, checkpoint.DTYPES[training_dtype(config.training_dtype)])
    sizes: dict[str, Any] = {"rows": config.batch_size, "seq_len": config.seq_len}
    batches = open_batches(config.data, tokenizer, steps=config.steps, seed=config.seed, **sizes)
    if config.reweigh_steps:
        dtype = checkpoint.computed_dtype(torch.bfloat16, student.device)
        reference = checkpoint.load_model(source.directory, dtype, student.device).eval()
        batches = reweighing(batches, reference, tokenizer, config.reweigh_steps)
    heldout = open_heldout(config.data, tokenizer, most_rows=HELDOUT_ROWS, **sizes)
    return TrainingSetup(teacher=teacher, batches=batches, heldout=heldout, loss=loss)


def _student(config: PruneMasksConfig, source: Source) -> PreTrainedModel:
    wide = config.train_weights == "full" or training_dtype(config.training_dtype) == "float32"
    student = checkpoint.load_model(source.directory, torch.float32 if wide else source.dtype)
    if config.train_weights == "frozen":
        student.requires_grad_(False)
    if config.train_weights == "full" and source.untied:
        _untie(student)
    return adapt(student, LORA_RANK, config.seed) if config.train_weights == "lora" else student


def _untie(student: PreTrainedModel) -> None:
    head = student.get_output_embeddings()
    assert head is not None  # every causal language model has one
    head.weight = nn.Parameter(head.get_parameter("weight").detach().clone())
    student.config.tie_word_embeddings = False


def _trained_weights(config: PruneMasksConfig, source: Source, state: Path) -> Mapping[str, Tensor]:
    if config.train_weights == "frozen":
        return source.weights
    trained = best_weights(state, "student")
    whole = merged_weights(source.directory, LORA_RANK, trained) if config.train_weights == "lora" else trained
    return source.with_head({name: tensor.to(source.dtype) for name, tensor in whole.items()})
