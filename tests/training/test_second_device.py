"""Heads are trained where their target is, and matrices rotated: on a second device as on the CPU."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from accelerate import PartialState
from helpers.builders import PASS_ROUNDING
from helpers.second_device import DEVICE, SecondDevice, without_second_device

from draftlab.commands import COMMANDS
from draftlab.heads import training
from draftlab.model import checkpoint
from draftlab.pruning.cut import Rotated


@pytest.fixture
def words(family_dirs, tmp_path) -> dict[str, Any]:
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"def f{i}(line):\n    return [line, {i}]\n" * 60 for i in range(40)))
    given = {
        "target": str(family_dirs["llama"]),
        "data": str(file),
        "steps": 3,
        "batch_size": 2,
        "seq_len": 32,
    }
    return given | {"training_dtype": "float32", "eval_steps": 3, "save_steps": 2}


def losses(words: dict[str, Any], out: Path) -> tuple[float, float]:
    """Train a head; return its held-out losses before and after."""
    found = cast(Any, COMMANDS["distill"](student="eagle:ttt_steps=2", **words, out=out).data)
    return found["before"]["loss"], found["after"]["loss"]


def test_a_head_is_that_of_a_run_on_the_cpu(words, tmp_path, monkeypatch):
    """The target stays on the CPU, as accelerate leaves what a GPU has no room for."""
    wanted = losses(words | {"vocab": 50}, tmp_path / "cpu")
    load = checkpoint.load_model

    def loaded(directory: Path, dtype: torch.dtype, device: torch.device, *others: Any) -> Any:
        assert device == DEVICE
        with without_second_device():  # transformers means something else by meta
            return load(directory, dtype, torch.device("cpu"), *others)

    def select(name: str) -> torch.device:
        monkeypatch.setitem(PartialState._shared_state, "device", DEVICE)
        return DEVICE

    monkeypatch.setattr(checkpoint, "load_model", loaded)
    monkeypatch.setattr(training, "select_device", select)
    with SecondDevice():
        found = losses(words | {"vocab": 50}, tmp_path / "elsewhere")
    assert found == pytest.approx(wanted, rel=4 * PASS_ROUNDING)


def test_a_source_is_rotated_where_the_rotation_is_and_comes_back(family_dirs):
    weights, shape = (
        checkpoint.Weights(family_dirs["llama"]),
        checkpoint.read_shape(family_dirs["llama"]),
    )
    rotation, _ = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    wanted = Rotated(weights, shape, rotation)
    with SecondDevice():
        there = Rotated(weights, shape, rotation.to(DEVICE))
        found = {name: there[name] for name in there}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
