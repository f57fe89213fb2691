"""Settings of check and export."""

from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator
from typing_extensions import Self

from draftlab.config.base import MAX_K, Config, Only, OutputConfig, from_workspace, option
from draftlab.config.shared import (
    CheckpointSettings,
    Device,
    data,
    device,
    newest_draft,
    prompt_file,
    target,
)
from draftlab.console import note
from draftlab.errors import did_you_mean
from draftlab.model.hub import ROUNDED
from draftlab.registry import SERVERS

FORMATS = {
    "hf": "",
    "gguf": "llama.cpp",
    "speculators": "vllm",
}  # format -> server that loads it; "" for all servers
_ONE_SOURCE = Only(
    ("data",),
    lambda c: c.prompt_file is None,
    "give prompts by --data or by --prompt-file, not both",
)


class DraftConfig(Config, CheckpointSettings):
    draft: str | None = option(
        None,
        "Checkpoint of the draft, or EAGLE-3 head. Default: the newest draft.",
        argument=True,
        flag="--draft",
    )
    target: str = target()

    def resolved(self) -> Self:
        if self.draft is not None:
            return self
        note(f"draft: {newest_draft()}")
        return self.model_copy(update={"draft": str(newest_draft())})


class CheckConfig(DraftConfig):
    servers: str | None = option(
        None,
        f"Servers to check for, by comma: {', '.join(SERVERS.names())}. Default: all.",
        flag="--for",
    )
    data: str = from_workspace("data", "Text to measure perplexity on.")
    prompt_file: Path | None = prompt_file(advanced=True)
    files_only: bool = option(False, "Read files only; do not run the draft.")

    @field_validator("servers")
    @classmethod
    def _are_known(cls, text: str | None) -> str | None:
        for name in (part.strip() for part in (text or "").split(",")):
            if name and name not in SERVERS.names():
                raise ValueError(f"no server {name!r}{did_you_mean(name, SERVERS.names())}")
        return text

    only = (
        Only(
            ("data", "prompt_file"),
            lambda c: not c.files_only,
            "--files-only does not run the draft",
        ),
        _ONE_SOURCE,
    )


class ExportConfig(DraftConfig, OutputConfig):
    to: str = option(
        "hf",
        "What is written: hf, a Hugging Face directory; gguf, a GGUF file; one of them with a script that serves it in "
        f"{', '.join(SERVERS.names())}; or speculators, an EAGLE-3 head in that layout, which vLLM serves.",
    )
    outtype: str = option("f16", f"GGUF: type of matrices, {', '.join(ROUNDED)}.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "Hugging Face: data type of weights. Default: as stored."
    )
    use_heterogeneous_vocab: bool = option(
        False,
        "Keep the draft's own vocabulary: vLLM and transformers can translate between two.",
        advanced=True,
    )
    k: int | None = option(
        None, "Drafted tokens per step. Default: the best K of a score, else 4.", ge=1, le=MAX_K
    )
    prediction: Path | None = option(
        None,
        "Take K by batch size from this file, which draftlab predict --for vllm --json printed.",
    )
    scores: list[Path] = option(
        factory=list,
        help="score.json files of the draft, or directories of them, for K and the card.",
        shown_default="the workspace's runs",
    )
    verify_with: Path | None = option(
        None, "Score the export where it runs: path of vllm, or of llama.cpp's llama-server."
    )
    temperature: float = option(0.0, "Temperature to verify at.", ge=0, advanced=True)
    data: str = data("Prompts to verify with.", advanced=True)
    prompt_file: Path | None = prompt_file(advanced=True)
    device: Device = device()

    @field_validator("to")
    @classmethod
    def _is_known(cls, to: str) -> str:
        names = [*FORMATS, *SERVERS.names()]
        if to not in names:
            raise ValueError(f"no such server or format{did_you_mean(to, names)}")
        return to

    @field_validator("outtype")
    @classmethod
    def _is_a_type(cls, outtype: str) -> str:
        if outtype not in ROUNDED:
            raise ValueError(
                f"no such type{did_you_mean(outtype, ROUNDED)}; llama.cpp's llama-quantize makes others"
            )
        return outtype

    only = (
        Only(("outtype",), lambda c: c.is_gguf, "belongs to --to gguf and llama.cpp"),
        Only(("dtype",), lambda c: not c.is_gguf, "--outtype sets the type of a GGUF file"),
        Only(
            ("use_heterogeneous_vocab",),
            lambda c: c.server is not None and c.server.translates and c.verify_with is None,
            "is for --to vllm or transformers; draftlab's engine, which verifies, needs one vocabulary",
        ),
        Only(
            ("k",),
            lambda c: c.to not in ("hf", "gguf") or c.verify_with,
            "belongs to a script or --verify-with",
        ),
        Only(
            ("prediction",),
            lambda c: c.to == "vllm",
            "only vLLM changes K by batch size: --to vllm",
        ),
        Only(("k",), lambda c: c.prediction is None, "--prediction has it"),
        Only(
            ("verify_with",),
            lambda c: c.server is not None and c.server.program,
            "draftlab starts vLLM and llama.cpp only: --to vllm, speculators, gguf or llama.cpp",
        ),
        Only(
            ("temperature", "data", "prompt_file", "device"),
            lambda c: c.verify_with,
            "belongs to --verify-with",
        ),
        _ONE_SOURCE,
    )

    @property
    def server(self) -> Any:
        """Return the kind of server that loads the export. None if all servers do."""
        name = FORMATS.get(self.to, self.to)
        return SERVERS.get(name, f"--to {self.to}") if name else None

    @property
    def is_gguf(self) -> bool:
        return self.server is not None and self.server.loads_gguf
