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
        None, "http://HOST:PORT of a server that runs the target instead.", panel=SERVER
    )
    api_key_file: Path | None = shared.api_key_file()


class OutputsBuildConfig(StoredTargetSettings, OutputConfig):
    """Settings of outputs build. A store to distil from has rows of data, rows that the target continues, prompts with
    the target's answers, or a server's log. A store to replay has prompts with the target's answers."""

    use: Literal["distill", "replay"] = option(
        "distill", "What the outputs are for: distilling, or replaying drafts."
    )
    from_file: Path | None = option(
        None,
        "Store a server's log instead, requests in JSON lines (docs/formats.md), to distil from.",
        flag="--from",
    )
    data: str = shared.data()
    prompt_file: Path | None = option(
        None,
        "JSON-lines file of prompts: prompt (or messages, turns, text, question); perhaps category.",
    )
    chat: shared.ChatMode = shared.chat()
    text: Literal["data", "target"] = option(
        "data",
        "To distil on: the data itself, or what the target writes after starts of it, or answers to its chats.",
    )
    num_sequences: int = option(4096, "Rows of data to distil on.", ge=1)
    num_prompts: int | None = option(
        None, "Prompts to answer. Default: all of a file; to replay data, 64.", ge=1
    )
    seq_len: int = option(256, "Tokens per sequence of data or of a log, prompt included.", ge=8)
    prompt_tokens: int | None = option(
        None,
        "Cut prompts to this length. Default: whole prompts of a file; of data, 32 to distil and 64 to replay.",
        ge=1,
    )
    max_new_tokens: int = option(128, "Longest answer to a prompt.", ge=2)
    temperature: float | None = option(
        None,
        "Temperature of the target, 0 is greedy. Default: 1 to distil, 0 to replay.",
        ge=0,
        panel=shared.SAMPLING,
    )
    top_logprobs: int | None = option(
        None,
        "Most probable tokens stored at each position. Default: 64 to distil, 0 to replay.",
        ge=0,
    )
    dtype: shared.WeightsDtype | None = option(
        None,
        "Data type of weights. Default: to distil as stored, to replay the workspace's.",
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
            "the server decides that itself",
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
            "--from stores what a server's log has",
        ),
        Only(
            ("text", "num_sequences", "seq_len"),
            lambda c: c.from_file is not None or not c.answers,
            "needs --use distill on data; prompts are answered",
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
            "the target only reads the data; add --text target",
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
        False, "Check every checksum, and let the target score some sequences again."
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
        help="Other drafter that can be replayed, NAME or NAME:KEY=VALUE,...; repeat for several.",
    )
    target: str = shared.target()
    k: DraftedTokens = numbers("1-8", "Numbers of drafted tokens, as 1-8 or 2,4,8.")
    rule: Literal["rejection", "match"] = option(
        "rejection",
        "rejection: accept with min(1, q/p); match: accept what is the target's own sample.",
    )
    dtype: shared.WeightsDtype = shared.dtype(advanced=True)
    device: shared.Device = shared.device()

    only = (
        Only(
            ("rule", "draft_temperature"), lambda c: c.server_rule is None, "--server-rule sets it"
        ),
        Only(
            ("server_rule",),
            lambda c: c.acceptance.rule != "block",
            "blocks are not replayed; score measures them",
        ),
        Only(
            ("target",),
            lambda c: c.reads_target,
            "no drafter here reads its states, as a head does",
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
