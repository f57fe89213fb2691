"""Rotary angles from GGUF files: what llama.cpp computes from the file is what transformers computes.

llama.cpp's computation is written down here a second time, from ggml_rope_yarn and llama-model.cpp (xllamacpp
2026.10.11549). test_gguf_rope.py asks its server for log-probabilities.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises_option
from helpers.gguf_files import contents
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftlab.exporting import gguf
from draftlab.heads.eagle3 import layout
from draftlab.heads.eagle3.layout import Head

THETA, HEAD_DIM, ORIGINAL, CONTEXT = 10000.0, 12, 64, 256
POSITIONS = torch.tensor([[0, 1, 7, 40, 63, 64, 120, 255]])
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 8.0],
}
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": YARN,
    "yarn without factor": YARN | {"factor": None},
    "attention_factor": YARN | {"attention_factor": 1.3},
    "attention_factor 1": YARN | {"attention_factor": 1.0},
    "mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
    "mscale alone": YARN | {"mscale": 0.7},
    "beta_fast": YARN | {"beta_fast": 4.0},
    "beta_slow": YARN | {"beta_slow": 0.25},
    "betas": YARN | {"beta_fast": 4.0, "beta_slow": 0.25, "attention_factor": 1.3},
    "truncate": YARN | {"truncate": False},
    "longrope": LONGROPE,
    "longrope with attention_factor": LONGROPE | {"attention_factor": 1.7},
}


def with_rope(folder: Path, source: Path, scaling: dict[str, Any]) -> Path:
    """Copy a checkpoint, with this rotary scaling."""
    shutil.copytree(source, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"max_position_embeddings": CONTEXT}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": THETA} | scaling
    file.write_text(json.dumps(config))
    return folder


def by_llama_cpp(
    fields: dict[str, Any], tensors: dict[str, torch.Tensor], length: int, prefix: str = "llama"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of the positions, [T, F], in a server whose context is `length`."""

    def field(name: str, default: Any) -> Any:
        return fields.get(f"{prefix}.rope.{name}", default)

    scaling, scale = field("scaling.type", "none"), 1 / field("scaling.factor", 1.0)
    original = field("scaling.original_context_length", CONTEXT)
    pairs = torch.arange(HEAD_DIM // 2, dtype=torch.float64)
    divisors = torch.ones(len(pairs))
    if "rope_freqs.weight" in tensors:
        divisors = tensors["rope_freqs.weight"]
    elif "rope_factors_long.weight" in tensors:
        which = "long" if length > original else "short"
        divisors = tensors[f"rope_factors_{which}.weight"]
    frequencies = field("freq_base", None) ** -(2 * pairs / HEAD_DIM) / divisors
    magnitude = field("scaling.attn_factor", 1.0)
    if scaling == "yarn":
        low, high = (
            HEAD_DIM * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(THETA)) for beta in (32.0, 1.0)
        )
        low, high = max(0, math.floor(low)), min(HEAD_DIM - 1, math.ceil(high))
        kept = 1 - ((pairs - low) / max(0.001, high - low)).clamp(0, 1)
        frequencies = frequencies * (scale * (1 - kept) + kept)
        magnitude *= 1 + 0.1 * math.log(1 / scale)
    else:
        frequencies = frequencies * scale
    angles = POSITIONS[0, :, None] * frequencies
    return magnitude * angles.cos(), magnitude * angles.sin()


def by_transformers(folder: Path, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    config: Any = AutoConfig.from_pretrained(folder)
    rotary = LlamaRotaryEmbedding(config)
    positions = POSITIONS[:, POSITIONS[0] < length]
    cos, sin = rotary(torch.zeros(1), positions)
    return cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]


@pytest.mark.parametrize("name", SCALINGS)
def test_angles_from_the_file_are_those_of_transformers(name, family_dirs, tmp_path):
    folder = with_rope(tmp_path / "model", family_dirs["llama"], SCALINGS[name])
    gguf.write(folder, tmp_path / "a.gguf", "f32")
    fields, tensors = contents(tmp_path / "a.gguf")
    # transformers takes LongRoPE's factors by the length of the text, llama.cpp by that of the server's context
    for length in (ORIGINAL, CONTEXT):
        wanted = by_transformers(folder, length)
        for found, value in zip(by_llama_cpp(fields, tensors, length), wanted, strict=True):
            # the largest angle is 255, and llama.cpp has its frequencies in float32
            torch.testing.assert_close(found[: len(value)].float(), value, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("rope", "names"),
    [
        ({"factor": 4.0}, ["factor"]),
        ({"mrope_section": [2, 2, 2]}, ["mrope_section"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        (YARN | {"low_freq_factor": 1.0}, ["low_freq_factor"]),
        (
            YARN | {"attn_factor": 2.0},
            ["attn_factor"],
        ),  # unsloth#2984: transformers does not read it
        (LONGROPE | {"long_mscale": 1.2}, ["long_mscale"]),  # of Phi-3.5 MoE
        ({"rope_type": "dynamic", "factor": 2.0}, ["dynamic"]),
    ],
)
def test_a_field_that_the_file_would_lose_is_refused_by_name(rope, names, family_dirs, tmp_path):
    folder = with_rope(tmp_path / "model", family_dirs["llama"], rope)
    with raises_option(*names):
        gguf.write(folder, tmp_path / "a.gguf", "f32")
    assert not (tmp_path / "a.gguf").exists()


def test_thetas_by_layer_type_are_refused(family_dirs, tmp_path):
    folder = Path(shutil.copytree(family_dirs["llama"], tmp_path / "model"))
    file = folder / "config.json"
    kinds = {"full_attention": 1e6, "sliding_attention": 1e4}
    thetas = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in kinds.items()}
    layer_types = [*kinds] * 2 + ["full_attention"]
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"rope_parameters": thetas, "layer_types": layer_types}))
    with raises_option("full_attention", "sliding_attention"):
        gguf.write(folder, tmp_path / "a.gguf", "f32")


@pytest.fixture
def head(family_dirs, tmp_path) -> Path:
    """Return an EAGLE-3 head of the small llama."""
    target = family_dirs["llama"]
    config = layout.head_config(target, None, 40)
    weights = {name: torch.zeros(size) for name, size in config.sizes().items()}
    folder = tmp_path / "head"
    folder.mkdir()
    whole = Head(config=config, weights=weights, ids=torch.arange(40), embedding=None)
    layout.write(folder, whole, "native", target=target, k=3)
    return folder


def write_head(folder: Path, target: Path, file: Path) -> None:
    gguf.write_head(folder, target, layout.check(folder, target), file, "f32")


@pytest.mark.parametrize("name", [name for name in SCALINGS if "longrope" not in name])
def test_angles_of_a_head_are_those_of_transformers(name, head, family_dirs, tmp_path):
    folder = with_rope(tmp_path / "scaled", head, SCALINGS[name])
    write_head(folder, family_dirs["llama"], tmp_path / "a.gguf")
    fields, tensors = contents(tmp_path / "a.gguf")
    wanted = by_transformers(folder, CONTEXT)
    for found, value in zip(by_llama_cpp(fields, tensors, CONTEXT, "eagle3"), wanted, strict=True):
        torch.testing.assert_close(found.float(), value, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("scaling", "names"),
    [(LONGROPE, ["longrope"]), (YARN | {"low_freq_factor": 1.0}, ["low_freq_factor"])],
)
def test_scaling_of_a_head_that_llama_cpp_does_not_compute_is_refused(scaling, names, head, family_dirs, tmp_path):
    folder = with_rope(tmp_path / "scaled", head, scaling)
    with raises_option(*names):
        write_head(folder, family_dirs["llama"], tmp_path / "a.gguf")
