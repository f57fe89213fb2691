"""Modes are chosen by the device and the models, and caches of transformers roll back as the engine's do."""

import shutil

import pytest
import torch
from errors import raises_option
from transformers import OPTConfig, OPTForCausalLM

from draftlab.model import modes, native_cpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def opt_dir(tmp_path):
    config = OPTConfig(
        vocab_size=307,
        hidden_size=32,
        num_hidden_layers=1,
        ffn_dim=64,
        num_attention_heads=2,
        word_embed_proj_dim=32,
    )
    OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    return tmp_path / "opt"


@pytest.mark.parametrize(
    ("device", "dtype", "mode"), [(CUDA, torch.bfloat16, "graphs"), (CPU, torch.float16, "eager")]
)
def test_auto_is_the_fastest_mode_that_runs(device, dtype, mode, family_dirs):
    assert modes.resolve_mode("auto", device, dtype, [family_dirs["llama"]]) == mode


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_auto_is_native_on_a_cpu(family_dirs):
    assert native_cpu.library()
    assert (
        modes.resolve_mode("auto", CPU, torch.float32, [family_dirs["llama"], family_dirs["qwen3"]])
        == "native"
    )


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_auto_is_eager_if_one_model_needs_transformers(device, family_dirs, opt_dir, capsys):
    assert (
        modes.resolve_mode("auto", device, torch.float32, [family_dirs["llama"], opt_dir])
        == "eager"
    )
    assert "eager" in capsys.readouterr().err


def test_a_named_mode_is_not_changed():
    assert modes.resolve_mode("eager", CUDA, torch.float32, []) == "eager"


def test_graphs_need_cuda():
    with raises_option("graphs"):
        modes.check_mode("graphs", CPU, torch.float32)


@pytest.mark.parametrize(
    ("file", "content"),
    [("model.safetensors", b"\x00" * 100), ("head_ids.json", b"[1, 1]"), ("config.json", b"{")],
)
def test_what_is_broken_is_not_left_to_transformers(family_dirs, tmp_path, file, content):
    shutil.copytree(family_dirs["llama"], tmp_path / "m")
    (tmp_path / "m" / file).write_bytes(content)
    with raises_option(file):
        modes.load(tmp_path / "m", torch.float32, CPU)
