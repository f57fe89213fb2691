"""Settings of prune and prune-masks."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel

from draftlab.config import inputs
from draftlab.config.base import TRAINING, Only, OutputConfig, option
from draftlab.config.shared import (
    CheckpointSettings,
    Count,
    Device,
    LossName,
    TrainingSettings,
    Vocab,
    data,
    device,
    draft_vocab,
    reweigh_steps,
    seed,
    source,
    warmup_ratio,
)
from draftlab.console import note
from draftlab.errors import UserError
from draftlab.model import families
from draftlab.model.families import shape_name
from draftlab.model.hf_files import is_llama
from draftlab.model.hf_shapes import planned_shape
from draftlab.model.shape import Shape, check, parse_count

Method = Literal["activation", "random", "first", "magnitude"]
Depth = Literal["influence", "contiguous", "even", "greedy"]
SHAPE, CALIBRATION = "Shape of the draft", "Calibration and refit"  # panels of --help


class RefitSettings(BaseModel):
    """Adjustments after the cut that make the draft follow the source."""

    rescale_norms: bool = option(True, "Rescale the norms to the smaller width.", panel=CALIBRATION, advanced=True)
    refit: bool = option(
        True, "Refit o_proj and down_proj to the source's residual stream.", panel=CALIBRATION, advanced=True
    )
    refit_head: bool = option(False, "Refit lm_head to the source's logits.", panel=CALIBRATION, advanced=True)
    ridge: float = option(0.005, "Pull of the refit toward the cut weights.", ge=1e-8, panel=CALIBRATION, advanced=True)


class CutConfig(RefitSettings, OutputConfig, CheckpointSettings):
    """The source, the shape to cut from it, and the text to calibrate on."""

    layers: int | None = option(None, "Layers to keep.", ge=1, panel=SHAPE)
    width: int | None = option(None, "Hidden dimensions to keep.", ge=1, panel=SHAPE)
    heads: int | None = option(None, "Query heads to keep. Default: width / head_dim.", ge=1, panel=SHAPE)
    kv_heads: int | None = option(
        None, "Key-value heads to keep. Default: the source's ratio.", ge=1, panel=SHAPE, advanced=True
    )
    ffn: int | None = option(None, "FFN neurons to keep. Default: the source's ratio.", ge=1, panel=SHAPE)
    params: Count = option(None, "Total parameters, as in 1.3b: solves for the FFN.", panel=SHAPE)
    multiple_of: int = option(
        16, "The FFN is a multiple of this; 256 suits GGUF's K-quants.", ge=1, panel=SHAPE, advanced=True
    )
    shape: Path | None = option(
        None, "Shape file in place of all these sizes.", panel=SHAPE, advanced=True, reads=inputs.shape_file
    )
    vocab: Vocab = draft_vocab("--outputs, or of --data", panel=SHAPE)
    outputs: Path | None = option(
        None,
        "Outputs of the target (draftlab outputs build) to calibrate on, and to count the ids of --vocab in.",
        panel=CALIBRATION, reads=inputs.store,
    )  # fmt: skip
    untie: bool = option(
        False, "Give the draft a head of its own where the source ties it to the embedding: its residual stream can "
        "then be rotated, and its head refitted.", panel=SHAPE, advanced=True,
    )  # fmt: skip
    source: str = source(reads=inputs.shape)
    data: str = data("Calibration text: SOURCE, or SOURCE=WEIGHT,SOURCE=WEIGHT.")
    calibration_tokens: int = option(32768, "Tokens of calibration text.", ge=1, panel=CALIBRATION, advanced=True)
    seq_len: int = option(512, "Tokens per calibration sequence.", ge=8, panel=CALIBRATION, advanced=True)
    device: Device = device()

    prefix: ClassVar[str]
    only = (
        Only(
            ("layers", "width", "heads", "kv_heads", "ffn", "params"),
            lambda c: c.shape is None,
            "leave out what --shape FILE sets",
        ),
        Only(
            ("outputs",),
            lambda c: c.calibrates or c.vocab or c.shape,
            "nothing is calibrated, and --vocab counts no ids in them",
        ),
        Only(("multiple_of",), lambda c: c.shape is None and c.ffn is None, "the FFN is set by --ffn or --shape"),
        Only(("ridge",), lambda c: c.refit or c.refit_head, "nothing is refitted"),
        Only(("calibration_tokens",), lambda c: c.calibrates, "nothing is calibrated or refitted"),
    )

    @property
    def calibrates(self) -> bool:
        """Return whether the draft depends on calibration text."""
        return self.rescale_norms or self.refit or self.refit_head

    def default_name(self) -> str:
        head = "" if self.vocab is None else f"-v{self.vocab}"
        return f"{self.prefix}-{shape_name(self.shapes()[2])}{head}"

    def check(self, *, weights: bool) -> None:
        super().check(weights=weights)
        self.shapes(weights=weights)

    def shapes(self, *, weights: bool = False) -> tuple[Path | Shape, Shape, Shape]:
        """Return the source (its directory, or a shape without weights), its shape, and the shape to cut from it.

        Raises:
            UserError: there is no such source, or it does not hold the shape asked for.
        """
        _, place = families.locate_shape(self.source, weights)
        if weights and isinstance(place, Shape):
            raise UserError(f"--source {self.source} is a shape without weights; only --dry-run works with it")
        have = planned_shape(place) if isinstance(place, Path) else place
        llama = is_llama(place) if isinstance(place, Path) else not have.options - {"untied"}
        if self.untie and not have.tied:
            raise UserError(f"--untie: {self.source} has a head of its own already; leave it out")
        have = have.model_copy(update={"tied": have.tied and not self.untie})
        sizes = {
            "layers": self.layers, "hidden": self.width, "heads": self.heads, "kv_heads": self.kv_heads,
            "ffn": self.ffn, "params": parse_count(self.params) if self.params else None,
        }  # fmt: skip
        shape, preset = have, None
        if self.vocab is None or self.shape is not None or any(size is not None for size in sizes.values()):
            shape, preset = families.requested_shape(have, **sizes, multiple_of=self.multiple_of, file=self.shape)
        if preset is not None and weights:
            note(f"shape {preset}: {shape.describe()}")
        check(shape, llama=llama)
        return place, have, self._with_head(have, shape)

    def _with_head(self, have: Shape, shape: Shape) -> Shape:
        """Raises UserError: a head is asked for that cannot be cut from the source's."""
        size = self.vocab or shape.draft_vocab
        if have.draft_vocab not in (None, size):
            raise UserError(f"a head of {size} ids: the source's is trimmed already, to {have.draft_vocab:,}")
        if size is not None and size >= have.vocab:
            raise UserError(f"a head of {size} ids: want fewer than the source's {have.vocab:,}")
        return shape.model_copy(update={"draft_vocab": size})


class PruneConfig(CutConfig):
    method: Method = option("activation", "Keep what activations rate highest, or a baseline's choice.", advanced=True)
    depth: Depth = option(
        "influence", "Which layers stay; greedy holds the whole source in memory.", panel=CALIBRATION, advanced=True
    )
    basis: Literal["auto", "pca", "coordinates"] = option(
        "auto", "pca rotates the residual stream before its width is cut; auto: unless the head stays tied.",
        panel=CALIBRATION, advanced=True,
    )  # fmt: skip
    scores_cache: Path | None = option(
        None, "File to keep the importance scores in, to cut many shapes.", panel=CALIBRATION, advanced=True
    )
    seed: int = seed()

    prefix = "prune"
    only = (
        *CutConfig.only,
        Only(("data",), lambda c: c.outputs is None, "--outputs are the text"),
        Only(("depth", "basis", "scores_cache"), lambda c: c.method == "activation", "belongs to --method activation"),
        Only(("seed",), lambda c: c.calibrates or c.method == "random", "nothing is random"),
    )

    @property
    def calibrates(self) -> bool:
        return self.method == "activation" or super().calibrates


class PruneMasksConfig(TrainingSettings, CutConfig):
    train_weights: Literal["frozen", "lora", "full"] = option(
        "frozen", "What trains besides the masks: nothing, LoRA adapters or all weights.", panel=TRAINING
    )
    loss: LossName = option("fkl", "ce on text, or a divergence from the target: fkl, rkl, jsd(0.5).", panel=TRAINING)
    target: str | None = option(
        None, "Checkpoint that the loss compares with. Default: the source.", panel=TRAINING, reads=inputs.checkpoint
    )
    steps: int = option(300, "Optimiser steps.", ge=1, panel=TRAINING)
    seq_len: int = option(512, "Tokens per sequence.", ge=8, panel=TRAINING)
    lr: float = option(1.0e-4, "Peak learning rate of the weights; masks have their own.", gt=0, panel=TRAINING)
    optimizer: Literal["adamw", "muon"] = option(
        "adamw", "muon: Muon for the matrices of the blocks, AdamW for the rest.", panel=TRAINING, advanced=True
    )
    reweigh_steps: int = reweigh_steps()
    warmup_ratio: float = warmup_ratio(0.1)

    prefix = "prune-masks"
    only = (
        *CutConfig.only,
        Only(("lr", "optimizer", "weight_decay"), lambda c: c.train_weights != "frozen", "the weights are frozen"),
        Only(("target",), lambda c: c.loss.strip() != "ce", "--loss ce compares with no target"),
        Only(("patience",), lambda c: False, "masks reach their shape at the last step"),
        Only(("torch_compile",), lambda c: False, "masked models are not compiled"),
    )

    def check(self, *, weights: bool) -> None:
        super().check(weights=weights)
        if self.target is not None:
            inputs.check_vocabularies(self.target, self.source)
