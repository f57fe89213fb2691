"""Settings of the commands on stored target outputs."""

from pathlib import Path
from typing import Literal

from draftlab.config import shared
from draftlab.config.base import SERVER, Config, DraftedTokens, Only, OutputConfig, numbers, option
from draftlab.config.kinds import Drafter
from draftlab.config.server_rules import AcceptanceSettings
from draftlab.errors import UserError
from draftlab.model import hub

MANIFEST = "manifest.json"  # the file that every store has


def check_store(directory: Path) -> None:
    """Raise UserError if a directory has no manifest of stored outputs."""
    if not (directory / MANIFEST).exists():
        raise UserError(
            f"{directory} is not a store of target outputs (no {MANIFEST}); draftlab outputs build makes one"
        )


class StoredTargetSettings(shared.CheckpointSettings):
    """The target whose outputs are stored, in memory or on a server."""

    target: str = shared.target()
    server: str | None = option(
        None,
        "http://HOST:PORT of a server that runs the target, instead of a checkpoint here.",
        panel=SERVER,
    )
    api_key_file: Path | None = shared.api_key_file()


class OutputsBuildConfig(StoredTargetSettings, OutputConfig):
    """Settings of outputs build.

    A store to distil from has rows of data, rows that the target continues, prompts with the target's answers, or a
    server's log. A store to replay has prompts with the target's answers."""

    use: Literal["distill", "replay"] = option(
        "distill",
        "Purpose of the outputs: to distil drafts from them, or to replay drafts on them.",
    )
    from_file: Path | None = option(
        None,
        "Server log in JSON lines (docs/formats.md) to store instead, to distil from.",
        flag="--from",
    )
    data: str = shared.data()
    prompt_file: Path | None = option(
        None,
        "JSON-lines file of prompts, with the key prompt (or messages, turns, text, question) and optionally "
        "category.",
    )
    chat: shared.ChatMode = shared.chat()
    text: Literal["data", "target"] = option(
        "data",
        "Text to distil on. data: the data itself; target: the target's continuations of data, or its answers to "
        "conversations.",
    )
    num_sequences: int = option(4096, "Number of rows of data to distil on.", ge=1)
    num_prompts: int | None = option(
        None,
        "Number of prompts to answer. Default: all prompts of a file; 64 from data to replay.",
        ge=1,
    )
    seq_len: int = option(256, "Tokens per sequence of data or of a log, prompt included.", ge=8)
    prompt_tokens: int | None = option(
        None,
        "Cut prompts to this length. Default: whole prompts of a file; from data, 32 tokens to distil and 64 to "
        "replay.",
        ge=1,
    )
    max_new_tokens: int = option(128, "Most tokens of an answer.", ge=2)
    temperature: float | None = option(
        None,
        "Temperature of the target; 0 is greedy. Default: 1 with --use distill, 0 with --use replay.",
        ge=0,
        panel=shared.SAMPLING,
    )
    top_logprobs: int | None = option(
        None,
        "Number of most probable tokens to store at each position. Default: 64 with --use distill, 0 with --use "
        "replay.",
        ge=0,
    )
    dtype: shared.WeightsDtype | None = option(
        None,
        "Data type of weights. Default: as stored with --use distill, the workspace's with --use replay.",
        advanced=True,
    )
    device: shared.Device = shared.device()
    device_map: shared.DeviceMap = shared.device_map()
    seed: int = shared.seed()

    only = (
        shared.KEY_RULE,
        Only(
            ("dtype", "device", "device_map"),
            lambda c: not c.server,
            "leave it out: the running server decides this",
        ),
        Only(
            (
                "use",
                "server",
                "data",
                "prompt_file",
                "text",
                "num_sequences",
                "num_prompts",
                "prompt_tokens",
                "max_new_tokens",
                "temperature",
                "dtype",
                "device",
                "device_map",
                "seed",
            ),
            lambda c: c.from_file is None,
            "leave it out: --from stores the log of a server as it is",
        ),
        Only(
            ("text", "num_sequences", "seq_len"),
            lambda c: c.from_file is not None or not c.answers,
            "works only with --use distill on data without --prompt-file",
        ),
        Only(
            ("num_prompts", "max_new_tokens"),
            lambda c: c.writes,
            "needs prompts to answer: --prompt-file, --use replay, or --text target on conversations",
        ),
        shared.ONE_SOURCE,
        Only(("chat",), lambda c: c.prompt_file is not None or c.text == "target", "needs prompts"),
        Only(
            ("prompt_tokens", "temperature"),
            lambda c: c.writes,
            "works only with --text target; without it the target only reads the data",
        ),
    )

    @property
    def answers(self) -> bool:
        """Return whether the settings alone make the target answer prompts, for any kind of data."""
        return self.use == "replay" or self.prompt_file is not None

    @property
    def writes(self) -> bool:
        """Return whether the target writes the text."""
        return self.answers or self.text == "target"


class OutputsInfoConfig(StoredTargetSettings, Config):
    directory: Path = option(help="Directory of the outputs.", argument=True)
    verify: bool = option(
        False,
        "Check every checksum, and compare with the target, which scores some sequences again.",
    )

    only = (Only(("target", "server"), lambda c: c.verify, "needs --verify"), shared.KEY_RULE)


class ReplayConfig(OutputConfig, AcceptanceSettings, shared.CheckpointSettings):
    """Settings of draftlab replay."""

    directory: Path = option(help="Directory of target outputs.", argument=True)
    draft: list[str] = option(
        factory=list,
        help="Draft or EAGLE-3 head to replay; repeat for several. Default: the newest draft.",
    )
    drafter: list[Drafter] = option(
        typed=list[str],
        factory=list,
        help="Drafter that is no draft model, as NAME or NAME:KEY=VALUE,...; repeat for several.",
    )
    target: str = shared.target()
    k: DraftedTokens = numbers("1-8", "Numbers of drafted tokens, as 1-8 or 2,4,8.")
    rule: Literal["rejection", "match"] = option(
        "rejection",
        "rejection: accept a drafted token with probability min(1, p/q); match: accept it if it equals the "
        "target's own sample.",
    )
    dtype: shared.WeightsDtype = shared.dtype(advanced=True)
    device: shared.Device = shared.device()
    device_map: shared.DeviceMap = shared.device_map()

    only = (
        Only(
            ("rule", "draft_temperature"),
            lambda c: c.server_rule is None,
            "leave it out: --server-rule sets it",
        ),
        Only(
            ("server_rule",),
            lambda c: c.acceptance.rule != "block",
            "the rule block cannot be replayed; measure it with draftlab score",
        ),
        Only(
            ("target", "device_map"),
            lambda c: c.reads_target,
            "leave it out: none of these drafters reads the target's states",
        ),
    )

    @property
    def reads_target(self) -> bool:
        """Return whether a drafter reads the states of the target."""
        return any(map(hub.head_kind, self.draft)) or not all(spec.drafts for spec in self.drafter)

    def resolved(self) -> "ReplayConfig":
        if self.draft or self.drafter:
            return self
        return self.model_copy(update={"draft": [str(shared.newest_draft())]})
