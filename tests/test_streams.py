"""Whatever stdout and stderr are, a command's work stays, its exit code is true, and nothing is a traceback."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

# a command of a plug-in, which writes a file, notes its progress and prints a table
COMMAND = """
import sys
from pathlib import Path

from draftlab.cli import run_alone
from draftlab.commands.base import Command, Outcome
from draftlab.config.base import Config
from draftlab.console import note, progress
from draftlab.results.tables import TerminalTable

count = int(sys.argv.pop())

class MakeConfig(Config):
    pass

class Make:
    def run(self):
        note("writing größe")
        with progress("make", 20) as advance:
            for i in range(20):
                advance(i + 1, "")
        Path("made").write_text("whole", encoding="utf-8")

def prepare(config, weights):
    return Make()

def show(result, config):
    rows = [["größe", "1.00 ±0.25"], ["no draft", "–"]] * count
    table = TerminalTable(heads=("draft", "accept"), rows=rows, title="Ranking")
    return Outcome(path=Path("made"), show=[table, "größe"], data={"größe": rows}, next="größe")

run_alone(Command(name="make", config=MakeConfig, module=__name__, help="Make."))
"""


def program(
    folder: Path, *arguments: str, rows: int = 3, redirect: str = "", **environ: str
) -> subprocess.CompletedProcess[bytes]:
    """Run the command in a shell with redirections, and check that its work stays and that nothing is a traceback."""
    file = folder / "command.py"
    file.write_text(COMMAND, encoding="utf-8")
    words = [sys.executable, str(file), *arguments, str(rows)]
    ended = subprocess.run(
        ["sh", "-c", f'"$@" {redirect}', "sh", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environ,
        capture_output=True,
        check=False,
    )
    assert (folder / "made").read_text(encoding="utf-8") == "whole"
    for text in (ended.stdout, ended.stderr):
        assert b"Traceback" not in text
        assert b"Error" not in text
    return ended


@pytest.mark.parametrize("arguments", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize("state", [">&-", "> /dev/full", "<&- >&-"])
def test_a_result_that_cannot_be_printed_is_an_error_and_the_work_stays(tmp_path, state, arguments):
    ended = program(tmp_path, *arguments, redirect=state)
    assert ended.returncode == 1
    *_, last = ended.stderr.decode().splitlines()
    assert last.startswith("error: ")
    assert "made" in last


@pytest.mark.parametrize("rows", [1, 5000], ids=["buffered", "longer than a pipe"])
def test_a_reader_that_leaves_is_an_error_and_the_work_stays(tmp_path, rows):
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-c", COMMAND, str(rows)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(words, cwd=tmp_path, env=environ, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert ended.returncode == 1
    assert ended.stderr.decode().splitlines()[-1].startswith("error: ")
    assert b"Traceback" not in ended.stderr
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize("state", ["2>&-", "2> /dev/full", "<&- 2>&-"])
def test_notes_that_cannot_be_printed_stop_nothing(tmp_path, state):
    ended = program(tmp_path, "--json", redirect=state)
    assert ended.returncode == 0
    assert json.loads(ended.stdout)["next"] == "größe"


def test_without_any_stream_the_exit_code_is_true(tmp_path):
    assert program(tmp_path, redirect="<&- >&- 2>&-").returncode == 1


def test_a_pipe_that_does_not_block_gets_everything(tmp_path):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", COMMAND, "--json", "20000"]
    started = subprocess.Popen(words, cwd=tmp_path, env=environ, stdout=writer, stderr=subprocess.DEVNULL)
    os.close(writer)
    while not (tmp_path / "made").exists() and started.poll() is None:
        time.sleep(0.05)
    time.sleep(0.3)  # the pipe is full before its reader begins
    with open(reader, "rb") as pipe:
        assert len(json.loads(pipe.read())["größe"]) == 40000
    assert started.wait() == 0


@pytest.mark.parametrize(
    "environ",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C"},
        {"LC_ALL": "POSIX", "PYTHONUTF8": "0"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=lambda environ: " ".join(map("=".join, environ.items())),
)
def test_every_locale_shows_every_cell(tmp_path, environ):
    ended = program(tmp_path, **environ)
    assert ended.returncode == 0
    encoding = environ.get("PYTHONIOENCODING", "utf-8")
    text = ended.stdout.decode(encoding)
    assert text.count("1.00") == 3
    assert text.count("0.25") == 3
    assert "größe" in text or "gr\\xf6\\xdfe" in text


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_on_a_full_disk_is_one_line(tmp_path, arguments):
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "draftlab", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1


def test_a_closed_stream_is_not_the_next_file(tmp_path):
    """Otherwise what a library prints to descriptor 1 would be in a checkpoint."""
    code = "import os, draftlab.streams as s; s.guard_streams(); print(os.open('made', 577), file=open('n', 'w'))"
    subprocess.run(
        ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    assert int((tmp_path / "n").read_text(encoding="utf-8")) > 2
