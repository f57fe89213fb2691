"""The settings of the commands that store, check and replay target outputs."""

from pathlib import Path
from typing import Literal

from draftlab.config import shared
from draftlab.config.base import (
    Config,
    DraftedTokens,
    Only,
    OutputConfig,
    advanced_option,
    numbers,
    option,
)
from draftlab.config.kinds import Drafter
from draftlab.config.server_rules import SERVER_RULES, DecodingRule, ServerRule, chosen_rule
from draftlab.errors import UserError
from draftlab.model import hub
from draftlab.registry import REJECTION

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
            "leave it out, because the server decides this",
        ),
        Only(
            ("int8",),
            lambda c: c.device_map is None,
            "leave it out, because transformers runs the target with --device-map",
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
                "int8",
                "device",
                "device_map",
                "seed",
            ),
            lambda c: c.from_file is None,
            "leave it out, because --from stores the log of a server unchanged",
        ),
        Only(
            ("text", "num_sequences", "seq_len"),
            lambda c: c.from_file is not None or not c.answers,
            "works only with --use distill and without --prompt-file",
        ),
        Only(
            ("num_prompts", "max_new_tokens"),
            lambda c: c.writes,
            "works only if the target answers prompts; add --prompt-file FILE, --use replay, or --text target with "
            "conversations in --data",
        ),
        shared.ONE_SOURCE,
        Only(
            ("chat",),
            lambda c: c.prompt_file is not None or c.text == "target",
            "works only with --prompt-file FILE or --text target",
        ),
        Only(
            ("prompt_tokens", "temperature"),
            lambda c: c.writes,
            "works only if the target writes text: --text target, --prompt-file or --use replay",
        ),
    )

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


class ReplayConfig(OutputConfig, shared.CheckpointSettings):
    """The settings of replay."""

    directory: Path = option(help="Directory of target outputs.", argument=True)
    draft: list[str] = option(
        factory=list,
        help="Draft or EAGLE-3 head to replay; repeat the option for several drafts. Default: the newest draft.",
    )
    drafter: list[Drafter] = option(
        typed=list[str],
        factory=list,
        help="Drafter other than a draft model, as NAME or NAME:KEY=VALUE,...; repeat the option for several drafters.",
    )
    target: str | None = option(
        None,
        "Checkpoint of the target that wrote the outputs, for heads and other drafters without a draft model.",
        shown_default="as recorded with the outputs; if it is not there, from draftlab.yaml",
    )
    k: DraftedTokens = numbers("1-8", "Numbers of drafted tokens per step, as 1-8 or 2,4,8.")
    rule: Literal["rejection", "match"] = option(
        REJECTION,
        "rejection: accept a drafted token with probability min(1, p/q); match: accept it if it equals the "
        "target's own sample.",
    )
    server_rule: ServerRule = option(
        None,
        f"Verify as this server does, in place of --rule: {', '.join(SERVER_RULES)}.",
        panel=shared.SAMPLING,
    )
    dtype: shared.WeightsDtype = shared.dtype(advanced=True)
    device: str = shared.device()
    device_map: shared.DeviceMap = shared.device_map()

    only = (
        Only(
            ("rule",),
            lambda c: c.server_rule is None,
            "leave it out, because --server-rule sets it",
        ),
        Only(
            ("server_rule",),
            lambda c: c.decoding.verify != "block",
            "replay lacks the verify rule block; use draftlab score with this --server-rule and --temperature 1",
        ),
        Only(
            ("target", "device_map"),
            # a draft that an earlier step of a recipe will make may be a head
            lambda c: c.reads_target or not all(Path(name).exists() for name in c.draft),
            "leave it out, because none of these drafters reads the target's hidden states",
        ),
    )

    @property
    def decoding(self) -> DecodingRule:
        return chosen_rule(self.server_rule, self.rule)

    @property
    def reads_target(self) -> bool:
        """Return whether the command may need the target, because a drafter may read the target's hidden states.

        This is true for a head in --draft, and for each --drafter without a draft model, because the value of
        --drafter does not show whether that drafter reads hidden states.
        """
        return any(map(hub.head_kind, self.draft)) or not all(spec.drafts for spec in self.drafter)

    def resolved(self) -> "ReplayConfig":
        if self.draft or self.drafter:
            return self
        return self.model_copy(update={"draft": [str(shared.newest_draft())]})
