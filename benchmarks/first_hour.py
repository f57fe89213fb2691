"""Run the commands of docs/tutorial.md as written: python -m benchmarks.first_hour [--steps 2] [--folder DIR]

The lines after `$` in the section "The first hour" run one after the other in an empty folder. The last line is one
JSON object, which is also written to benchmarks/results/first_hour.json if --steps is left out.

minutes: Time of all commands. seconds_of_silence: Longest time without a byte on stdout or stderr. commands: Number of
commands that ran. stopped: Number of commands with an exit code other than 0. next_named: Whether each command of
draftlab suggested the subcommand that comes next on the page.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import environment

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
RESULT = ROOT / "benchmarks" / "results" / "first_hour.json"
SECTION = "## The first hour"


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """A command that was run. silence: Longest time without output, in seconds."""

    line: str
    exit_code: int
    seconds: float
    silence: float
    output: str


def main(
    steps: Annotated[int | None, typer.Option(help="Training steps. Default: as on the page.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Empty folder to run in. Default: a temporary folder.")] = None,
    threads: Annotated[int, typer.Option(help="OMP_NUM_THREADS of the commands.")] = 1,
) -> None:
    lines = commands(PAGE.read_text(), steps)
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        if any(place.iterdir()):
            sys.exit(f"{place} is not empty")
        result = summary(type_all(lines, place, threads)) | environment(threads)
    if steps is None:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def commands(page: str, steps: int | None = None) -> list[str]:
    """Return the commands in the section of the page. steps: Number to write after --steps instead of the page's."""
    section = page.partition(f"{SECTION}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\$ (.+)$", section, re.MULTILINE)
    return lines if steps is None else [re.sub(r"--steps \d+", f"--steps {steps}", line) for line in lines]


def type_all(lines: list[str], folder: Path, threads: int) -> list[Typed]:
    """Run commands one after the other until one fails."""
    typed: list[Typed] = []
    for line in lines:
        print(f"$ {line}", file=sys.stderr, flush=True)
        typed.append(type_line(line, folder, threads))
        if typed[-1].exit_code:
            break
    return typed


def type_line(line: str, folder: Path, threads: int) -> Typed:
    """Run a line in a shell whose draftlab and python are those of this process, and copy its output to stderr."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    started = heard = time.monotonic()
    silence, output = 0.0, b""
    with subprocess.Popen(
        ["bash", "-c", line],
        cwd=folder,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
    ) as running:
        assert running.stdout is not None
        while chunk := os.read(running.stdout.fileno(), 65536):
            now = time.monotonic()
            silence, heard, output = max(silence, now - heard), now, output + chunk
            sys.stderr.write(chunk.decode(errors="replace"))
            sys.stderr.flush()
    ended = time.monotonic()
    return Typed(
        line=line,
        exit_code=running.returncode,
        seconds=ended - started,
        silence=max(silence, ended - heard),
        output=output.decode(errors="replace"),
    )


def summary(typed: list[Typed]) -> dict[str, Any]:
    return {
        "benchmark": "first_hour",
        "minutes": sum(each.seconds for each in typed) / 60,
        "seconds_of_silence": max(each.silence for each in typed),
        "commands": len(typed),
        "stopped": sum(each.exit_code != 0 for each in typed),
        "next_named": next_named(typed),
        "typed": [asdict(each) for each in typed],
    }


def next_named(typed: list[Typed]) -> bool:
    ours = [each for each in typed if each.line.startswith("draftlab ")]
    subcommands = [each.line.split()[1] for each in ours]
    return all(
        re.search(rf"^next: draftlab {following} ", each.output, re.MULTILINE)
        for each, following in zip(ours, subcommands[1:], strict=False)
    )


if __name__ == "__main__":
    typer.run(main)
