"""Imports point up in the list only, and --help stays light."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import draftlab
from draftlab.model.families import widths_folder
from draftlab.model.hub import EMBEDDED

PACKAGE = Path(draftlab.__file__).parent
LAYERS = [
    ["errors", "trust"],
    ["console", "atomic", "reading", "intervals", "sampling", "registry"],
    ["provenance"],
    ["model"],
    ["workspace"],
    ["config"],
    ["output"],
    ["data", "prompts", "turns"],
    ["results"],
    ["servers"],
    ["engine"],
    ["acceptance"],
    ["target_outputs"],
    ["latency"],
    ["drafters"],
    ["training"],
    ["pruning"],
    ["exporting"],
    ["scoring"],
    ["importing"],
    ["searching"],
    ["commands"],
    ["recipe"],
    ["functions"],
    ["cli"],
    ["__main__"],
]
NO_TORCH = [
    "errors",
    "console",
    "reading",
    "intervals",
    "atomic",
    "trust",
    "sampling",
    "registry",
    "provenance",
    "model.shape",
    "model.families",
    "model.hf_files",
    "model.tokenizer",
    "model.hub",
    "workspace",
    "config",
    "drafters",
    "output",
    "results",
    "servers",
    "commands",
    "recipe",
    "functions",
    "cli",
]
HEAVY = {"torch", "transformers", "accelerate", "datasets", "lm_eval", "peft", "safetensors", "numpy"}


def modules() -> dict[str, Path]:
    """Dotted name below draftlab -> file."""
    files = [f for f in PACKAGE.rglob("*.py") if f.name != "__init__.py" or f.parent != PACKAGE]
    return {".".join(f.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def imported(file: Path, *, top_level_only: bool) -> set[str]:
    """Full dotted names that a file imports; with top_level_only, those that run when it is imported."""
    tree = ast.parse(file.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def level(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name.split(".")[0] in layer)


def test_every_module_has_a_layer():
    assert {name.split(".")[0] for name in modules()} == {name for layer in LAYERS for name in layer}


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_point_upwards(name):
    used = {n.split(".")[1] for n in imported(modules()[name], top_level_only=False) if n.startswith("draftlab.")}
    used -= {name.split(".")[0], "__version__"}
    allowed = {m for layer in LAYERS[: level(name) + 1] for m in layer}
    assert used <= allowed


@pytest.mark.parametrize("name", sorted(n for n in modules() if any(n == m or n.startswith(f"{m}.") for m in NO_TORCH)))
def test_light_modules_import_nothing_heavy(name):
    tops = {n.split(".")[0] for n in imported(modules()[name], top_level_only=True)}
    assert not tops & HEAVY


def test_help_does_not_import_torch():
    code = (
        "import sys, draftlab.cli; print(sorted({'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


MISSING = ["check nope", "export nope"]
TORN = "torn: model-2.safetensors, named in model.safetensors.index.json, is missing"
WRONG = {  # what is there and is something else, and what is missing besides models
    "export tiny --to gguf --outtype nope": "--outtype nope: no such type; known: ",
    "export tiny --to vllm --verify-with nope": "--verify-with nope: no such program",
    "init --preset tiny --data nope --force": "data 'nope': neither",
}


def said_before_torch_is_imported(said: dict[str, str], folder: Path) -> None:
    """Check the error of every command line, in a workspace of tiny, and that nothing is written."""
    code = f"""
import sys
from typer.testing import CliRunner
from draftlab.cli import app
CliRunner().invoke(app, ["init", "--preset", "tiny"])
WITHOUT_OUT = ("check", "predict", "init")
for mistake, message in {said}.items():
    command = mistake.split()[0]
    result = CliRunner().invoke(app, [*mistake.split(), *(["--out", "x"] if command not in WITHOUT_OUT else [])])
    assert (result.exit_code, message in result.stderr) == (1, True), (mistake, result.output)
    assert "torch" not in sys.modules, mistake
"""
    environ = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    before = {path.name for path in folder.iterdir()}
    ended = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert {path.name for path in folder.iterdir()} == before | {"draftlab.yaml"}


def test_what_is_missing_is_said_before_torch_is_imported(tmp_path):
    said_before_torch_is_imported(dict.fromkeys(MISSING, "no checkpoint at nope"), tmp_path)


def test_what_is_wrong_is_said_before_torch_is_imported(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF\n")
    (tmp_path / "torn").mkdir()
    shutil.copy(EMBEDDED / "tiny" / "config.json", tmp_path / "torn")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "torn/model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "torn/model-1.safetensors").touch()
    (tmp_path / "word.yaml").write_text("word\n")
    (tmp_path / "llama.yaml").write_text((widths_folder() / "tiny-16x256.yaml").read_text())
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("text")
    shutil.copytree(EMBEDDED / "tiny", tmp_path / "tiny-copy")
    shutil.copytree(EMBEDDED / "tiny", tmp_path / "other")
    words = json.loads((tmp_path / "other/tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(words))
    said_before_torch_is_imported(WRONG, tmp_path)
