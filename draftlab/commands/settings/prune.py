"""The settings of the command `prune`. Torch is not loaded."""

from pathlib import Path
from typing import Literal

from draftlab.config.base import TRAINING, Only, OutputConfig, advanced_option, option
from draftlab.config.shared import (
    CheckpointSettings,
    Count,
    Vocab,
    data,
    device,
    draft_vocab,
    reference_losses,
    reweigh_steps,
    seed,
    source,
)

# panels of --help
SHAPE = "Shape of the draft"
CALIBRATION = "Calibration and refit"
SIZES = ("layers", "width", "ffn", "params")


class PruneConfig(OutputConfig, CheckpointSettings):
    """The settings of the command `prune`: source, shape of the draft, choice of weights, and calibration text."""

    layers: int | None = option(None, "Number of layers to keep.", ge=1, panel=SHAPE)
    width: int | None = option(None, "Number of hidden dimensions to keep.", ge=1, panel=SHAPE)
    ffn: int | None = option(
        None,
        "Number of FFN neurons to keep. Default: as many per hidden dimension as in the source.",
        ge=1,
        panel=SHAPE,
    )
    params: Count = option(
        None,
        "Number of parameters of the draft, as 1.3b; the FFN size is chosen to match.",
        panel=SHAPE,
    )
    shape: Path | None = option(
        None,
        "Shape, which sets the numbers of layers, hidden dimensions, FFN neurons and parameters: a shape file, or the "
        "name of a shape that comes with draftlab, such as wide-796m.",
        panel=SHAPE,
        reads="shape",
    )
    vocab: Vocab = draft_vocab("--outputs or --data", panel=SHAPE)
    untie: bool = advanced_option(
        False,
        "Give the draft a separate lm_head, for a source that ties lm_head to the embedding. prune can then rotate the "
        "residual stream and refit lm_head.",
        panel=SHAPE,
    )
    source: str = source()
    data: str = data("Calibration text: one SOURCE, or a mixture, SOURCE=WEIGHT,SOURCE=WEIGHT.")
    outputs: Path | None = option(
        None,
        "Stored target outputs (draftlab outputs build) to calibrate on, in place of --data. --vocab then keeps the "
        "most frequent token ids of these outputs.",
        panel=CALIBRATION,
    )
    calibration_tokens: int = advanced_option(32768, "Number of tokens of calibration text.", ge=1, panel=CALIBRATION)
    seq_len: int = advanced_option(512, "Length of each sequence in tokens.", ge=8, panel=CALIBRATION)
    refit: Literal["none", "norms", "layers", "head"] | None = advanced_option(
        None,
        "Weights to adjust after the cut. none: no weights; norms: scale the norms to the smaller width; layers: also "
        "fit o_proj and down_proj to the source's residual stream; head: also fit lm_head to the source's logits. "
        "Default: layers, or none with --lr, which trains weights away from the source's.",
        panel=CALIBRATION,
    )
    method: Literal["importance", "masks", "random", "first"] = option(
        "importance",
        "How to choose the weights to keep. importance: by activations; masks: by trained masks (Sheared LLaMA); "
        "random, first: baselines.",
    )
    depth: Literal["influence", "even"] = advanced_option(
        "influence",
        "Which layers to keep. influence: the layers that change their input most; even: evenly spaced layers.",
        panel=CALIBRATION,
    )
    scores_cache: Path | None = advanced_option(
        None,
        "File for the importance scores. If it exists, the scores are read from it, and no calibration is needed.",
        panel=CALIBRATION,
        reads="nothing",
        acts="always",
    )
    steps: int = option(300, "Number of optimizer steps that train the masks.", ge=1, panel=TRAINING)
    batch_size: int = advanced_option(
        16, "Number of sequences per step, over all processes.", ge=1, le=1 << 16, panel=TRAINING
    )
    lr: float | None = advanced_option(
        None,
        "Train the weights along with the masks, with this peak learning rate. Default: the weights are frozen.",
        gt=0,
        panel=TRAINING,
    )
    reweigh_steps: int = reweigh_steps()
    reference_losses: str | None = reference_losses("source")
    device: str = device()
    seed: int = seed()

    only = (
        Only(SIZES, lambda c: c.shape is None, "leave it out, because --shape sets all sizes"),
        Only(
            ("outputs",),
            lambda c: c.calibrates or c.vocab or c.shape,
            "leave it out, or add --vocab: without a refit, this --method reads text only to choose token ids",
        ),
        Only(
            ("data",),
            lambda c: c.outputs is None or c.method == "masks",
            "leave it out, because --outputs has the text",
        ),
        Only(
            ("calibration_tokens",),
            lambda c: c.calibrates,
            "without a refit, this --method reads no calibration text",
            refused=False,
        ),
        Only(
            ("depth", "scores_cache"),
            lambda c: c.method == "importance",
            "works only with --method importance",
            refused=False,
        ),
        Only(
            ("steps", "batch_size", "lr", "reweigh_steps"),
            lambda c: c.method == "masks",
            "works only with --method masks",
            refused=False,
        ),
        Only(("reference_losses",), lambda c: c.reweigh_steps, "works only with --reweigh-steps N", refused=False),
        Only(
            ("seed",),
            lambda c: c.calibrates or c.method in ("random", "masks"),
            "nothing in this run is random",
            refused=False,
        ),
    )

    @property
    def text_source(self) -> str | None:
        return self.data if self.outputs is None or self.method == "masks" else None

    @property
    def calibrates(self) -> bool:
        """Return whether the draft's weights depend on calibration text."""
        return self.method == "importance" or self.refitted != "none"

    @property
    def refitted(self) -> str:
        """Return which weights are adjusted after the cut: the value of the setting `refit`, or its default."""
        return self.refit or ("layers" if self.lr is None else "none")
