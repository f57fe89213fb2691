"""Settings of the commands that measure a draft."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, model_validator
from typing_extensions import Self

from draftlab import workspace
from draftlab.config import inputs, shared
from draftlab.config.base import SERVER, DraftedTokens, Numbers, Only, OutputConfig, from_workspace, numbers, option
from draftlab.config.drafters import DRAFTERS, DrafterSpec, check_drafter, parse_drafter
from draftlab.config.server_rules import SERVER_RULE_ONLY, AcceptanceSettings
from draftlab.config.tasks import TASKS_ONLY, TaskSettings, check_tasks
from draftlab.errors import UsageError, UserError, did_you_mean
from draftlab.model.hub import check_data, checkpoint_name
from draftlab.registry import REJECTION, RULES
from draftlab.sampling import SamplingParams

FROM_DATA, FROM_DATA_TOKENS = 16, 64  # prompts of a data source, and tokens of each
PLAIN_PHASE = "score-servers-plain"  # output of --phase plain
_GREEDY = "greedy decoding does not use it; add --temperature"


class PromptSettings(BaseModel):
    """Prompts to generate from."""

    data: str = from_workspace("data", "Source of held-out text for prompts.")
    prompt_file: Path | None = shared.prompt_file()
    chat: shared.ChatMode = shared.chat()
    system_prompt: str | None = shared.system_prompt()
    num_prompts: int | None = option(None, "Number of prompts. Default: all of a file, 16 of a source.", ge=1)
    prompt_tokens: int | None = option(
        None, "Cut prompts to this length. Default: 64 for a source, whole prompts of a file.", ge=1, advanced=True
    )


class GenerationSettings(shared.SamplingSettings):
    """Settings of generation."""

    max_tokens: int = option(128, "Tokens generated after each prompt.", ge=2)
    seed: int = shared.seed()

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p,
            max_tokens=self.max_tokens, seed=self.seed,
        )  # fmt: skip


class ThresholdSettings(BaseModel):
    """Results that a draft must reach; else the command exits with 3."""

    min_speedup: float | None = option(None, "Exit with 3 if whole requests gain less than this at every K.")
    min_acceptance_length: float | None = option(
        None, "Exit with 3 if a draft stays below this mean acceptance length at every K.", advanced=True
    )


class DraftSettings(shared.CheckpointSettings):
    """Drafts, and the target to measure them with."""

    draft: list[str] = option(
        factory=list, help="Draft; repeat for several. DRAFT@q8_0: rounded as in that GGUF type. Default: the newest.",
        reads=inputs.checkpoint,
    )  # fmt: skip
    drafter: list[str] = option(
        factory=list, help=f"Other drafter, NAME or NAME:KEY=VALUE,... (docs/drafters.md); repeat for several. "
        f"Names: {', '.join(DRAFTERS.names())}.",
        reads=check_drafter,
    )  # fmt: skip
    target: str = shared.target()


class ScoreConfig(
    OutputConfig, ThresholdSettings, TaskSettings, AcceptanceSettings, GenerationSettings, PromptSettings, DraftSettings
):
    """Settings of score."""

    k: DraftedTokens = numbers("1-6", "Numbers of drafted tokens to try, as 1-6 or 2,4,8.")
    batch: Numbers = numbers("1", "Prompts decoded at once; 1,4 gives a score for each.")
    repeats: int = option(3, "Times that every prompt is decoded in every way.", ge=1, advanced=True)
    rule: str = option(
        REJECTION, f"Verify rule for sampled drafts: {', '.join([REJECTION, *RULES.names()])}.", panel=shared.SAMPLING,
        advanced=True,
    )  # fmt: skip
    mode: shared.EngineMode = shared.mode()
    dtype: shared.WeightsDtype = shared.dtype(advanced=True)
    device: shared.Device = shared.device()
    device_map: str | None = shared.device_map()
    draft_int8: bool = option(False, "Round the draft's weights to 8 bits; in mode native.", advanced=True)
    target_int8: bool = option(
        False, "Verify with the target's weights rounded to 8 bits; in mode native. Without a draft both are timed.",
        advanced=True,
    )  # fmt: skip
    threads: int | None = shared.threads()

    only = (
        Only(
            ("rule", "draft_temperature", "server_rule", "top_k", "top_p", "min_p"),
            lambda c: c.temperature > 0,
            _GREEDY,
        ),
        TASKS_ONLY,
        Only(("draft_int8", "target_int8"), lambda c: c.mode in ("auto", "native"), "needs --mode native"),
        Only(("target_int8",), lambda c: not c.tasks, "--tasks evaluates the target with unrounded weights"),
        SERVER_RULE_ONLY,
        *shared.CHAT_RULES,
    )  # fmt: skip

    @model_validator(mode="after")
    def _rule_is_known(self) -> Self:
        if self.rule not in (REJECTION, *RULES.names()):
            raise ValueError(f"--rule {self.rule}: no such rule{did_you_mean(self.rule, [REJECTION, *RULES.names()])}")
        return self

    @model_validator(mode="after")
    def _drafters_are_known(self) -> Self:
        try:
            list(map(parse_drafter, self.drafter))
        except UserError as error:
            raise ValueError(str(error)) from None
        return self

    def check(self, *, weights: bool) -> None:
        super().check(weights=weights)
        if self.reads_data:
            check_data(self.data)
        inputs.check_rounded(*self.draft)
        inputs.check_vocabularies(self.target, *self.draft)
        least = 1 if self.prompt_file else self.prompt_tokens or FROM_DATA_TOKENS
        inputs.check_context(least + self.max_tokens + max(self.k), "--max-tokens", self.target, *self.draft)
        check_tasks(self)

    @property
    def drafters(self) -> list[DrafterSpec]:
        return [parse_drafter(text) for text in self.drafter]

    @property
    def reads_data(self) -> bool:
        """Return whether prompts, or what a drafter learns from, come from --data."""
        return self.prompt_file is None or any(spec.reads_data for spec in self.drafters)

    @property
    def needs_default_draft(self) -> bool:
        """Return whether some drafter needs a draft model and names none."""
        return any("" in spec.drafts for spec in self.drafters)

    def resolved(self) -> Self:
        if self.draft or self.drafter:
            return self
        return self.model_copy(update={"draft": [str(shared.newest_draft())]})

    def default_name(self) -> str:
        drafts = [checkpoint_name(Path(name)).split("-", 1)[-1] for name in self.draft]
        return "-".join(["score", *drafts, *(spec.kind for spec in self.drafters)])


class ScoreServersConfig(OutputConfig, ThresholdSettings, TaskSettings, GenerationSettings, PromptSettings):
    """Settings of score-servers."""

    phase: Literal["both", "plain", "speculative"] = option(
        "both", "Both servers in turns; or, where they do not run at once, the plain one first and then the other.",
        panel=SERVER,
    )  # fmt: skip
    server: str | None = option(
        None, "http://HOST:PORT of a server that runs the target alone.", panel=SERVER, reads=inputs.server
    )
    speculative_server: str | None = option(
        None, "http://HOST:PORT of a server that runs the target with the draft.", panel=SERVER,
        reads=inputs.server,
    )  # fmt: skip
    plain: Path | None = option(
        None, "Output of --phase plain. Default: score-servers-plain under the workspace's runs.", panel=SERVER
    )
    served_model: str | None = option(None, "Model of both servers. Default: their first.", panel=SERVER, advanced=True)
    target: str = shared.target(panel=SERVER, reads=inputs.config_only)
    tokenizer: Path | None = option(
        None, "Directory of the servers' tokenizer, if not that of --target.", panel=SERVER, advanced=True,
        reads=inputs.tokenizer,
    )  # fmt: skip
    api_key_file: Path | None = option(
        None, "File with the servers' API key.", panel=SERVER, advanced=True, reads=inputs.file
    )
    draft: str = option("draft", "Name of the draft, or its directory.")
    repeats: int = option(3, "Times that every prompt is sent to each server.", ge=1, advanced=True)

    only = (
        Only(("top_k", "top_p", "min_p"), lambda c: c.temperature > 0, _GREEDY),
        Only(("target",), lambda c: c.tokenizer is None, "--tokenizer takes its place"),
        Only(("server",), lambda c: c.phase != "speculative", "--plain has that server's answers"),
        Only(
            ("speculative_server", "draft", "min_speedup", "min_acceptance_length"),
            lambda c: c.phase != "plain",
            "--phase plain measures the target alone",
        ),
        Only(("plain",), lambda c: c.phase == "speculative", "needs --phase speculative"),
        TASKS_ONLY,
        *shared.CHAT_RULES,
    )  # fmt: skip

    @model_validator(mode="after")
    def _names_its_servers(self) -> Self:
        needed = {"server": "plain", "speculative_server": "speculative"}
        for name, phase in needed.items():
            if self.phase in ("both", phase) and getattr(self, name) is None:
                raise UsageError(f"{self.flag(name)} is required")
        return self

    def check(self, *, weights: bool) -> None:
        super().check(weights=weights)
        if self.prompt_file is None:
            check_data(self.data)
        check_tasks(self)

    def resolved(self) -> Self:
        if self.phase != "speculative" or self.plain is not None:
            return self
        return self.model_copy(update={"plain": workspace.load().runs / PLAIN_PHASE})

    def default_name(self) -> str:
        return PLAIN_PHASE if self.phase == "plain" else "score-servers"
