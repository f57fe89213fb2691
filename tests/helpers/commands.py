"""A workspace with a small llama and a draft, and commands that are run in process."""

import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import Result

from helpers.small_files import write_functions, write_workspace
from helpers.typed import call

PRUNE = "prune --layers 2 --width 32 --calibration-tokens 128 --seq-len 32"
DISTILL = "distill --steps 2 --batch-size 2 --seq-len 16 --training-dtype float32"
SCORE = "score --num-prompts 2 --prompt-tokens 8 --max-new-tokens 6 --repeats 1 --k 1,2"


@pytest.fixture(scope="module", name="made")
def made_fixture(tmp_path_factory, family_dirs) -> Path:
    """Return a workspace around the small llama, with a draft that was cut from it."""
    folder = tmp_path_factory.mktemp("made")
    write_workspace(family_dirs["llama"], write_functions(folder / "text.txt", repeats=9), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        call(PRUNE)
    return folder


@pytest.fixture(name="space")
def space_fixture(tmp_path, monkeypatch, made) -> Path:
    """Return the workspace alone."""
    shutil.copy(made / "draftlab.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(name="drafted")
def drafted_fixture(space, made) -> Path:
    """Return the workspace with its draft."""
    shutil.copytree(made / "runs", space / "runs")
    return space


def refused(command: str, *arguments: str) -> str:
    """Return the line of a user error, which comes after notes on the draft and on the time of loading."""
    result = call(command, *arguments, code=1)
    assert result.stdout == ""
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def proposed(result: Result) -> list[str]:
    """Return the words of the command that the last line on stderr proposes."""
    *_, last = result.stderr.splitlines()
    line = last.removeprefix("next: ")
    assert line != last
    return read_by_shell(line)


def read_by_shell(line: str) -> list[str]:
    code = f"set -- {line}; printf '%s\\0' \"$@\""
    shown = subprocess.run(["sh", "-c", code], capture_output=True, check=True).stdout
    return shown.decode().split("\0")[:-1]
