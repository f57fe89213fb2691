"""A command that needs a package of an extra names it; all other commands work without the extras."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from draftlab.errors import EXTRAS

tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({packages!r})); import draftlab.cli; draftlab.cli.main()"


def run_without(packages, *words, cwd):
    code = WITHOUT.format(packages=packages)
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=cwd, check=False
    )


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("matplotlib", ["report", "nothing", "--html", "x"]),
        ("gguf", ["export", "tiny", "--target", "tiny", "--to", "gguf", "--out", "x"]),
    ],
)
def test_a_missing_extra_is_one_line(package, words, tmp_path):
    done = run_without([package], *words, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert f"draftlab[{EXTRAS[package]}]" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "x").exists()


def test_drafts_are_made_without_extras(tmp_path):
    words = [
        "prune",
        "--source",
        "tiny",
        "--layers",
        "2",
        "--data",
        "stdlib",
        "--calibration-tokens",
        "1024",
    ]
    done = run_without(list(EXTRAS), *words, "--out", "cut", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cut" / "model.safetensors").is_file()


def test_every_package_of_an_extra_is_known_to_it():
    for package, extra in EXTRAS.items():
        name = "protobuf" if package == "google.protobuf" else package
        assert any(needed.startswith(name) for needed in PROJECT["optional-dependencies"][extra])
        assert not any(needed.startswith(name) for needed in PROJECT["dependencies"])


def test_the_packages_of_the_brief_are_required():
    names = {re.match(r"[\w-]+", needed)[0] for needed in PROJECT["dependencies"]}
    brief = {
        "torch",
        "transformers",
        "datasets",
        "accelerate",
        "peft",
        "lm-eval",
        "safetensors",
        "typer",
    }
    assert brief <= names
