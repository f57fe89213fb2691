"""Modes are chosen by the device and the models; a broken checkpoint is not left to transformers."""

import shutil

import pytest
import torch
from helpers.builders import save_neox
from helpers.errors import raises_option

from draftlab.model import modes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("asked", "device", "dtype", "names", "mode"),
    [
        ("auto", CUDA, torch.bfloat16, ["llama"], "graphs"),
        ("auto", CPU, torch.float16, ["llama"], "eager"),
        ("auto", CPU, torch.float32, ["llama", "qwen3"], "native"),
        ("auto", CPU, torch.float32, ["llama", "neox"], "eager"),
        ("auto", CUDA, torch.float32, ["llama", "neox"], "eager"),
        ("eager", CUDA, torch.float32, [], "eager"),
    ],
)
def test_auto_is_the_fastest_mode_that_runs_every_model(
    asked, device, dtype, names, mode, family_dirs, tokenizer_dir, tmp_path
):
    if mode == "native" and shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    places = family_dirs | {"neox": save_neox(tmp_path / "neox", tokenizer_dir)}
    assert modes.resolve_mode(asked, device, dtype, [places[name] for name in names]) == mode


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
