"""Quantised targets: their size is what is stored, transformers loads them, and what is lacking is said in one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.builders import build
from helpers.errors import raises_option
from safetensors.torch import load_file, save_file

from draftlab import shipped
from draftlab.latency.cost_model import active_params, pass_bytes
from draftlab.model import checkpoint
from draftlab.model.families import presets
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.size import read_size

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
METHODS: dict[str, dict[str, Any]] = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "fp8": FP8,
}


def configured(place: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """Return a model, and the same with its matrices in blocks of 8-bit floats."""
    source, rounded = (tmp_path_factory.mktemp("models") / name for name in ("source", "rounded"))
    model: Any = build("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    model.to(torch.bfloat16).save_pretrained(source)
    shutil.copytree(source, rounded)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        rows, columns = (-(-size // 128) for size in tensors[name].shape)
        scale = tensors[name].float().abs().max() / 448  # the largest of the format
        tensors[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale.expand(rows, columns).clone()
    save_file(tensors, rounded / "model.safetensors", metadata={"format": "pt"})
    configured(rounded, FP8)
    return source, rounded


def test_its_size_is_what_is_stored(pair):
    size = read_size(pair[1])
    assert size.weight_bytes(2) == size.weight_bytes(4) == (pair[1] / "model.safetensors").stat().st_size
    assert size.params() == read_size(pair[0]).params()
    assert size.weight_bytes() < 0.8 * read_size(pair[0]).weight_bytes()
    assert size.describe().startswith("fp8 llama, ")


def test_transformers_loads_it_with_all_weights_accounted_for(pair):
    """Without a GPU transformers makes bfloat16 of it."""
    ids = torch.arange(3, 19)[None]
    whole, rounded = (HFDecoder(checkpoint.load_any_files(place, torch.bfloat16).eval()) for place in pair)
    expected, found = (model.forward_uncached(ids, 16).float() for model in (whole, rounded))
    error = float((found - expected).norm() / expected.norm())
    assert 1e-3 < error < 0.1  # 3 bits of mantissa


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("method", METHODS)
def test_without_a_gpu_it_is_refused_in_one_line(method, family_dirs, tmp_path):
    shutil.copytree(family_dirs["llama"], tmp_path / "model")
    configured(tmp_path / "model", METHODS[method])
    for read in (
        lambda place: checkpoint.Checkpoint(place).check(),
        lambda place: checkpoint.load_model(place, torch.float32),
    ):
        with raises_option(method):
            read(tmp_path / "model")


def test_four_bits_of_a_65b_are_what_awq_stores():
    """Groups of 128 weights with 20 bits more; embedding and head in 16."""
    shape = presets(shipped.folder("widths"))["llama-65b"]
    matrices = active_params(shape) - shape.vocab * shape.hidden
    stored = pass_bytes(shape, "int4")
    assert stored == pytest.approx(matrices * 4.15625 / 8 + 2 * shape.vocab * shape.hidden)
    assert 33e9 < stored < 35e9
