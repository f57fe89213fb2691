"""An expansion computes the source's function: by transformers alone, and by our decoder in every mode."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import FAMILIES, logits_by_transformers
from errors import raises_option
from safetensors.torch import load_file, save_file

from benchmarks.expand import Expanded, expand, larger
from draftlab.model import checkpoint, llama, modes

IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))
LARGER: dict[str, Any] = {"layers": 7, "hidden": 96, "heads": 12, "kv_heads": 6, "ffn": 104}
SAME: dict[str, Any] = {"layers": 5, "hidden": 64, "heads": 8, "ffn": 88}


def expanded(source: Path, out: Path, **settings: Any) -> Path:
    return expand(source, out, checkpoint.read_shape(source).model_copy(update=LARGER | settings))


logits = partial(logits_by_transformers, ids=IDS)


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest logit."""
    return float((ours - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_sources_by_transformers_alone(family, family_dirs, tmp_path):
    kv_heads = 12 if family == "llama_mha" else 6
    out = expanded(family_dirs[family], tmp_path / "out", kv_heads=kv_heads)
    wanted = LARGER | {"kv_heads": kv_heads}
    assert checkpoint.read_shape(out).model_dump(include=set(wanted)) == wanted
    assert error(logits(out), logits(family_dirs[family])) < 1e-4


@pytest.mark.parametrize("mode", ["eager", "native"])
@pytest.mark.parametrize("family", ["llama", "qwen2_tied", "qwen3"])
def test_logits_are_the_sources_in_our_decoder(family, mode, family_dirs, tmp_path):
    out = expanded(family_dirs[family], tmp_path / "out")
    models = [
        modes.with_mode(llama.load(path, torch.float32), mode)
        for path in (out, family_dirs[family])
    ]
    ours, expected = (model.forward_uncached(IDS, IDS.shape[1]) for model in models)
    assert error(ours, expected) < 1e-4


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(12, 4), (8, 8), (24, 12)],  # of 8 on 4: more heads each, fewer, as many
)
def test_ratios_of_heads_that_hold_the_source_are_exact(heads, kv_heads, family_dirs, tmp_path):
    out = expanded(family_dirs["llama_biases"], tmp_path / "out", heads=heads, kv_heads=kv_heads)
    assert error(logits(out), logits(family_dirs["llama_biases"])) < 1e-4


@pytest.mark.parametrize("axis", ["layers", "hidden", "heads", "ffn"])
def test_each_axis_alone(axis, family_dirs, tmp_path):
    kv_heads = 6 if axis == "heads" else 4
    sizes = SAME | {
        "kv_heads": kv_heads,
        axis: {"layers": 6, "hidden": 72, "heads": 12, "ffn": 90}[axis],
    }
    # LLaMA wants heads to divide the width
    sizes["hidden"] = 72 if axis == "heads" else sizes["hidden"]
    out = expanded(family_dirs["llama3_tied"], tmp_path / "out", **sizes)
    assert error(logits(out), logits(family_dirs["llama3_tied"])) < 1e-4


@pytest.mark.parametrize(
    "wrong", ["model.norm.weight", "model.layers.6.mlp.down_proj.weight", "eps"]
)
def test_one_wrong_scale_changes_the_logits(wrong, family_dirs, tmp_path):
    out = expanded(family_dirs["llama"], tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    if wrong == "eps":
        (out / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    else:
        weights = load_file(out / "model.safetensors")
        # unscaled, or not zero
        weights[wrong] = weights[wrong] * 1.5**0.5 + (1e-3 if "down" in wrong else 0)
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    assert error(logits(out), logits(family_dirs["llama"])) > 1e-4


def test_what_is_added_is_random_of_the_sources_scale_and_seeded(family_dirs):
    weights, source = (
        checkpoint.Weights(family_dirs["llama"]),
        checkpoint.read_shape(family_dirs["llama"]),
    )
    shape = source.model_copy(update=LARGER)
    first, again, other = (Expanded(weights, source, shape, seed) for seed in (0, 0, 1))
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.6.self_attn.q_proj.weight"):
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])
    added, have = (
        first["model.layers.0.mlp.up_proj.weight"][:, 64:],
        weights["model.layers.0.mlp.up_proj.weight"],
    )
    assert added.std().item() == pytest.approx(have.std().item(), rel=0.1)
    assert not torch.equal(
        first["model.layers.5.mlp.up_proj.weight"], first["model.layers.6.mlp.up_proj.weight"]
    )


def test_parameters_solve_the_ffn(family_dirs):
    shape = larger(checkpoint.read_shape(family_dirs["llama"]), width=128, params="1m")
    assert shape.params() == pytest.approx(1e6, rel=0.01)
    assert (shape.heads, shape.kv_heads) == (16, 8)


@pytest.mark.parametrize("axis", ["layers", "kv_heads", "ffn"])
def test_no_axis_may_be_shorter_than_the_sources(axis, family_dirs, tmp_path):
    with raises_option(axis):
        expanded(family_dirs["llama"], tmp_path / "out", **{axis: 2})
    assert not (tmp_path / "out").exists()
