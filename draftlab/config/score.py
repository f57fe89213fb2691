"""Settings of score."""

from pathlib import Path
from typing import Literal

from pydantic import model_validator
from typing_extensions import Self

from draftlab.config import shared
from draftlab.config.base import (
    SERVER,
    DraftedTokens,
    Numbers,
    Only,
    OutputConfig,
    from_workspace,
    numbers,
    option,
)
from draftlab.config.drafters import DRAFTERS, Drafter
from draftlab.config.server_rules import ServerRule
from draftlab.errors import UsageError, did_you_mean
from draftlab.registry import REJECTION, RULES

TASKS = "Tasks"  # panel of --help
ENGINE = (
    "k",
    "batch",
    "drafter",
    "rule",
    "server_rule",
    "mode",
    "dtype",
    "device",
    "device_map",
    "int8",
    "threads",
)


class ScoreConfig(OutputConfig, shared.CheckpointSettings, shared.SamplingSettings):
    """Drafts, the target to measure them with, prompts, and how tokens are sampled."""

    draft: list[str] = option(
        factory=list,
        help="Draft; repeat for several. DRAFT@q8_0: rounded as in that GGUF type. Default: the newest.",
    )
    drafter: list[Drafter] = option(
        factory=list,
        typed=list[str],
        help=(
            "Other drafter, NAME or NAME:KEY=VALUE,... (docs/drafters.md); repeat for "
            f"several. Names: {', '.join(DRAFTERS.names())}."
        ),
    )
    target: str = shared.target()
    k: DraftedTokens = numbers("1-6", "Numbers of drafted tokens to try, as 1-6 or 2,4,8.")
    batch: Numbers = numbers("1", "Prompts decoded at once; 1,4 gives a score for each.")
    data: str = from_workspace("data", "Source of held-out text for prompts.")
    prompt_file: Path | None = shared.prompt_file()
    chat: shared.ChatMode = shared.chat(advanced=True)
    system_prompt: str | None = shared.system_prompt()
    num_prompts: int | None = option(
        None, "Number of prompts. Default: all of a file, 16 of a source.", ge=1
    )
    prompt_tokens: int | None = option(
        None,
        "Cut prompts to this length. Default: 64 for a source, whole prompts of a file.",
        ge=1,
        advanced=True,
    )
    max_new_tokens: int = option(128, "Tokens generated after each prompt.", ge=2)
    repeats: int = option(
        3, "Times that every prompt is decoded in every way.", ge=1, advanced=True
    )
    seed: int = shared.seed()
    rule: str = option(
        REJECTION,
        f"Verify rule for sampled drafts: {', '.join([REJECTION, *RULES.names()])}.",
        panel=shared.SAMPLING,
        advanced=True,
    )
    server_rule: ServerRule | None = option(
        None,
        "Accept as this server does, in place of --rule.",
        panel=shared.SAMPLING,
        advanced=True,
    )
    mode: shared.EngineMode = shared.mode()
    dtype: shared.WeightsDtype = shared.dtype()
    device: shared.Device = shared.device()
    device_map: str | None = shared.device_map()
    int8: Literal["draft", "target", "both"] | None = option(
        None,
        "Round these weights to 8 bits; in mode native. The target alone is timed at both precisions.",
        advanced=True,
    )
    threads: int | None = shared.threads()
    server: str | None = option(
        None,
        "http://HOST:PORT of a server that runs the target alone. Without --speculative-server its answers are "
        "stored; the directory with them takes the place of the address.",
        panel=SERVER,
    )
    speculative_server: str | None = option(
        None, "http://HOST:PORT of a server that runs the target with the draft.", panel=SERVER
    )
    api_key_file: Path | None = shared.api_key_file()
    tasks: str | None = option(
        None,
        "lm-eval tasks or YAML files of tasks to measure accuracy on, separated by commas.",
        panel=TASKS,
    )
    task_limit: int = option(200, "First items of each task.", ge=1, panel=TASKS, advanced=True)
    task_batch_size: int = option(1, "Texts of a task per pass.", ge=1, panel=TASKS, advanced=True)
    num_fewshot: int | None = option(
        None,
        "Examples before each item. Default: the task's own number.",
        ge=0,
        panel=TASKS,
        advanced=True,
    )
    apply_chat_template: bool = option(
        False,
        "Ask in the form of the tokenizer's chat template; examples become turns.",
        panel=TASKS,
        advanced=True,
    )
    include_path: Path | None = option(
        None, "Folder with YAML files of more tasks.", panel=TASKS, advanced=True
    )
    min_speedup: float | None = option(
        None, "Exit with 3 if whole requests gain less than this at every K."
    )

    only = (
        Only(ENGINE, lambda c: not c.served, "leave it out: the servers decide"),
        shared.KEY_RULE,
        Only(
            ("draft", "min_speedup"),
            lambda c: not c.served or c.speculative_server,
            "needs --speculative-server URL, a second server that drafts with it",
        ),
        Only(
            ("rule", "server_rule", "top_k", "top_p", "min_p"),
            lambda c: c.temperature > 0,
            "greedy decoding does not use it; add --temperature",
        ),
        Only(("rule",), lambda c: c.server_rule is None, "--server-rule sets it"),
        Only(
            ("task_limit", "task_batch_size", "num_fewshot", "apply_chat_template", "include_path"),
            lambda c: c.tasks,
            "needs --tasks",
        ),
        Only(("int8",), lambda c: c.mode in ("auto", "native"), "needs --mode native"),
        Only(
            ("int8",),
            lambda c: not c.tasks or c.int8 == "draft",
            "--tasks evaluates the target unrounded",
        ),
        *shared.CHAT_RULES,
    )

    @property
    def served(self) -> bool:
        """Return whether servers decode."""
        return self.server is not None or self.speculative_server is not None

    @model_validator(mode="after")
    def _server_is_named(self) -> Self:
        if self.server is None and self.speculative_server is not None:
            raise UsageError(
                "--server is required: the target alone, or the directory with its answers"
            )
        return self

    @model_validator(mode="after")
    def _rule_is_known(self) -> Self:
        if self.rule not in (REJECTION, *RULES.names()):
            raise ValueError(
                f"--rule {self.rule}: no such rule{did_you_mean(self.rule, [REJECTION, *RULES.names()])}"
            )
        return self

    def resolved(self) -> Self:
        if self.draft or self.drafter or self.served:
            return self
        return self.model_copy(update={"draft": [str(shared.newest_draft())]})
