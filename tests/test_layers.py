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
from draftlab.model.hub import EMBEDDED

PACKAGE = Path(draftlab.__file__).parent
LAYERS = [
    ["errors", "trust"],
    ["console", "atomic", "reading", "intervals", "sampling"],
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
    ["distill"],
    ["prune"],
    ["latency"],
    ["export"],
    ["benchmark"],
    ["importing"],
    ["search"],
    ["commands"],
    ["recipe"],
    ["auto"],
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
    "provenance",
    "model.shape",
    "model.families",
    "model.layouts",
    "model.hub",
    "workspace",
    "config",
    "output",
    "results",
    "servers",
    "commands",
    "recipe",
    "auto.command",
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


MISSING = [
    "distill --draft nope",
    "train --model nope --data stdlib",
    "score --draft nope@q8_0",
    "check nope",
    "export nope",
    "outputs build --target nope",
    "replay outputs --draft nope",
    "search --target nope",
    "eagle --target nope",
    "medusa --target nope",
    "prune --source nope --layers 2",
    "prune-masks --source nope --layers 2",
    "expand nope --layers 40",
    "profile nope",
    "law --source nope",
    "import nope",
    "predict --alpha 0.5 --draft-profile nope --target-profile nope",
]
SAID = {"import": "nope does not exist", "predict": "no profile at nope"}  # fmt: skip
TORN = "torn: model-2.safetensors, named in model.safetensors.index.json, is missing"
WRONG = {  # what is there and is something else, and what is missing besides models
    "distill --draft tiny --data nope.txt": "data 'nope.txt': neither a built-in source nor a file or folder",
    "score --draft tiny --data stdlibs": "did you mean 'stdlib'",
    "prune --source tiny --layers 2 --data nope.txt": "data 'nope.txt'",
    "prune --source tiny --layers 2 --data a.gguf": "cannot read .gguf; want .jsonl, .md, .py, .txt",
    "prune --source tiny --layers 2 --outputs nope": "nope is not a store of target outputs",
    "outputs build --data nope.txt": "data 'nope.txt'",
    "score --draft tiny --prompt-file nope.jsonl": "nope.jsonl: No such file",
    "outputs build --prompt-file a.gguf": "a.gguf:1: not JSON",
    "distill --draft a.gguf": "a.gguf is a GGUF file",  # before the workspace's data, which is not there either
    "score --draft a.gguf": "a.gguf is a GGUF file",
    "expand a.gguf --layers 40": "a.gguf is a GGUF file",
    "distill --draft torn --data stdlib": TORN,
    "score --draft torn --data stdlib": TORN,
    "replay nope --draft tiny": "nope is not a store of target outputs",
    "online rollback nope": "nope is not a directory",
    "score-servers --server nope --speculative-server http://h:1": "'nope' is not an address",
    "profile-servers --server nope": "'nope' is not an address",
    "predict --alpha 0.5 --draft-profile a --target-profile a --k 1000000000000": "at most 1,000 tokens are drafted",
}


def said_before_torch_is_imported(said: dict[str, str], folder: Path) -> None:
    """Check the error of every command line, in a workspace of tiny, and that nothing is written."""
    code = f"""
import sys
from typer.testing import CliRunner
from draftlab.cli import app
CliRunner().invoke(app, ["init", "--preset", "tiny"])
WITHOUT_OUT = ("check", "predict", "prune", "online")
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
    said_before_torch_is_imported(
        {mistake: SAID.get(mistake.split()[0], "no checkpoint at nope") for mistake in MISSING}, tmp_path
    )


def test_what_is_wrong_is_said_before_torch_is_imported(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF\n")
    (tmp_path / "torn").mkdir()
    shutil.copy(EMBEDDED / "tiny" / "config.json", tmp_path / "torn")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "torn/model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "torn/model-1.safetensors").touch()
    said_before_torch_is_imported(WRONG, tmp_path)


def test_no_module_outgrows_its_job():
    lengths = {name: len(file.read_text().splitlines()) for name, file in modules().items()}
    assert {name: n for name, n in lengths.items() if n > 400} == {}
