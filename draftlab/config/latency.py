"""Settings of profile, profile-servers, law, law-fit and predict."""

from pathlib import Path
from typing import Literal

from pydantic import model_validator
from typing_extensions import Self

from draftlab.config import inputs
from draftlab.config.base import MAX_K, SERVER, Config, DraftedTokens, Numbers, Only, OutputConfig, numbers, option
from draftlab.config.shared import (
    CheckpointSettings,
    Device,
    EngineMode,
    WeightsDtype,
    data,
    device,
    device_map,
    dtype,
    mode,
    source,
    target,
    threads,
)

PROFILE_HELP = (
    "Output of draftlab profile, SHAPE@LAW (output of draftlab law) or SHAPE@DEVICE,MODE[,DTYPE] (constants; with "
    "eagle=IDS of an EAGLE-3 head)."
)
ACCEPTANCE = ("replay", "score", "alpha", "acceptance_length")


class GridConfig(OutputConfig):
    """The passes to time, and how they run."""

    k: int = option(8, "Most drafted tokens: passes over 1 to K + 1 tokens are timed.", ge=1, le=MAX_K)
    batch: Numbers = numbers("1", "Batch sizes, as 1,4,16.")
    context: Numbers = numbers("16,128,480", "Cached tokens before a pass, and lengths of prompts.")
    repeats: int = option(20, "Timed repeats of every pass, after a warm-up.", ge=3)
    mode: EngineMode = mode()
    dtype: WeightsDtype = dtype()
    device: Device = device()
    threads: int | None = threads()


class ProfileConfig(GridConfig, CheckpointSettings):
    """Latency of the passes of some models."""

    models: list[str] = option(
        help="Checkpoints; or shape files and names of shapes, which get random weights.", argument=True,
        reads=inputs.shape,
    )  # fmt: skip
    device_map: str | None = device_map()

    only = (
        Only(
            ("device_map",), lambda c: c.mode in ("auto", "eager"), "transformers runs the models, so use --mode eager"
        ),
    )

    def default_name(self) -> str:
        return "-".join(["profile", *map(_short, self.models)])


class ProfileServersConfig(OutputConfig):
    """Servers of vLLM to time under load: the target alone, and with its draft."""

    server: str = option(
        help="http://HOST:PORT of a vLLM that runs the target alone.", panel=SERVER, reads=inputs.server
    )
    speculative_server: str | None = option(
        None, "http://HOST:PORT of one that drafts, with the largest K of interest.", panel=SERVER,
        reads=inputs.server,
    )  # fmt: skip
    served_model: str | None = option(None, "Model of both servers. Default: their first.", panel=SERVER, advanced=True)
    api_key_file: Path | None = option(None, "File with the servers' API key.", panel=SERVER, advanced=True)
    target: str = target(reads=inputs.config_only)
    draft: str = option("draft", "Name of the draft, or its directory.")
    batch: Numbers = numbers("1,2,4,8", "Batch sizes: streams at once.")
    context: Numbers = numbers("32,160", "Lengths of the prompt.")
    tokens: int = option(64, "Tokens by which a long answer exceeds a short one.", ge=8)
    repeats: int = option(3, "Repeats of every timing.", ge=1)
    data: str = data("Source of held-out text for the prompt.")

    only = (Only(("draft",), lambda c: c.speculative_server is not None, "needs --speculative-server"),)

    def default_name(self) -> str:
        return "profile-servers"


class LawConfig(GridConfig):
    """Latency of shapes with random weights, and the law that it follows."""

    source: str = source(reads=inputs.shape)
    layers: Numbers | None = option(None, "Depths to time. Default: those that span the source.", typed=str)
    widths: Numbers | None = option(None, "Widths to time at every depth. Default: those of the source.", typed=str)
    k: int = option(1, "Most drafted tokens: 1 suffices for drafts.", ge=1, le=MAX_K)
    context: Numbers = numbers("16,256", "Cached tokens before a pass, and lengths of prompts.")
    repeats: int = option(10, "Timed repeats of every pass, after a warm-up.", ge=3)
    plot: Path | None = option(None, "Figure to write, .svg or .png: measured latency and the law.")

    def default_name(self) -> str:
        return f"law-{_short(self.source)}"


class LawFitConfig(Config):
    """A law of profiles that exist already."""

    profiles: Path = option(help="Directory of profiles: output of draftlab law or profile.", argument=True)
    plot: Path | None = option(None, "Figure to write, .svg or .png: measured latency and the law.")


class PredictConfig(Config):
    """Profiles of a pair and its acceptance."""

    draft_profile: list[str] = option(help=PROFILE_HELP + " Repeat for several drafts.")
    target_profile: str = option(help=PROFILE_HELP)
    replay: list[Path] = option(
        factory=list, help="Acceptance from replay.json; one file, or one per draft.", reads=inputs.replay
    )
    score: list[Path] = option(
        factory=list, help="Acceptance from score.json; one file, or one per draft.", reads=inputs.file
    )
    alpha: float | None = option(None, "Acceptance probability of every token.", ge=0, le=1)
    acceptance_length: str | None = option(None, "Tokens per target pass at some K, as 2.8@4.")
    k: DraftedTokens = numbers("1-8", "Numbers of drafted tokens, as 1-8 or 2,4,8.")
    batch: Numbers = numbers("1", "Batch sizes, or streams, as 1,4,16; results by K are of the smallest.")
    context: Numbers | None = option(None, "Prompt lengths. Default: those of the texts, or 128.", typed=str)
    max_tokens: int = option(128, "Tokens per text, with --alpha or --acceptance-length.", ge=2, le=1_000_000)
    extrapolate: bool = option(False, "Extrapolate beyond the widths and contexts of the profiles.")
    server: Literal["vllm"] | None = option(
        None,
        "Predict the steps of this server, and with several --batch its schedule of K. Default: draftlab's engine.",
        flag="--for",
    )
    plot: Path | None = option(None, "Figure to write, .svg or .png: speed-up and best K by batch size.")

    only = (
        Only(("plot",), lambda c: len(c.batch) > 1, "needs several --batch"),
        Only(("plot",), lambda c: len(c.draft_profile) == 1, "draws one draft"),
        Only(
            ("max_tokens",), lambda c: not (c.replay or c.score), "the texts of --replay and --score have their lengths"
        ),
    )

    @model_validator(mode="after")
    def _names_acceptance_once(self) -> Self:
        named = [self.flag(name) for name in ACCEPTANCE if getattr(self, name) not in (None, [])]
        if len(named) != 1:
            options = ", ".join(map(self.flag, ACCEPTANCE))
            raise ValueError(f"give acceptance by one of {options}; got {' and '.join(named) or 'none'}")
        sources = self.replay or self.score
        if sources and len(sources) not in (1, len(self.draft_profile)):
            raise ValueError(
                f"{named[0]}: {len(sources)} files for {len(self.draft_profile)} drafts; give one, or one per draft"
            )
        return self


def _short(model: str) -> str:
    """Return the last part of a path or hub name, without revision and suffix."""
    return Path(model.partition("@")[0]).name.removesuffix(".yaml")
