"""Rotary embeddings in GGUF: settings and tensors from which llama.cpp computes what transformers computes.

F rotary frequencies: half of head_dim.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftlab.errors import UserError
from draftlab.model import checkpoint
from draftlab.model.llama import rotary
from draftlab.reading import reading

Settings = dict[str, int | float | str]  # by name without the architecture
ROPE_FACTORS = "rope_freqs.weight"
SHORT = "rope_factors_short.weight"
LONG = "rope_factors_long.weight"
EVERY_TENSOR = frozenset({ROPE_FACTORS, SHORT, LONG})
# llama.cpp's constants of YaRN
BETA_FAST = 32.0
BETA_SLOW = 1.0
CLOSE = 1e-4  # relative difference of frequencies; llama.cpp computes them in float32
# fields of rope_parameters that transformers reads, by kind of rotary scaling
FIELDS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "beta_fast",
            "beta_slow",
            "truncate",
            "finetuned",  # a note of YaRN's authors, from which nobody computes anything
        }
    ),
    "longrope": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "short_factor",
            "long_factor",
        }
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The rotary embeddings of a checkpoint in GGUF's form.

    Attributes:
        settings: Settings of the architecture, by name without the architecture.
        tensors: Divisors of the unscaled frequencies, [F], by name in the GGUF file.
        needs: Fields of config.json for which the tensors are needed.
        short: If not None, texts of more tokens have other frequencies than shorter texts.
    """

    settings: Mapping[str, int | float | str]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    needs: str = ""
    short: int | None = None


def read_rope(directory: Path, head_dim: int) -> Rope:
    """Return the rotary embeddings of a checkpoint in GGUF's form.

    transformers computes the frequencies and the factor of the tables. Where llama.cpp computes other frequencies from
    its settings, the frequencies become a tensor.

    Raises:
        UserError: GGUF cannot hold the rotary scaling.
    """
    config: Any = checkpoint.auto_config(directory)
    rope: Mapping[str, Any] = config.rope_parameters
    kind = rope.get("rope_type", "default")
    _check_fields(rope, kind, directory)
    with reading(f"{directory}: rope_parameters"):
        theta = float(rope["rope_theta"])
        unscaled = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        settings: Settings = {"rope.freq_base": theta}
        if kind == "longrope":
            return _longrope(config, settings, unscaled)
        frequencies, attention_factor = rotary(config, head_dim, directory)
        needs = ""  # why the frequencies must be a tensor
        if kind == "llama3":
            needs = "rotary scaling 'llama3'"
        elif kind == "linear":
            settings |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        elif kind == "yarn":
            yarn = settings | _yarn_settings(config, attention_factor)
            if torch.allclose(_yarn_frequencies(yarn, head_dim), frequencies, rtol=CLOSE):
                settings = yarn
            else:
                needs = _unusual(rope)
                if attention_factor != 1:
                    settings["rope.scaling.attn_factor"] = attention_factor
    tensors = {ROPE_FACTORS: unscaled / frequencies} if needs else {}
    return Rope(settings=settings, tensors=tensors, needs=needs)


def _check_fields(rope: Mapping[str, Any], kind: str, directory: Path) -> None:
    """Raise UserError if rope_parameters have a field that the file would lose."""
    if kind not in FIELDS:
        raise UserError(
            f"{directory} has rotary scaling {kind!r}, but GGUF export supports only linear, llama3, yarn and "
            "longrope; use --to hf"
        )
    if (part := rope.get("partial_rotary_factor")) not in (None, 1):
        raise UserError(
            f"{directory}: rope_parameters turn a part of each head (partial_rotary_factor {part}), but llama.cpp "
            "turns the whole head for this architecture; use --to hf"
        )
    known = FIELDS[kind] | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    unknown = [name for name, value in rope.items() if value is not None and name not in known]
    if unknown:
        raise UserError(
            f"{directory}: rope_parameters have {', '.join(unknown)}, which draftlab cannot write to a GGUF file for "
            f"rotary scaling {kind!r}; remove what has no meaning there, or use --to hf"
        )


def _longrope(config: PreTrainedConfig, settings: Settings, unscaled: Tensor) -> Rope:
    """Return LongRoPE in GGUF's form: divisors for short texts and for long texts, and the factor of the tables."""
    original = int(config.rope_parameters["original_max_position_embeddings"])
    tensors: dict[str, Tensor] = {}
    attention_factor = 1.0
    for name, length in ((SHORT, original), (LONG, original + 1)):
        frequencies, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](config, checkpoint.CPU, length)
        tensors[name] = unscaled / frequencies
    settings = settings | {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": float(attention_factor),
    }
    return Rope(settings=settings, tensors=tensors, needs="rotary scaling 'longrope'", short=original)


def _yarn_settings(config: PreTrainedConfig, attention_factor: float) -> Settings:
    """Return YaRN's settings.

    llama.cpp multiplies attn_factor by 0.1 ln(factor) + 1. For the architectures of gguf.py it reads neither
    yarn_attn_factor nor yarn_beta_fast and yarn_beta_slow.
    """
    rope = config.rope_parameters
    original = int(rope["original_max_position_embeddings"])
    factor = rope["factor"]  # transformers allows None
    factor = config.max_position_embeddings / original if factor is None else float(factor)
    settings: Settings = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
    }
    relative = attention_factor / (0.1 * math.log(max(factor, 1)) + 1)
    if not math.isclose(relative, 1, rel_tol=1e-6):
        settings["rope.scaling.attn_factor"] = relative
    return settings


def _yarn_frequencies(settings: Mapping[str, Any], head_dim: int) -> Tensor:
    """Return the frequencies that llama.cpp computes from YaRN's settings, [F]. ggml_rope_yarn_corr_dims, rope_yarn."""
    theta = settings["rope.freq_base"]
    original = settings["rope.scaling.original_context_length"]

    def boundary(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(0, math.floor(boundary(BETA_FAST)))
    high = min(head_dim - 1, math.ceil(boundary(BETA_SLOW)))
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    kept = 1 - ((pairs - low) / max(0.001, high - low)).clamp(0, 1)
    return theta ** -(2 * pairs / head_dim) * (kept + (1 - kept) / settings["rope.scaling.factor"])


def _unusual(rope: Mapping[str, Any]) -> str:
    """Return the names of YaRN's fields that llama.cpp does not read."""
    usual = {"beta_fast": BETA_FAST, "beta_slow": BETA_SLOW, "truncate": True}
    fields = [f"{name} {rope[name]}" for name, value in usual.items() if rope.get(name, value) != value]
    return f"rotary scaling 'yarn' with {', '.join(fields) or 'an unusual range'}"
