"""The settings of the commands `profile` and `predict`. Torch is not loaded."""

from pathlib import Path

from pydantic import field_validator

from draftlab.config.base import (
    MAX_K,
    OUTPUT,
    Config,
    DraftedTokens,
    Numbers,
    Only,
    OutputConfig,
    numbers,
    option,
)
from draftlab.config.shared import (
    CheckpointSettings,
    EngineMode,
    WeightsDtype,
    device,
    device_map,
    dtype,
    mode,
    threads,
)

PROFILE_HELP = (
    "Latencies: an output of draftlab profile; SHAPE@LAW, in which LAW is an output of draftlab profile --law; or "
    "MODEL@DEVICE,MODE[,DTYPE], computed from constants of the device, in which MODEL is a shape or a checkpoint "
    "(without weights is enough)."
)


class ProfileConfig(OutputConfig, CheckpointSettings):
    """The settings of the command `profile`: the models or shapes whose forward passes are timed."""

    models: list[str] = option(
        help="Checkpoints, or shapes, which are timed with random weights. With --law: one checkpoint or shape, which "
        "is scaled down; or several shapes.",
        argument=True,
    )
    law: bool = option(
        False,
        "Measure shapes with random weights, and fit a law of latency to their layers, width and bytes.",
    )
    k: int | None = option(
        None,
        "Largest K: passes over 1 to K + 1 tokens are timed. Default: 8; 1 with --law.",
        ge=1,
        le=MAX_K,
    )
    batch: Numbers = numbers("1", "Batch sizes, as 1,4,16.")
    context: Numbers | None = option(
        None,
        "Contexts: numbers of cached tokens before a pass. Prompts of these lengths are timed, too. Default: "
        "16,128,480; 16,256 with --law.",
        typed=str,
    )
    repeats: int | None = option(
        None,
        "Number of times that every pass is timed, after a warm-up. Default: 20; 10 with --law.",
        ge=3,
    )
    mode: EngineMode = mode()
    dtype: WeightsDtype = dtype()
    device: str = device()
    threads: int | None = threads()
    device_map: str | None = device_map()

    only = (
        Only(
            ("device_map",),
            lambda c: c.mode in ("auto", "eager"),
            "works only with --mode eager, because only transformers can spread a model over devices",
        ),
        Only(
            ("device_map",),
            lambda c: not c.law,
            "--law times shapes in draftlab's engine, which uses one device",
            refused=False,
        ),
    )


class PredictConfig(Config):
    """The settings of the command `predict`: latency profiles of drafts and target, and acceptance of the drafts."""

    target_profile: str = option(help=PROFILE_HELP)
    acceptance: list[str] = option(
        help="Acceptance: an output of replay or score; the probability that a drafted token is accepted, as 0.7; or "
        "tokens per target pass at a K, as 2.8@4. Give one value for all drafts, or repeat the option for each draft."
    )
    draft_profile: list[str] = option(
        factory=list,
        help=PROFILE_HELP
        + " For an EAGLE-3 head, MODEL is the head, or its target with ,eagle=IDS. Repeat the option for several "
        "drafts. Leave it out for a drafter without a model, such as prompt lookup, whose replay is the --acceptance.",
    )
    k: DraftedTokens = numbers("1-8", "Numbers of drafted tokens per step, as 1-8 or 2,4,8.")
    batch: Numbers = numbers(
        "1",
        "Batch sizes (numbers of concurrent requests), as 1,4,16; the table by K is for the smallest.",
    )
    context: Numbers | None = option(None, "Prompt lengths. Default: the lengths in --acceptance, or 128.", typed=str)
    max_new_tokens: int = option(
        128,
        "Number of tokens of each generated text, if --acceptance is a number.",
        ge=2,
        le=1_000_000,
    )
    extrapolate: bool = option(
        False,
        "Extrapolate beyond the numbers of tokens and the contexts that the profiles measured.",
    )
    plot: Path | None = option(
        None,
        "Picture to write, .svg or .png: the speed-up of every draft by K.",
        panel=OUTPUT,
        reads="nothing",
        acts="always",
    )

    @field_validator("plot")
    @classmethod
    def _is_a_picture(cls, plot: Path | None) -> Path | None:
        if plot is not None and plot.suffix not in (".svg", ".png"):
            raise ValueError("must end in .svg or .png")
        return plot
