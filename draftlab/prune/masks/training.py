"""Learning masks on disk: train them under their constraint, with the weights frozen, adapted or free."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftlab.console import note
from draftlab.data import open_batches, open_heldout
from draftlab.distill.checkpointer import best_weights, process_state
from draftlab.distill.lora import adapt, merged_weights
from draftlab.distill.losses import parse_loss
from draftlab.distill.run import fit
from draftlab.distill.trainer import Settings, TrainingSetup
from draftlab.distill.training_setup import reweighing
from draftlab.model import checkpoint
from draftlab.model.shape import Shape
from draftlab.model.tokenizer import common_vocabulary
from draftlab.prune.cut import Keep
from draftlab.prune.masks.hard_concrete import Masks
from draftlab.prune.masks.masked_model import Folded, masked

Trained = Literal["frozen", "lora", "full"]
MASKS_FILE = "masks/masks.safetensors"  # apart: runtimes load every safetensors file beside config.json
LORA_RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """How masks are learnt. target: whose distribution a divergence compares with; the source itself if None."""

    settings: Settings
    weights: Trained
    rows: int
    seq_len: int
    target: Path | None
    reweigh_every: int = 0  # steps between changes of the mixture's weights; 0: fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    masks: Masks
    keep: Keep
    weights: Folded

    @property
    def basis(self) -> Tensor:
        """[D, D']: a stream of the source as the draft has it, soft masks included."""
        hidden = self.masks.deterministic().hidden.detach().cpu()
        return torch.diag(hidden)[:, self.keep.hidden]


def learn(source: Path, have: Shape, shape: Shape, how: Learning, *, data: str, state: Path) -> Learned:
    """Train masks that cut source to shape; state keeps checkpoints, so that a killed run goes on.

    Raises:
        UserError: unequal vocabularies, or a loss that is not finite.
    """
    settings = how.settings
    masks = Masks(have, shape, settings.seed)
    student = _student(source, how)
    teacher = None
    if parse_loss(settings.loss).needs_teacher:
        teacher_dir = how.target or source
        common_vocabulary(source, teacher_dir)
        teacher = checkpoint.load_model(teacher_dir, checkpoint.DTYPES[settings.dtype])
    tokenizer = checkpoint.load_tokenizer(source)
    sizes = {"rows": how.rows, "seq_len": how.seq_len}
    batches = open_batches(data, tokenizer, steps=settings.steps, seed=settings.seed, **sizes)
    if how.reweigh_every:
        reference = checkpoint.load_model(source, torch.bfloat16, student.device).eval()
        batches = reweighing(batches, reference, tokenizer, how.reweigh_every)
    heldout = open_heldout(data, tokenizer, most_rows=32, **sizes)
    eps = float(str(checkpoint.read_config(source)["rms_norm_eps"]))
    with masked(student, masks, eps):
        setup = TrainingSetup(teacher=teacher, batches=batches, heldout=heldout)
        fit(student, setup, settings, state=state, what="masks", constraint=masks)
    with torch.no_grad():  # under FSDP the module's own parameters are but a part
        for name, trained in best_weights(state, "constraint").items():
            masks.get_parameter(name).copy_(trained)
    gaps = ", ".join(f"{name} {gap:.3f}" for name, gap in masks.gaps().items())
    note(f"expected less wanted sparsity: {gaps}")
    weights = Folded(_trained(source, how.weights, state), have, masks.deterministic())
    return Learned(masks=masks, keep=masks.keep(), weights=weights)


def _trained(source: Path, weights: Trained, state: Path) -> Mapping[str, Tensor]:
    """The source's weights after training."""
    if weights == "frozen":
        return checkpoint.Weights(source, _computed_dtype(source))
    found = best_weights(state, "student")
    whole = merged_weights(source, LORA_RANK, found) if weights == "lora" else found
    return {name: tensor.to(_computed_dtype(source)) for name, tensor in whole.items()}


def _computed_dtype(source: Path) -> torch.dtype:
    return checkpoint.compute_dtype(source, cast(torch.device, process_state().device))


def _student(source: Path, how: Learning) -> PreTrainedModel:
    full = how.weights == "full" or how.settings.dtype == "float32"
    student = checkpoint.load_model(source, torch.float32 if full else _computed_dtype(source))
    if how.weights == "frozen":
        student.requires_grad_(False)
    if how.weights == "lora":
        return adapt(student, LORA_RANK, how.settings.seed)
    return student
