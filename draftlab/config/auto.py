"""Settings of auto."""

from pathlib import Path
from typing import Literal

from pydantic import model_validator
from typing_extensions import Self

from draftlab.config import shared
from draftlab.config.base import Numbers, Only, OutputConfig, numbers, option

Runtime = Literal["vllm", "sglang", "llama.cpp", "transformers"]
VERIFIED = {"vllm": "vllm", "llama.cpp": "llama-server"}  # runtimes that an export can be verified in, with programs


class AutoConfig(OutputConfig, shared.CheckpointSettings):
    """The target, how it is served, and the time to find its draft."""

    target: str = option(help="Checkpoint of the target: a directory, or a hub name with @REVISION.", argument=True)
    minutes: float = option(60.0, "Time to spend, approximately.", gt=0)
    server: Runtime | None = option(
        None, "What the draft is for: only what it runs is tried, as it accepts. Default: draftlab's own engine.",
        flag="--for",
    )  # fmt: skip
    prompt_file: Path | None = option(
        None, "JSON-lines file of your users' prompts. Default: prompts for chat models that draftlab brings, or the "
        "text of --data for models without a chat template.", flag="--prompts",
    )  # fmt: skip
    data: str | None = option(
        None, "Text whose parts are the prompts of a target without a chat template. Default: the workspace's."
    )
    streams: Numbers = numbers("1", "Prompts that are served at once, as 1,4,16: the draft must pay over all of them.")
    temperature: float = option(0.0, "Temperature that prompts are served at; 0 is greedy.", ge=0)
    verify_with: Path | None = option(
        None, "Program of the server, vllm or llama-server. Default: the one on the PATH, if there is one."
    )
    dtype: shared.WeightsDtype = shared.dtype(advanced=True)
    device: shared.Device = shared.device()
    threads: int | None = shared.threads()

    only = (
        Only(("data",), lambda c: c.prompt_file is None, "give prompts by --data or by --prompts, not by both"),
        Only(("verify_with",), lambda c: c.server in VERIFIED, f"belongs to --for {' and --for '.join(VERIFIED)}"),
    )

    @model_validator(mode="after")
    def _server_can(self) -> Self:
        if self.server == "transformers" and self.streams != [1]:
            raise ValueError("--streams: transformers' assisted generation decodes one prompt at a time")
        if "," in str(self.out or ""):
            raise ValueError(f"--out {self.out}: leave out the comma, which separates the options of drafters")
        return self
