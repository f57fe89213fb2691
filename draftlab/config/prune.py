"""Settings of prune."""

from pathlib import Path
from typing import Literal

from draftlab.config.base import TRAINING, Only, OutputConfig, option
from draftlab.config.shared import Count, Device, Vocab, data, device, draft_vocab, seed, source

SHAPE, CALIBRATION = "Shape of the draft", "Calibration and refit"  # panels of --help
SIZES = ("layers", "width", "ffn", "params")


class PruneConfig(OutputConfig):
    """The source, the shape to cut from it, how its parts are chosen, and the text to calibrate on."""

    layers: int | None = option(None, "Layers to keep.", ge=1, panel=SHAPE)
    width: int | None = option(None, "Hidden dimensions to keep.", ge=1, panel=SHAPE)
    ffn: int | None = option(
        None, "FFN neurons to keep. Default: the source's ratio.", ge=1, panel=SHAPE
    )
    params: Count = option(None, "Total parameters, as in 1.3b: solves for the FFN.", panel=SHAPE)
    shape: Path | None = option(
        None, "Shape file in place of all these sizes.", panel=SHAPE, advanced=True
    )
    vocab: Vocab = draft_vocab("--outputs, or of --data", panel=SHAPE)
    untie: bool = option(
        False,
        "Give the draft a head of its own where the source ties it to the embedding: its residual stream can then be "
        "rotated, and its head refitted.",
        panel=SHAPE,
        advanced=True,
    )
    source: str = source()
    data: str = data("Calibration text: SOURCE, or SOURCE=WEIGHT,SOURCE=WEIGHT.")
    outputs: Path | None = option(
        None,
        "Outputs of the target (draftlab outputs build) to calibrate on, and to count the ids of --vocab in.",
        panel=CALIBRATION,
    )
    calibration_tokens: int = option(
        32768, "Tokens of calibration text.", ge=1, panel=CALIBRATION, advanced=True
    )
    seq_len: int = option(512, "Tokens per sequence.", ge=8, panel=CALIBRATION, advanced=True)
    refit: Literal["none", "norms", "layers", "head"] = option(
        "layers",
        "Adjustments after the cut: norms to the smaller width; layers: also o_proj and down_proj to the source's "
        "residual stream; head: also lm_head to the source's logits.",
        panel=CALIBRATION,
        advanced=True,
    )
    method: Literal["importance", "masks", "random", "first", "magnitude"] = option(
        "importance",
        "Keep what activations rate highest, what trained masks (Sheared LLaMA) select, or a baseline's choice.",
    )
    depth: Literal["influence", "even"] = option(
        "influence",
        "Which layers stay: those that turn their input most, or evenly spaced layers.",
        panel=CALIBRATION,
        advanced=True,
    )
    scores_cache: Path | None = option(
        None,
        "File to keep the importance scores in, to cut many shapes.",
        panel=CALIBRATION,
        advanced=True,
    )
    steps: int = option(300, "Optimizer steps of the masks.", ge=1, panel=TRAINING)
    batch_size: int = option(
        16, "Sequences per step, over all processes.", ge=1, panel=TRAINING, advanced=True
    )
    lr: float | None = option(
        None,
        "Train the weights with the masks, with this peak learning rate. Default: they are frozen.",
        gt=0,
        panel=TRAINING,
        advanced=True,
    )
    device: Device = device()
    seed: int = seed()

    only = (
        Only(SIZES, lambda c: c.shape is None, "leave out what --shape FILE sets"),
        Only(
            ("outputs",),
            lambda c: c.calibrates or c.vocab or c.shape,
            "nothing is calibrated, and --vocab counts no ids in them",
        ),
        Only(
            ("data",),
            lambda c: c.outputs is None or c.method == "masks",
            "leave it out: the text is that of --outputs",
        ),
        Only(("calibration_tokens",), lambda c: c.calibrates, "nothing is calibrated or refitted"),
        Only(
            ("depth", "scores_cache"),
            lambda c: c.method == "importance",
            "belongs to --method importance",
        ),
        Only(
            ("steps", "batch_size", "lr"),
            lambda c: c.method == "masks",
            "belongs to --method masks",
        ),
        Only(
            ("seed",),
            lambda c: c.calibrates or c.method in ("random", "masks"),
            "nothing is random",
        ),
    )

    @property
    def calibrates(self) -> bool:
        """Return whether the draft depends on calibration text."""
        return self.method == "importance" or self.refit != "none"
