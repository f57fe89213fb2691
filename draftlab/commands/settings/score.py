"""The settings of the command `score`. Torch is not loaded."""

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from draftlab.config import shared
from draftlab.config.base import (
    SERVER,
    DraftedTokens,
    Numbers,
    Only,
    OutputConfig,
    advanced_option,
    numbers,
    option,
)
from draftlab.config.server_rules import ServerRule
from draftlab.drafters.base import DRAFTERS, Drafter
from draftlab.errors import did_you_mean
from draftlab.registry import REJECTION, RULES

TASKS = "Tasks"  # panel of --help
# settings of draftlab's engine, which a server does not have
ENGINE = (
    "k",
    "rule",
    "server_rule",
    "mode",
    "dtype",
    "device",
    "device_map",
    "threads",
    "exhaustive",
    "minutes",
    "precision",
)


class ScoreConfig(OutputConfig, shared.CheckpointSettings, shared.SamplingSettings):
    """The settings of the command `score`: the drafts, the target, the prompts, and the sampling."""

    draft: list[str] = option(
        factory=list,
        help="Draft model; repeat the option for several drafts. DRAFT@q8_0 rounds the weights of DRAFT to the GGUF "
        "type q8_0. Default: the newest draft.",
    )
    drafter: list[Drafter] = option(
        factory=list,
        typed=list[str],
        help=(
            "Other drafter, NAME or NAME:KEY=VALUE,... (docs/drafters.md); repeat the option for "
            f"several. Names: {DRAFTERS.listed()}."
        ),
    )
    target: str = shared.target()
    k: DraftedTokens = numbers("1-6", "Numbers of drafted tokens per step to try, as 1-6 or 2,4,8.")
    batch: Numbers = numbers("1", "Batch sizes: 4 decodes four prompts at once; 1,4 measures both batch sizes.")
    data: str = shared.data("Text source, whose held-out text gives the prompts.")
    prompt_file: Path | None = shared.prompt_file()
    chat: shared.ChatMode = shared.chat(advanced=True)
    system_prompt: str | None = shared.system_prompt()
    num_prompts: int | None = option(
        None,
        "Number of prompts, evenly spaced in a file. Default: all prompts of a file, or 16 from a data source.",
        ge=1,
    )
    prompt_tokens: int | None = advanced_option(
        None,
        "Cut prompts to this number of tokens. Default: prompts of a file are not cut; prompts from a data source "
        "have 64 tokens.",
        ge=1,
    )
    max_new_tokens: int = option(128, "Largest number of tokens generated after each prompt.", ge=2)
    minutes: float | None = option(
        None,
        "Minutes after which timing ends. Default: it ends when the order of the drafts is decided, or when the "
        "interval is narrow enough (--precision).",
        gt=0,
    )
    precision: float = advanced_option(
        0.05,
        "Timing ends when half the interval of the fastest draft's speed-up is below this fraction of it.",
        gt=0,
    )
    exhaustive: bool = option(
        False,
        "Time every draft at every K, several times. By default, replays of the target's own texts and the time of "
        "single passes predict what is slow, and only drafts that may be the fastest are timed.",
    )
    repeats: int | None = option(
        None,
        "Number of times that each request is timed in each way. Default: 1; with --exhaustive or on servers 3.",
        ge=1,
    )
    seed: int = shared.seed()
    rule: str = advanced_option(
        REJECTION,
        f"Rule that verifies sampled drafts: {RULES.listed(REJECTION)}.",
        panel=shared.SAMPLING,
    )
    server_rule: ServerRule = option(
        None,
        "Verify drafted tokens as this server does, in place of --rule.",
        panel=shared.SAMPLING,
    )
    mode: shared.EngineMode = shared.mode()
    dtype: shared.WeightsDtype = shared.dtype()
    device: str = shared.device()
    device_map: shared.DeviceMap = shared.device_map()
    int8: Literal["draft", "target", "both"] | None = option(
        None,
        "Round the weights of this model to 8 bits, with --mode native. Plain decoding is then timed twice: with "
        "rounded and with full weights.",
    )
    threads: int | None = shared.threads()
    server: str | None = option(
        None,
        "Server that runs the target alone, http://HOST:PORT, or a directory of its stored answers. Without "
        "--speculative-server, the answers are stored for a later comparison.",
        panel=SERVER,
        reads="path",
        acts="always",
    )
    speculative_server: str | None = option(
        None,
        "Server that runs the target with the draft, http://HOST:PORT.",
        panel=SERVER,
        acts="always",
    )
    api_key_file: Path | None = shared.api_key_file()
    served_model_name: str | None = shared.served_model_name()
    tasks: str | None = option(
        None,
        "Measure accuracy on these tasks: names of tasks of lm-eval or draftlab, or YAML files, separated by commas.",
        panel=TASKS,
        reads="tasks",
        acts="path",
    )
    task_limit: int = option(
        200, "Number of items of each task to evaluate, from the first item on.", ge=1, panel=TASKS
    )
    task_batch_size: int = option(1, "Batch size of the tasks.", ge=1, panel=TASKS)
    num_fewshot: int | None = advanced_option(
        None,
        "Number of few-shot examples. Default: the number that the task defines.",
        ge=0,
        panel=TASKS,
    )
    apply_chat_template: bool = advanced_option(
        False,
        "Apply the tokenizer's chat template to the tasks; few-shot examples become turns.",
        panel=TASKS,
    )
    include_path: Path | None = advanced_option(
        None,
        "Folder with YAML files of additional tasks.",
        panel=TASKS,
        reads="tasks",
        acts="always",
    )
    min_speedup: float | None = option(
        None,
        "Exit with code 3 unless the interval of the speed-up over plain decoding, prefill included, is above this for "
        "every draft and batch size.",
        ge=0,
    )

    only = (
        Only(
            ("drafter", "int8", "batch"),
            lambda c: not c.served,
            "leave it out, because a server runs its own model with its own settings",
        ),
        Only(
            ENGINE,
            lambda c: not c.served,
            "a server runs its own model with its own settings",
            refused=False,
        ),
        shared.KEY_RULE,
        Only(
            ("minutes", "precision"),
            lambda c: not c.exhaustive,
            "leave it out, because --exhaustive times everything",
        ),
        Only(
            ("speculative_server",),
            lambda c: c.server,
            "needs --server: a server that runs the target alone, or the directory of its stored answers",
        ),
        Only(
            ("draft", "min_speedup"),
            lambda c: not c.served or c.speculative_server,
            "needs --speculative-server URL, a second server that runs the target with the draft",
        ),
        Only(
            ("top_k", "top_p", "min_p"),
            lambda c: c.temperature > 0,
            "works only with a --temperature above 0, because greedy decoding does not use this option",
        ),
        Only(
            ("rule", "server_rule"),
            lambda c: c.temperature > 0,
            "all rules decode alike at --temperature 0",
            refused=False,
        ),
        Only(
            ("rule",),
            lambda c: c.server_rule is None,
            "leave it out, because --server-rule sets it",
        ),
        Only(
            ("task_limit", "task_batch_size", "num_fewshot", "apply_chat_template", "include_path"),
            lambda c: c.tasks,
            "works only with --tasks NAMES",
            refused=False,
        ),
        Only(("int8",), lambda c: c.mode in ("auto", "native"), "needs --mode native"),
        *shared.CHAT_RULES,
    )

    @property
    def text_source(self) -> str | None:
        learns = any(spec.reads_data for spec in self.drafter)
        return self.data if self.prompt_file is None or learns else None

    @property
    def addresses(self) -> dict[str, str | None]:
        stored = self.server is not None and "://" not in self.server
        return {"--server": None if stored else self.server, "--speculative-server": self.speculative_server}

    @property
    def served(self) -> bool:
        """Return whether servers decode the prompts instead of draftlab's engine."""
        return self.server is not None or self.speculative_server is not None

    @model_validator(mode="after")
    def _rule_is_known(self) -> Self:
        known = [REJECTION, *RULES.names()]
        if self.rule not in known:
            raise ValueError(f"--rule {self.rule}: there is no such verify rule{did_you_mean(self.rule, known)}")
        return self

    def resolved(self) -> Self:
        if self.draft or self.drafter or self.served:
            return self
        return self.model_copy(update={"draft": [str(shared.newest_draft())]})
