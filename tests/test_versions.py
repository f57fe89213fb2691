"""The versions that pyproject.toml asks for are the ones that are tested and documented."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from helpers.project import PROJECT, ROOT, SETTINGS
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from draftlab.runs import provenance

TESTED = ("gguf", "report", "dev")  # extras; the others are compared with, or only read results
PYTHON = PROJECT["requires-python"].removeprefix(">=")


def requirements(*extras: str) -> list[Requirement]:
    """Return the direct dependencies of draftlab and of these extras, without draftlab itself."""
    texts = [*PROJECT["dependencies"]]
    for extra in extras:
        texts += PROJECT["optional-dependencies"][extra]
    return [each for each in map(Requirement, texts) if each.name != "draftlab"]


PINS = {
    canonicalize_name(pin.name): pin
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
    for pin in [Requirement(line)]
}


@pytest.mark.parametrize("needed", requirements(*TESTED), ids=lambda each: each.name)
def test_every_direct_dependency_is_pinned_within_its_bounds(needed):
    pin = PINS[canonicalize_name(needed.name)]
    (exact,) = pin.specifier
    assert exact.operator == "=="
    assert pin.marker is None  # the pins hold on every Python that is supported
    assert needed.specifier.contains(exact.version)


def test_every_package_that_draftlab_imports_is_a_dependency():
    declared = {canonicalize_name(each.name) for each in requirements("gguf", "report")}
    declared.add("pydantic-core")  # pydantic asks for one exact version of it
    distributions = packages_distributions()
    for file in (ROOT / "draftlab").rglob("*.py"):
        for package in imported(ast.parse(file.read_text())):
            names = {canonicalize_name(name) for name in distributions.get(package, [package])}
            assert names & declared, (file.name, package)


def imported(module: ast.Module) -> set[str]:
    """Return the top-level packages that a module imports, anywhere in it, without draftlab and Python's own."""
    names = []
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names} - {"draftlab", *sys.stdlib_module_names}


def test_one_version_of_python_is_the_lowest_everywhere():
    plugin = tomllib.loads((ROOT / "plugins/research/pyproject.toml").read_text())
    assert plugin["project"]["requires-python"] == f">={PYTHON}"
    assert SETTINGS["tool"]["ruff"]["target-version"] == f"py{PYTHON.replace('.', '')}"
    assert SETTINGS["tool"]["pyright"]["pythonVersion"] == PYTHON
    for file in ("README.md", "Makefile"):
        stated = re.findall(r"Python (\d\.\d+)", (ROOT / file).read_text())
        assert set(stated) == {PYTHON}, file


def test_a_clone_names_its_commit():
    """Records of benchmarks say which commit they measured."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a clone")
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert head.startswith(provenance.versions()["git"])
