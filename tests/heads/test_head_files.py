"""The files of a head of one's own kind: any damage is one line that names the file, before weights are loaded."""

import json
from pathlib import Path

import pytest
import torch
from helpers.built import facts
from helpers.errors import raises_option
from pydantic import Field
from safetensors.torch import load_file, save_file

from draftlab.drafters.base import RunFacts
from draftlab.heads.base import HeadConfig, HeadSpec, TargetSizes, read_head, read_tensors, write_head

TOKENS = 2


class OwnConfig(HeadConfig):
    tokens: int = Field(ge=1)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {f"{i}.weight": (self.hidden, self.hidden) for i in range(self.tokens)}


class OwnSpec(HeadSpec):
    """A head that is read without any care for errors."""

    format = "own"

    @classmethod
    def read(cls, folder: Path, target: Path) -> object:
        content = json.loads((folder / "config.json").read_text())
        return content["tokens"], load_file(folder / "model.safetensors")


@pytest.fixture
def folder(target, tmp_path):
    sizes = TargetSizes.of(target)
    config = OwnConfig(hidden=sizes.hidden, vocab=sizes.vocab, layer_ids=(0, sizes.layers), tokens=TOKENS)
    weights = {name: torch.ones(size) for name, size in config.sizes().items()}
    write_head(tmp_path, config, weights)
    assert read_head(OwnConfig, tmp_path, target) == config
    assert read_tensors(tmp_path).keys() == weights.keys()
    return tmp_path


def changed(**fields):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def truncated(name):
    def change(folder):
        file = folder / name
        file.write_bytes(file.read_bytes()[:-40])

    return change


DAMAGES = {
    "no config.json": (lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ("model.safetensors",)),
    "half a config.json": (truncated("config.json"), ("config.json",)),
    "half of the weights": (truncated("model.safetensors"), ("model.safetensors",)),
    "an unknown key": (changed(rungs=3), ("config.json", "rungs")),
    "no number": (changed(tokens="many"), ("config.json", "tokens", "many")),
    "no object": (lambda folder: (folder / "config.json").write_text("[1]"), ("config.json",)),
    "a missing tensor": (changed(tokens=3), ("2.weight", "config.json")),
    "a tensor too many": (changed(tokens=1), ("1.weight", "config.json")),
    "another vocabulary": (changed(vocab=99), ("99",)),
    "another hidden size": (changed(hidden=8), ("8",)),
    "a layer that the target lacks": (changed(layer_ids=[1, 40]), ("1, 40",)),
    "no layer": (changed(layer_ids=[]), ("config.json", "layer_ids")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_head_is_refused_in_one_line(folder, target, damage):
    change, words = DAMAGES[damage]
    change(folder)
    with raises_option(folder, *words) as error:
        read_head(OwnConfig, folder, target)
    assert "\n" not in str(error.value)


def test_weights_that_are_not_finite_are_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["1.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with raises_option(folder, "1.weight"):
        read_tensors(folder)


@pytest.mark.parametrize("damage", ["no weights", "half a config.json", "half of the weights", "no object"])
def test_any_error_of_a_careless_kind_is_one_line(folder, target, damage):
    spec = OwnSpec(text=f"own:heads={folder}", heads=str(folder))
    run: RunFacts = facts(target=target)
    spec.check(run)
    DAMAGES[damage][0](folder)
    with raises_option(f"--drafter {spec.text}", folder) as error:
        spec.check(run)
    assert "\n" not in str(error.value)
