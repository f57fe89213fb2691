"""Settings of profile and predict."""

from pathlib import Path
from typing import Literal

from draftlab.config.base import (
    MAX_K,
    SERVER,
    Config,
    DraftedTokens,
    Numbers,
    Only,
    OutputConfig,
    numbers,
    option,
)
from draftlab.config.shared import (
    KEY_RULE,
    CheckpointSettings,
    Device,
    EngineMode,
    WeightsDtype,
    api_key_file,
    device,
    device_map,
    dtype,
    mode,
    threads,
)

PROFILE_HELP = (
    "Output of draftlab profile, SHAPE@LAW (output of draftlab profile --law) or SHAPE@DEVICE,MODE[,DTYPE] (constants; "
    "with eagle=IDS of an EAGLE-3 head)."
)
ENGINE = ("k", "mode", "dtype", "device", "threads", "device_map", "law", "trust_remote_code")


class ProfileConfig(OutputConfig, CheckpointSettings):
    """Passes to time: of models, of shapes for a latency law, or of running servers."""

    models: list[str] = option(
        help="Checkpoints; or shape files and names of shapes, which get random weights. With --law: one source, "
        "shapes, or a directory of profiles. With --server: the target, and the draft of a second server.",
        argument=True,
    )
    law: bool = option(
        False, "Time shapes with random weights, and fit latency to layers, width and bytes."
    )
    server: list[str] = option(
        factory=list,
        help="http://HOST:PORT of a vLLM that runs the target alone; repeat for one that drafts.",
        panel=SERVER,
    )
    api_key_file: Path | None = api_key_file()
    k: int | None = option(
        None,
        "Most drafted tokens: passes over 1 to K + 1 tokens are timed. Default: 8; with --law 1.",
        ge=1,
        le=MAX_K,
    )
    batch: Numbers | None = option(
        None, "Batch sizes, as 1,4,16. Default: 1; of servers 1,2,4,8.", typed=str
    )
    context: Numbers | None = option(
        None,
        "Cached tokens before a pass, and lengths of prompts. Default: 16,128,480; with --law 16,256; of servers "
        "32,160.",
        typed=str,
    )
    repeats: int | None = option(
        None,
        "Timed repeats of every pass, after a warm-up. Default: 20; with --law 10; of servers 3.",
        ge=3,
    )
    mode: EngineMode = mode()
    dtype: WeightsDtype = dtype()
    device: Device = device()
    threads: int | None = threads()
    device_map: str | None = device_map()

    only = (
        Only(
            ("device_map",),
            lambda c: c.mode in ("auto", "eager"),
            "transformers runs the models, so use --mode eager",
        ),
        Only(("device_map",), lambda c: not c.law, "shapes of a law run in draftlab's engine"),
        Only(ENGINE, lambda c: not c.server, "leave it out: the servers decide"),
        KEY_RULE,
        Only(
            (
                "k",
                "batch",
                "context",
                "repeats",
                "mode",
                "dtype",
                "device",
                "threads",
                "trust_remote_code",
                "out",
            ),
            lambda c: c.profiles is None,
            "the profiles are there already",
        ),
    )

    @property
    def profiles(self) -> Path | None:
        """Return the directory of profiles that a law is fitted to; None: passes are timed."""
        first = Path(self.models[0]) if len(self.models) == 1 else None
        if not self.law or first is None or not first.is_dir() or (first / "config.json").exists():
            return None
        return first


class PredictConfig(Config):
    """Profiles of a pair and its acceptance."""

    draft_profile: list[str] = option(help=PROFILE_HELP + " Repeat for several drafts.")
    target_profile: str = option(help=PROFILE_HELP)
    acceptance: list[str] = option(
        help="Output of replay or score, for all drafts or repeated for each; or the probability of every token, as "
        "0.7; or tokens per target pass at some K, as 2.8@4."
    )
    k: DraftedTokens = numbers("1-8", "Numbers of drafted tokens, as 1-8 or 2,4,8.")
    batch: Numbers = numbers(
        "1", "Batch sizes, or streams, as 1,4,16; results by K are of the smallest."
    )
    context: Numbers | None = option(
        None, "Prompt lengths. Default: those of the texts, or 128.", typed=str
    )
    max_new_tokens: int = option(
        128, "Tokens per text where acceptance is a number.", ge=2, le=1_000_000
    )
    extrapolate: bool = option(False, "Extrapolate beyond the widths and contexts of the profiles.")
    server: Literal["vllm"] | None = option(
        None,
        "Predict the steps of this server, and with several --batch its table of K. Default: draftlab's engine.",
        flag="--for",
    )
