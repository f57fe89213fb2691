"""The settings of the commands `init`, `import`, `design` and `env`. Torch is not loaded."""

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from draftlab.config import shared
from draftlab.config.base import (
    Config,
    Numbers,
    Only,
    OutputConfig,
    advanced_option,
    numbers,
    option,
)
from draftlab.runs import workspace


class InitConfig(Config):
    """The settings of the command `init`, which writes draftlab.yaml from a preset, a checkpoint or a GGUF file."""

    preset: str | None = option(None, f"Preset of target, source and text: {', '.join(workspace.PRESETS)}.")
    target: str | None = option(None, "Checkpoint of the target: a directory or a hub name, optionally with @REVISION.")
    source: str | None = option(None, "Checkpoint from which drafts are cut. Default: the target.")
    draft: str | None = option(
        None,
        "Draft that exists already, such as a smaller model of the same family. Commands use it until you make a "
        "draft.",
    )
    gguf: Path | None = option(None, "GGUF file of the target, which is imported under models/.")
    data: str | None = option(
        None,
        "Text to train and measure on: one SOURCE, or a mixture, SOURCE=WEIGHT,SOURCE=WEIGHT.",
        shown_default="the preset's",
    )
    overwrite: bool = option(False, "Replace an existing draftlab.yaml.", flag="--force")

    only = (
        Only(("source", "draft"), lambda c: c.target, "needs --target NAME"),
        Only(
            ("gguf",),
            lambda c: c.preset in (None, "smollm2"),
            "works only with --preset smollm2 or without --preset",
        ),
    )

    @model_validator(mode="after")
    def _names_one_target(self) -> Self:
        if (self.preset is None and self.gguf is None) == (self.target is None):
            raise ValueError(
                "name the target: --preset NAME, --gguf FILE or --target NAME; --target excludes --preset and --gguf"
            )
        return self


class ImportConfig(OutputConfig):
    """The settings of the command `import`, which converts checkpoints in other layouts to Hugging Face directories."""

    source: str = option(
        help="A GGUF file, or a directory or hub name with pytorch_model.bin, a LoRA adapter or a multimodal model.",
        argument=True,
    )
    base: str | None = option(
        None,
        "Base checkpoint of a PEFT adapter. Default: the base that the adapter's config names.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Data type of the written weights; auto: the data type of the file, or bfloat16 for a quantised file.",
    )


class DesignConfig(Config):
    """The settings of the command `design`, which finds a shape for each number of layers within the same budget."""

    params: shared.Count = option(None, "Budget: number of parameters of each shape, such as 1.3b or 796m.")
    kv_kib: float | None = option(None, "Budget: KiB of KV cache per token in bf16.", gt=0)
    latency_ms: float | None = option(None, "Budget: milliseconds of a one-token pass, predicted by --law.", gt=0)
    layers: Numbers = numbers("1-12", "Numbers of layers to try, as 2,4,8 or 1-8.")
    source: str = shared.source()
    vocab: shared.Vocab = shared.draft_vocab("the target's answers")
    multiple_of: int = advanced_option(64, "The FFN size is a multiple of this number.", ge=1)
    tensor_parallel: int = option(
        1,
        "Number of tensor-parallel devices over which heads, KV heads and FFN must split evenly.",
        ge=1,
    )
    law: Path | None = option(None, "Latency law: an output of draftlab profile --law.")
    out: Path | None = option(
        None,
        "Folder to write a file for each shape to. Default: shapes are shown and not written.",
        acts="always",
    )
    overwrite: bool = option(False, "Replace existing shape files.", flag="--force")

    only = (
        Only(("overwrite",), lambda c: c.out, "works only with --out FOLDER", refused=False),
        Only(
            ("latency_ms",),
            lambda c: c.law,
            "needs a latency law: run draftlab profile --law SOURCE --out law, then add --law law",
        ),
    )

    @model_validator(mode="after")
    def _has_one_budget(self) -> Self:
        if sum(budget is not None for budget in (self.params, self.kv_kib, self.latency_ms)) != 1:
            raise ValueError("write exactly one budget: --params 1.3b, --kv-kib 120 or --latency-ms 2")
        return self


class EnvConfig(Config):
    """The settings of the command `env`. There are none."""
