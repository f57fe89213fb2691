"""The settings of the commands that store, check and replay target outputs."""

from pathlib import Path
from typing import Literal

from draftlab.config import shared
from draftlab.config.base import (
    Config,
    Only,
    OutputConfig,
    advanced_option,
    option,
)
from draftlab.errors import UserError

MANIFEST = "manifest.json"  # the file that every store of target outputs has


def check_store(directory: Path) -> None:
    """Check that a directory is a store of target outputs. Raises UserError: the directory has no manifest."""
    if not (directory / MANIFEST).exists():
        raise UserError(
            f"{directory} is not a store of target outputs (no {MANIFEST}); make a store with draftlab outputs build"
        )


class StoredTargetSettings(shared.CheckpointSettings, shared.ServerSettings):
    """The settings of the target whose outputs are stored: a checkpoint, or a server that runs it."""

    target: str = shared.target()


class OutputsBuildConfig(StoredTargetSettings, OutputConfig):
    """The settings of outputs build.

    A store has sequences of data, the target's continuations of data, its answers to prompts, or the log of a server.
    Drafts can be distilled from each of these stores, but replayed only on the target's answers to prompts.
    """

    use: Literal["distill", "replay"] = option(
        "distill",
        "Purpose of the stored outputs. distill: to train drafts; replay: to measure the acceptance of drafts.",
    )
    from_file: Path | None = option(
        None,
        "Server log to store, in place of new outputs of a target: a file of JSON lines (docs/formats.md).",
        flag="--from",
    )
    data: str = shared.data()
    prompt_file: Path | None = option(
        None,
        "JSON-lines file of prompts. Each row has a field prompt (or messages, turns, text, question), and optionally "
        "a field category.",
    )
    chat: shared.ChatMode = shared.chat()
    text: Literal["data", "target"] = option(
        "data",
        "Text to distil on. data: the data itself; target: the target's continuations of data, or its answers to "
        "conversations.",
    )
    num_sequences: int = option(4096, "Number of sequences of data to store.", ge=1)
    num_prompts: int | None = option(
        None,
        "Number of prompts that the target answers, evenly spaced in a file. Default: all prompts or conversations of "
        "a file; with --use replay and no --prompt-file, 64 prompts from --data.",
        ge=1,
    )
    seq_len: int = option(
        256,
        "Length of each sequence of data in tokens. Entries of a server log (--from) are cut to this length, prompt "
        "included.",
        ge=8,
    )
    prompt_tokens: int | None = option(
        None,
        "Cut prompts to this number of tokens. By default, prompts of a file are not cut, and prompts from --data have "
        "32 tokens with --use distill and 64 with --use replay.",
        ge=1,
    )
    max_new_tokens: int = option(128, "Largest number of tokens in an answer.", ge=2)
    temperature: float | None = option(
        None,
        "Temperature of the target; 0 is greedy. Default: 1 with --use distill, 0 with --use replay.",
        ge=0,
        panel=shared.SAMPLING,
    )
    top_logprobs: int | None = option(
        None,
        "Number of most probable tokens to store at each position. Default: 64 with --use distill, 0 with "
        "--use replay.",
        ge=0,
    )
    dtype: shared.WeightsDtype | None = advanced_option(
        None,
        "Data type of weights. Default: with --use distill, the checkpoint's; with --use replay, dtype in "
        "draftlab.yaml.",
    )
    int8: bool = advanced_option(
        False, "Round the target's weights to int8 (mode native only), as score --int8 target does."
    )
    device: str = shared.device()
    device_map: shared.DeviceMap = shared.device_map()
    seed: int = shared.seed()

    only = (
        shared.KEY_RULE,
        Only(
            ("dtype", "int8", "device", "device_map"),
            lambda c: not c.server,
            "the server decides this",
            refused=False,
        ),
        Only(
            ("int8",),
            lambda c: c.device_map is None,
            "leave it out, because transformers runs the target with --device-map",
        ),
        Only(
            ("use", "server", "data", "prompt_file", "text", "temperature"),
            lambda c: c.from_file is None,
            "leave it out, because --from stores the log of a server unchanged",
        ),
        Only(
            (
                "num_sequences",
                "num_prompts",
                "prompt_tokens",
                "max_new_tokens",
                "dtype",
                "int8",
                "device",
                "device_map",
                "seed",
            ),
            lambda c: c.from_file is None,
            "--from stores the log of a server unchanged",
            refused=False,
        ),
        # without its limit, a run takes hours
        Only(
            ("text", "num_sequences"),
            lambda c: c.from_file is not None or not c.answers,
            "works only with --use distill and without --prompt-file",
        ),
        Only(
            ("seq_len",),
            lambda c: c.from_file is not None or not c.answers,
            "works only with --use distill and without --prompt-file",
            refused=False,
        ),
        Only(
            ("num_prompts",),
            lambda c: c.from_file is not None or c.writes,
            "works only if the target answers prompts; add --prompt-file FILE, --use replay, or --text target with "
            "conversations in --data",
        ),
        Only(
            ("max_new_tokens",),
            lambda c: c.writes,
            "works only if the target answers prompts",
            refused=False,
        ),
        shared.ONE_SOURCE,
        Only(
            ("chat",),
            lambda c: c.prompt_file is not None or c.text == "target",
            "works only with --prompt-file FILE or --text target",
            refused=False,
        ),
        Only(
            ("prompt_tokens", "temperature"),
            lambda c: c.writes,
            "works only if the target writes text: --text target, --prompt-file or --use replay",
            refused=False,
        ),
    )

    @property
    def addresses(self) -> dict[str, str | None]:
        return {"--server": self.server}

    @property
    def text_source(self) -> str | None:
        return self.data if self.from_file is None and self.prompt_file is None else None

    @property
    def answers(self) -> bool:
        """Return whether the target answers prompts for any kind of data: with --use replay or --prompt-file."""
        return self.use == "replay" or self.prompt_file is not None

    @property
    def writes(self) -> bool:
        """Return whether the target writes text: answers to prompts, or continuations of data."""
        return self.answers or self.text == "target"


class OutputsInfoConfig(StoredTargetSettings, Config):
    directory: Path = option(help="Directory of the target outputs.", argument=True)
    verify: bool = option(
        False,
        "Check all checksums. Also let the target compute the log-probabilities of some sequences again, and compare.",
    )

    only = (Only(("target", "server"), lambda c: c.verify, "needs --verify"), shared.KEY_RULE)
