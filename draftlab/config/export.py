"""Settings of check and export."""

from pathlib import Path
from typing import Literal

from pydantic import field_validator, model_validator
from typing_extensions import Self

from draftlab.config import inputs
from draftlab.config.base import MAX_K, Config, Only, OutputConfig, from_workspace, option
from draftlab.config.server_rules import SampleMethod
from draftlab.config.shared import (
    CHAT_RULES,
    ChatMode,
    CheckpointSettings,
    Device,
    chat,
    data,
    device,
    newest_draft,
    prompt_file,
    system_prompt,
    target,
)
from draftlab.console import note
from draftlab.errors import did_you_mean
from draftlab.model import hub

TRANSLATING = ("vllm", "transformers")  # between two vocabularies
K_TYPES = ("q2_k", "q3_k_m", "q4_k_s", "q4_k_m", "q5_k_m", "q6_k")  # only llama.cpp's own quantizer makes these
RUNTIMES = ("vllm", "sglang", "llama.cpp", "tensorrt-llm", "transformers")


class DraftConfig(Config, CheckpointSettings):
    draft: str | None = option(
        None, "Checkpoint of the draft, or EAGLE-3 head. Default: the newest draft.", argument=True,
        flag="--draft",
    )  # fmt: skip

    def resolved(self) -> Self:
        if self.draft is not None:
            return self
        note(f"draft: {newest_draft()}")
        return self.model_copy(update={"draft": str(newest_draft())})

    def check(self, *, weights: bool) -> None:
        self.draft_directory()
        super().check(weights=weights)

    def draft_directory(self) -> Path:
        """Raises UserError: there is no such checkpoint."""
        return hub.locate(self.draft or newest_draft())


class CheckConfig(DraftConfig):
    target: str = target(reads=inputs.config_only)
    runtimes: str = option(",".join(RUNTIMES), "Runtimes to check for, by comma.", flag="--for")
    data: str = from_workspace("data", "Text to measure perplexity on.", reads=inputs.local_text)
    prompt_file: Path | None = prompt_file(advanced=True)
    chat: ChatMode = chat(advanced=True)
    system_prompt: str | None = system_prompt()
    files_only: bool = option(False, "Read files only; do not run the draft.")
    device: Device = device()

    @field_validator("runtimes")
    @classmethod
    def _are_known(cls, text: str) -> str:
        for name in (part.strip() for part in text.split(",")):
            if name not in RUNTIMES:
                raise ValueError(f"no runtime {name!r}{did_you_mean(name, RUNTIMES)}")
        return text

    only = (
        Only(("data", "prompt_file", "device"), lambda c: not c.files_only, "--files-only does not run the draft"),
        Only(("data",), lambda c: c.prompt_file is None, "give prompts by --data or by --prompt-file, not by both"),
        *CHAT_RULES,
    )


class ExportConfig(DraftConfig, OutputConfig):
    to: Literal["hf", "gguf", "vllm", "speculators", "sglang", "llama.cpp", "tensorrt-llm", "transformers"] = option(
        "hf",
        "A Hugging Face directory, a GGUF file, or one of them with a script that serves it in a runtime; speculators: "
        "an EAGLE-3 head in that layout, which vLLM serves.",
    )
    target: str = target(reads=inputs.config_only)
    outtype: str = option("f16", "GGUF: type of matrices, such as f32, f16, bf16, q8_0, q4_0 or q4_k_m.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "Hugging Face: data type of weights. Default: as stored."
    )
    use_heterogeneous_vocab: bool = option(
        False, "Keep the draft's own vocabulary: vLLM and transformers can translate between two.", advanced=True
    )
    k: int | None = option(None, "Drafted tokens per step. Default: the best K of a score, else 4.", ge=1, le=MAX_K)
    k_reason: str | None = option(None, "Why --k is what it is, for the script. Default: set by --k.", advanced=True)
    prediction: Path | None = option(
        None, "Take K by batch size from this file, which draftlab predict --for vllm --json printed."
    )
    scores: list[Path] = option(
        factory=list, help="score.json files of the draft, or directories of them, for K and the card.",
        shown_default="the workspace's runs",
    )  # fmt: skip
    verify_with: Path | None = option(
        None,
        "Score the export where it runs: path of vllm; for GGUF of llama-server, or for draft models of a Python with "
        "llama-cpp-python.",
        reads=inputs.program,
    )
    temperature: float = option(0.0, "Temperature to verify at.", ge=0, advanced=True)
    draft_sample_method: SampleMethod | None = option(
        None, "vLLM: how the draft proposes above temperature 0. Default: as more is accepted at --temperature.",
        advanced=True,
    )  # fmt: skip
    gpu_memory_utilization: float | None = option(
        None, "Share of the memory that vLLM may take to verify. Default: vLLM's.", gt=0, le=1, advanced=True
    )
    data: str = data("Prompts to verify with.", advanced=True)
    prompt_file: Path | None = prompt_file(advanced=True)
    chat: ChatMode = chat(advanced=True)
    system_prompt: str | None = system_prompt()
    prompts: int | None = option(
        None, "Number of prompts to verify with. Default: all of a file, 16 of --data.", ge=2, advanced=True
    )
    push_to_hub: str | None = option(None, "Repository of the Hugging Face hub to upload to.")
    device: Device = device()

    @field_validator("outtype")
    @classmethod
    def _is_a_type(cls, outtype: str) -> str:
        if outtype not in (*inputs.TYPES, *K_TYPES):
            raise ValueError(f"no such type{did_you_mean(outtype, (*inputs.TYPES, *K_TYPES))}")
        return outtype

    only = (
        Only(("outtype",), lambda c: c.is_gguf, "belongs to --to gguf and llama.cpp"),
        Only(("dtype",), lambda c: not c.is_gguf, "--outtype sets the type of a GGUF file"),
        Only(
            ("use_heterogeneous_vocab",),
            lambda c: c.to in TRANSLATING and c.verify_with is None,
            f"is for --to {' or '.join(TRANSLATING)}; draftlab's engine, which verifies, needs one vocabulary",
        ),
        Only(("k",), lambda c: c.to not in ("hf", "gguf") or c.verify_with, "belongs to a script or --verify-with"),
        Only(("prediction",), lambda c: c.to == "vllm", "only vLLM changes K by batch size: --to vllm"),
        Only(("k",), lambda c: c.prediction is None, "--prediction has it"),
        Only(("k_reason",), lambda c: c.k is not None, "needs --k"),
        Only(
            ("verify_with",),
            lambda c: c.to not in ("sglang", "tensorrt-llm", "transformers"),
            "works for vLLM and llama.cpp",
        ),
        Only(
            ("temperature", "data", "prompt_file", "prompts", "device"),
            lambda c: c.verify_with,
            "belongs to --verify-with",
        ),
        Only(
            ("draft_sample_method",),
            lambda c: c.to == "vllm" and not c.use_heterogeneous_vocab,
            "belongs to --to vllm, which drafts greedily where vocabularies differ",
        ),
        Only(
            ("gpu_memory_utilization",), lambda c: c.verify_with and not c.is_gguf, "belongs to --verify-with of vLLM"
        ),
        Only(("data",), lambda c: c.prompt_file is None, "give prompts by --data or by --prompt-file, not by both"),
        *CHAT_RULES,
    )

    @model_validator(mode="after")
    def _program_does_what_is_asked(self) -> Self:
        runs_alone = self.is_gguf and self.verify_with is not None and not is_llama_server(self.verify_with)
        if self.temperature > 0 and runs_alone:
            raise ValueError("--temperature: a Python with llama-cpp-python runs the draft alone; name llama-server")
        if self.is_gguf and self.outtype in K_TYPES and not runs_alone:
            remedy = "name a Python with llama-cpp-python with --verify-with"
            raise ValueError(f"--outtype {self.outtype}: only llama.cpp quantizes to it; {remedy}")
        return self

    @property
    def is_gguf(self) -> bool:
        return self.to in ("gguf", "llama.cpp")

    def default_name(self) -> str:
        return f"export-{hub.checkpoint_name(self.draft_directory())}-{self.outtype if self.is_gguf else self.to}"


def is_llama_server(program: Path) -> bool:
    """Return whether a program is llama-server rather than a Python, by its name."""
    return "llama-server" in program.name
