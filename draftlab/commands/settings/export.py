"""The settings of the commands `check` and `export`. Torch is not loaded."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import field_validator

from draftlab.config.base import MAX_K, Config, Only, OutputConfig, advanced_option, option
from draftlab.config.shared import (
    KEY_RULE,
    ONE_SOURCE,
    CheckpointSettings,
    api_key_file,
    data,
    device,
    newest_draft,
    prompt_file,
    served_model_name,
    target,
)
from draftlab.console import note
from draftlab.errors import did_you_mean
from draftlab.model.hub import ROUNDED
from draftlab.registry import SERVERS

# format -> the server that loads this format; "" if all servers do
FORMATS = {"hf": "", "gguf": "llama.cpp", "speculators": "vllm"}


class DraftConfig(Config, CheckpointSettings):
    draft: str | None = option(
        None, "Checkpoint of the draft, or EAGLE-3 head. Default: the newest draft.", argument=True
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
        f"Servers that should run the draft, separated by commas: {SERVERS.listed()}. Default: all.",
        flag="--for",
    )
    data: str = data("Text on which perplexity is measured.")
    prompt_file: Path | None = prompt_file()
    files_only: bool = option(False, "Only check the files, and do not run the draft.")
    server: str | None = option(
        None,
        "Server that runs the draft, http://HOST:PORT. Its answers are compared with the draft's answers on this "
        "machine.",
        acts="always",
    )
    temperature: float = option(0.0, "Temperature of the requests to the server.", ge=0)
    api_key_file: Path | None = api_key_file()
    served_model_name: str | None = served_model_name()

    only = (
        Only(
            ("server",),
            lambda c: not c.files_only,
            "leave it out, because --files-only does not run the draft",
        ),
        Only(
            ("data", "prompt_file"),
            lambda c: not c.files_only,
            "--files-only does not run the draft",
            refused=False,
        ),
        Only(("temperature",), lambda c: c.server, "works only with --server URL", refused=False),
        KEY_RULE,
        ONE_SOURCE,
    )

    @property
    def addresses(self) -> dict[str, str | None]:
        return {"--server": self.server}

    @property
    def text_source(self) -> str | None:
        return None if self.files_only or self.prompt_file is not None else self.data


class ExportConfig(DraftConfig, OutputConfig):
    to: str = option(
        "hf",
        "Format: hf, a Hugging Face directory; gguf, a GGUF file; speculators, an EAGLE-3 head for vLLM; or the name "
        f"of a server ({SERVERS.listed()}), for the format of this server with a start script.",
    )
    outtype: str = option("f16", f"Data type of the matrices in a GGUF file: {', '.join(ROUNDED)}.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "Data type of the weights in a Hugging Face directory. Default: the checkpoint's."
    )
    use_heterogeneous_vocab: bool = option(
        False,
        "Export a draft whose vocabulary differs from the target's; only vLLM and transformers can run it.",
    )
    k: int | None = option(
        None,
        "Number of drafted tokens per step (K). Default: the best K of the newest score; without a score, "
        "a K for this kind of draft.",
        ge=1,
        le=MAX_K,
    )
    scores: list[Path] = option(
        factory=list,
        help="Scores of the draft, for the choice of K and for the model card: score.json files, or directories that "
        "have such files.",
        shown_default="runs/, or runs in draftlab.yaml",
    )
    verify_with: Path | None = option(
        None,
        "Path of the program vllm or llama-server, in which the export is tested. The draft's acceptance there must "
        "equal its acceptance in draftlab's engine.",
        reads="nothing",
        acts="always",
    )
    temperature: float = advanced_option(0.0, "Temperature with --verify-with; 0 is greedy.", ge=0)
    data: str = data("Text source of the prompts with --verify-with.", advanced=True)
    prompt_file: Path | None = prompt_file(advanced=True)
    device: str = device()

    @field_validator("outtype")
    @classmethod
    def _is_a_type(cls, outtype: str) -> str:
        if outtype not in ROUNDED:
            raise ValueError(
                f"export does not write this type{did_you_mean(outtype, ROUNDED)}; for other types, "
                "export with f16, then run llama.cpp's llama-quantize"
            )
        return outtype

    only = (
        Only(("outtype",), lambda c: c.is_gguf, "works only with --to gguf or --to llama.cpp", refused=False),
        Only(
            ("dtype",),
            lambda c: not c.is_gguf,
            "--outtype sets the data type of a GGUF file",
            refused=False,
        ),
        Only(
            ("use_heterogeneous_vocab",),
            lambda c: c.server is not None and c.server.translates and c.verify_with is None,
            "works only with --to vllm or --to transformers, and without --verify-with",
        ),
        Only(
            ("k",),
            lambda c: c.to not in ("hf", "gguf") or c.verify_with,
            "works only with --to SERVER, --to speculators or --verify-with",
            refused=False,
        ),
        Only(
            ("verify_with",),
            lambda c: c.server is not None and c.server.program,
            "works only with --to vllm, speculators, gguf or llama.cpp, because draftlab starts no other servers",
        ),
        Only(
            ("temperature", "data", "prompt_file", "device"),
            lambda c: c.verify_with,
            "works only with --verify-with PROGRAM",
            refused=False,
        ),
        ONE_SOURCE,
    )

    @property
    def text_source(self) -> str | None:
        return self.data if self.verify_with is not None and self.prompt_file is None else None

    @property
    def server(self) -> Any:
        """Return the registered class of the server that loads the export, or None if all servers load it."""
        name = FORMATS.get(self.to, self.to)
        return SERVERS.get(name, f"--to {self.to}") if name else None

    @property
    def is_gguf(self) -> bool:
        return self.server is not None and self.server.loads_gguf
