"""The loss and the student of docs/extending.md, outside of draftlab, go through help, errors and training."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "extending.md"


def example(name: str) -> str:
    """Return the block of the guide that registers a kind."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return next(block for block in blocks if f'("{name}")' in block)


def install(site: Path, group: str, name: str, text: str) -> None:
    """Write what an installed package has: a module, and its entry point."""
    (site / f"{name}_module.py").write_text(text)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}_module\n")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    install(folder, "draftlab.losses", "squares", example("squares"))
    install(folder, "draftlab.students", "quiet", example("quiet"))
    return folder


def draftlab(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", ""), *sys.path])
    environ = os.environ | {"PYTHONPATH": path, "COLUMNS": "300"}
    command = [sys.executable, "-m", "draftlab", *arguments]
    return subprocess.run(command, cwd=site.parent, env=environ, capture_output=True, text=True)


def test_a_loss_and_a_student_from_outside_train(site, family_dirs, tmp_path):
    text = "\n\n".join(f"def f{i}(x):\n    return [x + {i}]\n" * 8 for i in range(60))
    (tmp_path / "text.txt").write_text(text)
    shown = draftlab(site, "distill", "--help").stdout
    assert "quiet" in shown
    assert "squares" in shown
    target = str(family_dirs["llama"])
    words = [
        "distill",
        "--draft",
        target,
        "--target",
        target,
        "--data",
        "text.txt",
        "--steps",
        "2",
        "--batch-size",
        "2",
    ]
    words += ["--steps", "2", "--batch-size", "2", "--seq-len", "32", "--out", "out", "--json"]
    for given, named in (
        (["--student", "quite"], "'quiet'"),
        (["--student", "quiet:soft=1"], "'softness'"),
        (["--student", "quiet", "--temperature", "2"], "--temperature"),
        (["--loss", "square"], "'squares'"),
    ):
        refused = draftlab(site, *words, *given)
        assert (refused.returncode, named in refused.stderr) == (1, True), refused.stderr
    ran = draftlab(site, *words, "--student", "quiet:softness=1.5", "--loss", "0.5*squares + 0.5*fkl")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["after"]["acceptance"] == pytest.approx(1, abs=0.01)  # it is its own teacher
    record = json.loads((tmp_path / "out" / "draftlab.json").read_text())
    assert record["config"]["student"] == "quiet:softness=1.5"
