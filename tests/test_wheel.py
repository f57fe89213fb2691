"""The wheel is enough: outside a clone, the documented commands work with the wheel and its dependencies."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution
from pathlib import Path
from venv import create

import pytest
from helpers.project import PROJECT
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    """Return a folder with a venv that has the wheel and, from this environment, all packages but draftlab's."""
    room = tmp_path_factory.mktemp("room")
    tree = room / "tree"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):  # nothing that an earlier build left
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(room / "dist")]
    subprocess.run(build, cwd=tree, check=True)
    shutil.rmtree(tree)
    create(room / "venv", symlinks=True, with_pip=True)
    (wheel,) = (room / "dist").glob("*.whl")
    install = [room / "venv/bin/python", "-m", "pip", "install", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(room / "venv")}))
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if "draftlab" not in package.name and not (site / package.name).exists():
            (site / package.name).symlink_to(package)  # not the clone, nor its plug-in
    return room


@pytest.fixture
def typed(room, tmp_path, monkeypatch):
    """Return a function that types a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": f"{room / 'venv/bin'}:{environment['PATH']}", "OMP_NUM_THREADS": "1"}

    def run(line: str) -> str:
        done = subprocess.run(line, shell=True, capture_output=True, text=True, env=environment)
        assert done.returncode in (0, 3), (line, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    return run


def test_the_metadata_names_every_dependency(room):
    (place,) = (room / "venv").rglob("draftlab-*.dist-info")
    needed = {str(Requirement(text)) for text in Distribution.at(place).requires or []}
    assert {str(Requirement(text)) for text in PROJECT["dependencies"]} <= needed


def test_the_quickstart_runs_by_its_name(room, typed):
    where = typed('python -c "import draftlab; print(draftlab.__file__)"')
    assert Path(where.strip()).is_relative_to(room / "venv")
    typed("draftlab run quickstart")
    assert Path("runs/quickstart/report.html").stat().st_size > 10_000
    planned = typed("draftlab run quickstart --dry-run").splitlines()
    assert [line.rpartition(": ")[2] for line in planned] == ["done"] * 5 + ["to do"]


def test_the_laptop_tutorial_needs_no_repository(typed):
    """Steps 1 to 6 of the page, with few tokens, and without a server to verify with."""
    page = (ROOT / "docs/tutorial.md").read_text()
    section = page.partition("## On a laptop")[2].partition("\n## ")[0]
    lines = re.findall(r"^\$ (draftlab .*)$", section, re.MULTILINE)
    fewer = {
        "draftlab distill": " --seq-len 64",
        "draftlab score": " --max-new-tokens 16",
        "draftlab prune": " --calibration-tokens 512",
    }
    typed_lines = []
    for line in lines:
        command = " ".join(line.split()[:2])
        if "vllm" in line:
            continue  # starts a server of another environment
        line = re.sub(r" --verify-with \S+", "", line).replace("--steps 60", "--steps 4")
        typed(line + fewer.get(command, ""))
        typed_lines.append(command)
    assert {"draftlab init", "draftlab design", "draftlab check", "draftlab export"} <= set(typed_lines)
    assert typed("python -m draftlab.data.instructions 3").count("\n") == 3


@pytest.mark.parametrize(
    "line",
    [
        "draftlab prune --source tiny --data stdlib --shape tiny-4x192 --calibration-tokens 512 --out cut",
        "draftlab predict --draft-profile wide-796m@a100-80gb,graphs --target-profile mixtral-8x7b@4xa100-80gb,graphs "
        "--acceptance 0.7",
        "draftlab run llama-65b --dry-run",
        "draftlab run llama-65b-replay --dry-run",
        "draftlab run llama-65b-served --dry-run",
    ],
)
def test_names_work_outside_a_clone(line, typed):
    typed(line)
