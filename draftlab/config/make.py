"""Settings of init, import, design and env."""

from pathlib import Path
from typing import Literal

from pydantic import model_validator
from typing_extensions import Self

from draftlab import workspace
from draftlab.config import shared
from draftlab.config.base import Config, Numbers, Only, OutputConfig, numbers, option


class InitConfig(Config):
    """draftlab.yaml, from a preset, a checkpoint or a GGUF file."""

    preset: str | None = option(
        None, f"Target, source and text together: {', '.join(workspace.PRESETS)}."
    )
    target: str | None = option(
        None, "Checkpoint of the target: a directory, or a hub name with @REVISION."
    )
    source: str | None = option(None, "Checkpoint that drafts are cut from. Default: the target.")
    draft: str | None = option(
        None, "Ready draft, such as a smaller model of the family: compared until one is made."
    )
    gguf: Path | None = option(None, "GGUF file of the target, imported under models/.")
    data: str | None = option(
        None, "Text: SOURCE, or SOURCE=WEIGHT,SOURCE=WEIGHT.", shown_default="the preset's"
    )
    overwrite: bool = option(False, "Replace an existing draftlab.yaml.", flag="--force")

    only = (
        Only(("source", "draft"), lambda c: c.target, "needs --target"),
        Only(
            ("gguf",),
            lambda c: c.preset in (None, "smollm2"),
            "goes with --preset smollm2 or without a preset",
        ),
    )

    @model_validator(mode="after")
    def _names_one_target(self) -> Self:
        if (self.preset is None and self.gguf is None) == (self.target is None):
            raise ValueError(
                "name the target by one of --preset tiny, --preset smollm2, --target NAME, --gguf FILE"
            )
        return self


class ImportConfig(OutputConfig):
    """A GGUF file, .bin files or a PEFT adapter as a Hugging Face directory."""

    source: str = option(
        help="GGUF file, or directory or hub name with pytorch_model.bin or a PEFT adapter.",
        argument=True,
    )
    base: str | None = option(
        None, "Checkpoint that an adapter was trained on. Default: the one its config names."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Data type of the weights written; auto: as stored, bfloat16 if quantised."
    )


class DesignConfig(Config):
    """Shapes of equal budget, one per depth."""

    params: shared.Count = option(None, "Budget: parameters of each shape, as 1.3b, 796m, 4m.")
    kv_kib: float | None = option(None, "Budget: KiB of KV cache per token in bf16.", gt=0)
    latency_ms: float | None = option(
        None, "Budget: milliseconds of a one-token pass, by the latency law.", gt=0
    )
    layers: Numbers = numbers("1-12", "Depths to try, as 2,4,8 or 1-8.")
    source: str = shared.source()
    vocab: shared.Vocab = shared.draft_vocab("the target's answers")
    multiple_of: int = option(64, "The ffn is a multiple of this.", ge=1, advanced=True)
    tensor_parallel: int = option(
        1, "Devices over which heads, kv-heads and ffn split evenly.", ge=1
    )
    law: Path | None = option(
        None, "Output of draftlab profile --law, which says how long a pass takes."
    )
    out: Path | None = option(None, "Folder for one shape file per depth. Default: show only.")
    overwrite: bool = option(False, "Replace existing shape files.", flag="--force")

    only = (
        Only(("overwrite",), lambda c: c.out, "needs --out"),
        Only(
            ("latency_ms",),
            lambda c: c.law,
            "needs a latency law: measure one with draftlab profile --law SOURCE "
            "--out law, and name it by --law law",
        ),
    )

    @model_validator(mode="after")
    def _has_one_budget(self) -> Self:
        if sum(budget is not None for budget in (self.params, self.kv_kib, self.latency_ms)) != 1:
            raise ValueError("give one budget: --params 1.3b, --kv-kib 120 or --latency-ms 2")
        return self


class EnvConfig(Config):
    """Versions and machine."""
