"""A checkpoint that is broken gets one line that says what and where, from every command, and leaves nothing behind."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from errors import raises_option
from safetensors.torch import load_file, save_file
from test_checkpoint import sharded, truncate
from typer.testing import CliRunner

from draftlab import workspace
from draftlab.cli import app
from draftlab.model import checkpoint

FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


def spoiled(place: Path, name: str, value: float) -> None:
    file = next(f for f in sorted(place.glob("model-*")) if name in load_file(f))
    tensors = load_file(file)
    tensors[name][0] = value
    save_file(tensors, file)


def configured(place: Path, **changes: object) -> None:
    file = place / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def doubled(place: Path) -> None:
    save_file(load_file(place / FIRST) | {"model.norm.weight": torch.ones(64)}, place / FIRST)
    save_file(load_file(place / SECOND) | {"model.norm.weight": torch.ones(64)}, place / SECOND)


WRONG = {
    "truncated": (lambda p: truncate(p / SECOND), f"{SECOND}: "),
    "missing": (
        lambda p: (p / SECOND).unlink(),
        f"{SECOND}, named in model.safetensors.index.json",
    ),
    "doubled": (doubled, "'model.norm.weight' twice"),
    "sizes": (lambda p: configured(p, intermediate_size=96), "(96, 64)"),
    "layers": (lambda p: configured(p, num_hidden_layers=7), "model.layers.5"),
    "quantised": (
        lambda p: configured(p, quantization_config={"quant_method": "fp8"}),
        "is quantised (fp8)",
    ),
    "nan": (
        lambda p: spoiled(p, "model.norm.weight", float("nan")),
        "model.norm.weight has values that are not fin",
    ),
}
OTHER = {
    "draft.gguf": "draftlab import",
    "pickled": "draftlab import",
    "adapter": "draftlab import",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, family_dirs) -> Path:
    """A workspace with a good checkpoint, and one that is wrong in each way."""
    space = tmp_path_factory.mktemp("space")
    llama = family_dirs["llama"]
    shutil.copytree(llama, space / "good")
    (space / "text.txt").write_text(
        "\n\n".join(f"def f{i}(line):\n    return [line, {i}]\n" * 20 for i in range(40))
    )
    workspace.write(workspace.Workspace(target="good", source="good", data="text.txt"), space)
    for name, (spoil, _) in WRONG.items():
        spoil(sharded(llama, space / name))
    (space / "draft.gguf").write_bytes(b"GGUF")
    shutil.copytree(llama, space / "pickled")
    (space / "pickled/model.safetensors").rename(space / "pickled/pytorch_model.bin")
    (space / "adapter").mkdir()
    (space / "adapter/adapter_config.json").write_text("{}")
    return space


COMMANDS = {
    "prune": "prune --source BAD --layers 2 --calibration-tokens 64 --seq-len 16",
    "masks": "prune --method masks --source BAD --layers 2 --steps 1 --batch-size 1 --seq-len 16",
    "distill": "distill --draft BAD --steps 1 --batch-size 1 --seq-len 16",
    "distill from": "distill --draft good --target BAD --steps 1 --batch-size 1 --seq-len 16",
    "score": "score --draft BAD --num-prompts 2 --prompt-tokens 8 --max-new-tokens 4 --repeats 2 --k 1",
    "score with": "score --draft good --target BAD --num-prompts 2 --prompt-tokens 8 --max-new-tokens 4 --k 1",
    "answers": "outputs build --use replay --target BAD --num-prompts 2 --prompt-tokens 8 --max-new-tokens 4",
    "outputs": "outputs build --target BAD --num-sequences 2 --seq-len 16 --top-logprobs 4",
    "profile": "profile BAD --k 1 --repeats 3 --context 8",
    "export": "export BAD",
    "check": "check BAD --files-only",
    "train": "distill --loss ce --draft BAD --data text.txt --steps 1 --batch-size 1 --seq-len 16 --out trained",
}


QUICK = ("prune", "distill", "score", "answers", "outputs", "check", "export")
CASES = [
    pytest.param(command, wrong, marks=() if command in QUICK else pytest.mark.slow)
    for command in COMMANDS
    for wrong in [*WRONG, *OTHER]
    if (wrong, command) != ("nan", "check")  # check finds it: exit 3
]


@pytest.mark.parametrize(("command", "wrong"), CASES)
def test_one_line_says_what_is_wrong_and_nothing_is_left(folder, command, wrong, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(p for p in folder.rglob("*"))
    result = CliRunner().invoke(app, COMMANDS[command].replace("BAD", wrong).split())
    lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert result.exit_code == 1, (result.output, result.exception)
    assert len(lines) == 1
    assert (WRONG[wrong][1] if wrong in WRONG else OTHER[wrong]) in lines[0]
    assert sorted(p for p in folder.rglob("*")) == before


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": -1.0}}},
        {"rope_theta": {"__float__": "Infinity"}},
    ],
)
def test_rotary_settings_are_positive_numbers(rope, family_dirs, tmp_path):
    """The pass would go on with logits that are finite and wrong."""
    model = shutil.copytree(family_dirs["llama"], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | rope))
    for read in (checkpoint.check, checkpoint.read_shape):
        with raises_option(model / "config.json", "factor" if "factor" in str(rope) else "theta"):
            read(model)
