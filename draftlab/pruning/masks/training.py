"""Prune with masks that are trained to a target sparsity, while the weights are frozen or trained as well."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftlab.console import is_main_process, note
from draftlab.data import open_batches, open_heldout
from draftlab.model import checkpoint
from draftlab.model.shape import Shape
from draftlab.model.trimmed_head import output_head
from draftlab.pruning.cut import Keep
from draftlab.pruning.masks.hard_concrete import Masks
from draftlab.pruning.masks.masked_model import Folded, masked
from draftlab.pruning.run import Prune, PrunedDraft, Text
from draftlab.pruning.source import Source
from draftlab.runs.atomic import remove_state
from draftlab.training.checkpointer import best_weights
from draftlab.training.loop import Hardware, Loop
from draftlab.training.losses import parse_loss
from draftlab.training.optimizers import training_dtype
from draftlab.training.reweighing import Reweighing
from draftlab.training.run import TrainingResult, claimed_state, fit
from draftlab.training.trainer import TrainingSetup

LR = 1.0e-4  # learning rate of the trainer if the weights are frozen; masks have a separate rate
HELDOUT_ROWS = 32
WARM_UP = 0.1  # share of the steps in which the learning rate rises
SAVE_STEPS = 100  # most steps between checkpoints to resume from


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskTraining:
    """Settings of mask training.

    lr: Peak learning rate of the model's weights. None freezes these weights. reweighing: Settings for updates of the
    shares of a data mixture by held-out losses. None keeps the shares fixed.
    """

    steps: int
    batch_size: int
    lr: float | None = None
    reweighing: Reweighing | None = None

    def loop(self, seed: int) -> Loop:
        """Return the settings of the training loop."""
        return Loop(
            steps=self.steps,
            batch_size=self.batch_size,
            warmup_ratio=WARM_UP,
            seed=seed,
            save_steps=max(1, min(SAVE_STEPS, self.steps // 4)),
            optimizer="adamw",
            lr=self.lr or LR,
        )


def prune_by_masks(cut: Prune, training: MaskTraining) -> PrunedDraft:
    """Train masks, and write the draft that the masks select. Several processes may call this. A killed run resumes.

    Raises:
        UserError: The loss is not finite, or the run cannot use its state directory (see claimed_state).
    """
    cut.check()
    if cut.is_copy:
        return cut.copy()
    source = cut.source
    reference = training.reweighing.reference if training.reweighing is not None else None
    read = [source.directory, *([reference] if isinstance(reference, Path) else [])]
    state = claimed_state(cut.output, read)
    keep, basis, weights, trained = _select(source, cut.shape, cut.text, training, state)
    if not is_main_process():
        return PrunedDraft(source=source.shape, shape=cut.shape, keep=keep, agreement=None, disk_bytes=0)
    pruned = cut.write(keep, basis, weights, skipped_steps=trained.skipped_steps, lr_from_step=trained.lr_from_step)
    remove_state(state)
    return pruned


def _select(
    source: Source, shape: Shape, text: Text, training: MaskTraining, state: Path
) -> tuple[Keep, Tensor, Mapping[str, Tensor], TrainingResult]:
    """Train masks that cut the source to a shape. Return keep, basis and weights for Prune.write, and measurements.

    state: Directory of checkpoints.
    """
    masks = Masks(source.shape, shape, text.seed)
    student = _student(source, training)
    setup = _setup(source, text, training)
    with masked(student, masks, float(str(source.config["rms_norm_eps"]))):
        loop = training.loop(text.seed)
        result = fit(student, setup, loop, state=state, what="masks", constraint=masks)
    with torch.no_grad():  # under FSDP the module has only a part of its parameters
        for name, trained in best_weights(state, "constraint").items():
            masks.get_parameter(name).copy_(trained)
    gaps = ", ".join(f"{name} {gap:.3f}" for name, gap in masks.gaps().items())
    note(f"difference between the masks' sparsity and the sparsity of the requested shape: {gaps}")
    weights = Folded(_trained_weights(source, training, state), source.shape, masks.deterministic())
    keep = masks.keep()
    hidden = masks.deterministic().hidden.detach().cpu()
    # the basis maps the source's residual stream to the draft's, so it includes masks between 0 and 1
    return keep, torch.diag(hidden)[:, keep.hidden], weights, result


def _setup(source: Source, text: Text, training: MaskTraining) -> TrainingSetup:
    tokenizer = checkpoint.load_tokenizer(source.directory)
    dtype = training_dtype("auto")
    sizes: dict[str, Any] = {"rows": training.batch_size, "seq_len": text.seq_len}
    batches = open_batches(text.data, tokenizer, steps=training.steps, seed=text.seed, **sizes)
    heldout = open_heldout(text.data, tokenizer, most_rows=HELDOUT_ROWS, **sizes)
    if training.reweighing is not None:
        batches = training.reweighing.start(batches, source.directory, dtype, Hardware())
    teacher = checkpoint.load_model(source.directory, dtype)
    return TrainingSetup(teacher=teacher, batches=batches, heldout=heldout, loss=parse_loss("fkl"))


def _student(source: Source, training: MaskTraining) -> PreTrainedModel:
    wide = training.lr is not None or training_dtype("auto") == torch.float32
    student = checkpoint.load_model(source.directory, torch.float32 if wide else source.dtype)
    if training.lr is None:
        student.requires_grad_(False)
    elif source.untied:
        _untie(student)
    return student


def _untie(student: PreTrainedModel) -> None:
    head = output_head(student)
    head.weight = nn.Parameter(head.get_parameter("weight").detach().clone())
    student.config.tie_word_embeddings = False


def _trained_weights(source: Source, training: MaskTraining, state: Path) -> Mapping[str, Tensor]:
    if training.lr is None:
        return source.weights
    return source.with_head({name: tensor.to(source.dtype) for name, tensor in best_weights(state, "student").items()})
