"""Settings of auto."""

from pathlib import Path
from typing import Any

from pydantic import field_validator, model_validator
from typing_extensions import Self

from draftlab.config import shared
from draftlab.config.base import Numbers, Only, OutputConfig, numbers, option
from draftlab.config.server_rules import acceptance_of
from draftlab.errors import UserError
from draftlab.registry import SERVERS


class AutoConfig(OutputConfig, shared.CheckpointSettings):
    """The target, how it is served, and the time to find its draft."""

    target: str = option(
        help="Checkpoint of the target: a directory, or a hub name with @REVISION.", argument=True
    )
    minutes: float = option(60.0, "Time to spend, approximately.", gt=0)
    draft: list[str] = option(
        [],
        "Ready draft to compare, repeatable: a smaller model, a pruned draft, or anyone's EAGLE-3 head.",
    )
    train: bool = option(
        False, "With --draft: train drafts of auto's own, too. Without --draft they are trained."
    )
    server: str | None = option(
        None,
        (
            f"What the draft is for, {', '.join(SERVERS.names())}: only what it runs is "
            "tried, as it accepts. Default: draftlab's own engine."
        ),
        flag="--for",
    )
    prompt_file: Path | None = option(
        None,
        "JSON-lines file of your users' prompts; 96 or more where drafts are trained. Default: "
        "prompts for chat models that draftlab brings, or the "
        "text of --data for models without a chat template.",
        flag="--prompts",
    )
    data: str | None = option(
        None,
        "Text whose parts are the prompts of a target without a chat template. Default: the workspace's.",
    )
    streams: Numbers = numbers(
        "1", "Prompts that are served at once, as 1,4,16: the draft must pay over all of them."
    )
    temperature: float = option(0.0, "Temperature that prompts are served at; 0 is greedy.", ge=0)
    verify_with: Path | None = option(
        None,
        "Program of the server, vllm or llama-server. Default: the one on the PATH, if there is one.",
    )
    dtype: shared.WeightsDtype = shared.dtype(advanced=True)
    device: shared.Device = shared.device()
    threads: int | None = shared.threads()

    only = (
        Only(("train",), lambda c: c.draft, "needs --draft: without ready drafts, auto trains"),
        Only(
            ("data",),
            lambda c: c.prompt_file is None,
            "give prompts by --data or by --prompts, not by both",
        ),
        Only(
            ("verify_with",),
            lambda c: c.server and c.server_kind.program,
            "belongs to --for vllm and llama.cpp",
        ),
    )

    @field_validator("server")
    @classmethod
    def _has_a_rule(cls, name: str | None) -> str | None:
        if name is not None:
            try:
                acceptance_of(name)
            except UserError as error:
                raise ValueError(str(error).removeprefix("--server-rule: ")) from None
        return name

    @model_validator(mode="after")
    def _server_can(self) -> Self:
        if self.server is not None and self.server_kind.one_stream and self.streams != [1]:
            raise ValueError(f"--streams: {self.server} decodes one prompt at a time")
        if "," in str(self.out or ""):
            raise ValueError(
                f"--out {self.out}: leave out the comma, which separates the options of drafters"
            )
        return self

    @property
    def trains(self) -> bool:
        """Return whether drafts are trained."""
        return self.train or not self.draft

    @property
    def server_kind(self) -> Any:
        """Return the kind of the server that is named."""
        return SERVERS.get(str(self.server), "--for")
