"""Imports point up in the list only, and --help stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.layers import LAYERS

import draftlab

PACKAGE = Path(draftlab.__file__).parent
NO_TORCH = [
    "errors",
    "shell",
    "console",
    "streams",
    "reading",
    "shipped",
    "runs",
    "trust",
    "sampling",
    "registry",
    "dates",
    "inputs",
    "model.shape",
    "model.families",
    "model.hf_files",
    "model.hub",
    "config",
    "drafters.base",
    "training.students.base",
    "output",
    "servers",
    "commands.base",
    "commands.checks",
    "commands.settings",
    "commands.steps",
    "recipe",
    "functions",
    "help",
    "cli",
]
HEAVY = {
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "lm_eval",
    "peft",
    "safetensors",
    "numpy",
}


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
