"""The campaign of faults: PYTHONPATH=tests:tests/chaos python tests/chaos/campaign.py --seed 0 --minutes 60.

Every command is run whole once; then with a fault at a place that the seed draws, and again until it ends. It must end
in the same files, leave nothing beside them, and say in one line what is wrong. Damaged files of every kind follow
(fuzz.py), and the tests of what else may go wrong. Each result is a line of RESULTS/results-SEED.jsonl, and a campaign
that was stopped goes on with what is left; of another state of the tree, remove RESULTS first. One table and JSON come
last.
"""

import argparse
import gc
import importlib
import json
import math
import multiprocessing
import os
import pkgutil
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from faults import CRASHED, Fault, Kind, Running, digest, left_overs, names, run

import draftlab

ROOT = Path(__file__).parents[2]
TEXT = sorted((ROOT / "draftlab").glob("[a-w]*/*.py"))[:60]  # enough for some to be held out
CHARACTERS = 1300  # of each: training evaluates on all that is held out, and search wants 48 prompts of it
SHORT = ["--steps", "4", "--batch-size", "2", "--seq-len", "32", "--eval-steps", "2", "--save-steps", "2"]
SMALL = ["--calibration-tokens", "256", "--seq-len", "64"]
TIMED = ["--repeats", "3", "--mode", "eager"]
LIMITS = (0, 1, 100, 5000)  # bytes of a file that are still written
LAZY = ("accelerate", "peft", "matplotlib.backends.backend_svg", "transformers.models.llama.modeling_llama")
MOST_TRIES = 4
UNFELT = "without effect"  # the command ended before its fault came, or no file grew beyond the limit
INPUTS = 250  # of the fuzzer, at a time
TESTS = (
    "servers", "test_trust.py", "benchmark/test_stalls.py", "engine", "commands/test_cli.py",
    "model/test_bad_checkpoints.py",
)  # fmt: skip
MEASURED = ("law", "profile", "score", "search")  # times are written, and decide: the names of files are compared
WITHOUT_OUT = ("run", "init")
PRINTING = {"check", "design", "env", "outputs info", "predict", "report"}
UNTRIED = {  # that write
    "auto": "its steps are commands that are tried, in a directory that a killed run takes up again (tests/auto)"
}
# name -> command and what it reads of the others; out is added
COMMANDS: dict[str, tuple[str, ...]] = {
    "prune": ("prune", "--source", "model", "--layers", "2", "--data", "text", *SMALL),
    "distill": ("distill", "--draft", "made/prune", "--target", "model", "--data", "text", *SHORT),
    "distill-lora": (
        "distill", "--draft", "made/prune", "--target", "model", "--data", "text", "--lora-rank", "2", *SHORT
    ),
    "distill-target-text": (
        "distill", "--draft", "made/prune", "--target", "model", "--data", "text", "--text", "target", *SHORT,
        "--prompt-tokens", "8",
    ),
    "distill-ce": ("distill", "--loss", "ce", "--draft", "made/prune", "--data", "text", *SHORT),
    "outputs": (
        "outputs build", "--target", "model", "--data", "text", "--num-sequences", "300", "--seq-len", "24",
        "--top-logprobs", "4",
    ),
    "texts": (
        "outputs build", "--use", "replay", "--target", "model", "--data", "text", "--num-prompts", "40",
        "--prompt-tokens", "8", "--max-new-tokens", "8",
    ),
    "distill-outputs": (
        "distill", "--draft", "made/prune", "--outputs", "made/outputs", "--steps", "4", "--batch-size", "2",
        "--save-steps", "2",
    ),
    "replay": ("replay", "made/texts", "--draft", "made/prune"),
    "export": ("export", "made/prune", "--target", "model"),
    "gguf": ("export", "made/prune", "--target", "model", "--to", "gguf", "--outtype", "f32"),
    "import": ("import", "made/gguf/prune-f32.gguf"),
    "prune-masks": (
        "prune", "--method", "masks", "--source", "model", "--layers", "2", "--data", "text", *SMALL[:2],
        *SHORT[:6],
    ),
    "eagle": ("distill", "--student", "eagle", "--target", "model", "--data", "text", *SHORT),
    "log": (
        "outputs build", "--from", "files/log.jsonl", "--target", "model", "--seq-len", "16", "--top-logprobs", "2",
    ),
    "run": ("run", "files/recipe.yaml"),
    "init": ("init", "--gguf", "made/gguf/prune-f32.gguf", "--data", "text"),
    "profile": ("profile", "larger", "--k", "1", "--context", "16,64", *TIMED),
    "law": ("profile", "--law", "larger", "--context", "16,64", *TIMED),
    "score": (
        "score", "--target", "model", "--draft", "made/prune", "--drafter", "prompt-lookup", "--data", "text", "--k",
        "2", "--num-prompts", "3", "--prompt-tokens", "8", "--max-tokens", "8", *TIMED,
    ),
    "search": (
        "search", "--target", "larger", "--source", "larger", "--data", "text", "--k", "1-2", "--layers", "1,2",
        "--widths", "64", "--minutes", "0.01", "--first-steps", "1",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """verdict: passed, without effect, or what was wrong, in lines. tried: faults, inputs or tests."""

    command: str
    kind: str
    n: int
    limit: int
    verdict: str
    tried: int = 1

    @property
    def failures(self) -> int:
        return 0 if self.verdict in ("passed", UNFELT) else len(self.verdict.splitlines())


class Campaign:
    """A folder with a model, a text and every command's output, which the faulty runs are compared with."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder, self.wholes, self.changes, self.millis = folder, {}, {}, {}
        (folder / "made").mkdir(parents=True, exist_ok=True)
        if not (folder / "model").exists():
            apart = multiprocessing.get_context("spawn").Process(target=make_models, args=(folder,))
            apart.start()  # in a process of its own: commands are forked from this one, which must have no threads
            apart.join()
            (folder / "text").mkdir()
            for file in TEXT:
                (folder / "text" / f"{file.parent.name}-{file.stem}.txt").write_text(file.read_text()[:CHARACTERS])
            write_files(folder)
        for name in names:
            self._whole(name)

    def _whole(self, name: str) -> None:
        out, facts = self.folder / "made" / name, self.folder / f"{name}.json"
        if not (out.exists() and facts.exists()):
            shutil.rmtree(out, ignore_errors=True)
            with self.room() as room:  # where the faulty ones run, too: cards and pages have the command line
                running = Running(self.arguments(name), room)
                ended = running.wait()
                if ended.code:
                    raise SystemExit(f"{name} fails without a fault: {ended.error}")
                self.output(name, room).rename(out)
            facts.write_text(json.dumps([ended.changes, int(1000 * (time.monotonic() - running.started_at))]))
        self.changes[name], self.millis[name] = json.loads(facts.read_text())
        self.wholes[name] = self.files(name, out)

    def files(self, name: str, out: Path) -> dict[str, str]:
        """Return what two runs of a command must have in common."""
        if name not in MEASURED:
            return digest(out)
        return {re.sub(r"\b\d+x\d+\b", "SHAPE", file): keys for file, keys in names(out).items()}  # times choose one

    def arguments(self, name: str) -> list[str]:
        first, *others = COMMANDS[name]
        return [*first.split(), *others, *(() if name in WITHOUT_OUT else ("--out", "out"))]

    def output(self, name: str, room: Path) -> Path:
        """Return what a command made; init writes beside what it reads."""
        if name == "init":
            (room / "out").mkdir(exist_ok=True)
            for part in ("draftlab.yaml", "models"):
                if (room / part).exists():
                    (room / part).rename(room / "out" / part)
        return room / "out"

    def attempt(self, name: str, fault: Fault) -> str:
        """Run a command with a fault, and then until it ends; return the verdict."""
        with self.room() as room:
            ended = run(self.arguments(name), room, fault)
            felt = ended.code != 0
            if verdict := _complaint(ended.code, ended.error, fault):
                return verdict
            for _ in range(MOST_TRIES):
                if ended.code == 0:
                    break
                ended = run(self.arguments(name), room)
                if ended.code == 1 and re.search("exists(; edit it| and is not empty)", ended.error):
                    break  # the fault came after the output was in its place
                if ended.code:
                    return f"cannot go on: {ended.message[:200]}"
            if (files := self.files(name, self.output(name, room))) != self.wholes[name]:
                return f"other files: {_differing(files, self.wholes[name])}"
            if ended.code == 0 and (left := left_overs(room)):
                return f"left over: {left[0]}"
        return "passed" if felt else UNFELT

    def pair(self, name: str, delay_ms: int) -> str:
        """Run a command twice at once: one must lose with one line, or come too late."""
        with self.room() as room:
            first = Running(self.arguments(name), room)
            time.sleep(delay_ms / 1000)
            second = Running(self.arguments(name), room)
            ended = [first.wait(), second.wait()]
            for one in ended:
                if "Traceback" in one.error:
                    return f"traceback: {one.message[:200]}"
            if all(one.code for one in ended):
                return f"both lose: {ended[0].message[:100]} / {ended[1].message[:100]}"
            if self.files(name, self.output(name, room)) != self.wholes[name]:
                return "other files"
            return f"left over: {left[0]}" if (left := left_overs(room)) else "passed"

    def room(self):
        """Return a folder with the inputs, as links, that vanishes."""
        return _Room(self.folder)


class _Room:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Path:
        self.path = Path(tempfile.mkdtemp(prefix="room-", dir=self.folder))
        for name in ("model", "larger", "text", "made", "files"):
            (self.path / name).symlink_to(self.folder / name)
        return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path)


def make_models(folder: Path) -> None:
    """Write a random model of five layers with a small tokenizer, and its expansion to twenty layers."""
    from builders import SIZES, TOKENIZER_TEXT, build

    from benchmarks.expand import expand
    from benchmarks.tiny_target import train_tokenizer
    from draftlab.model import checkpoint

    build("llama").save_pretrained(folder / "model")
    train_tokenizer(TOKENIZER_TEXT, SIZES["vocab_size"], folder / "model")
    shape = checkpoint.read_shape(folder / "model").model_copy(update={"layers": 20})
    expand(folder / "model", folder / "larger", shape)


def write_files(folder: Path) -> None:
    """Write a server's log and a recipe of two steps."""
    entry = {"prompt_ids": [5, 6], "ids": [7, 9], "top_ids": [[7, 8], [3, 9]]}
    entry |= {"logprobs": [-0.5, -1.5], "top_logprobs": [[-0.5, -2.0], [-0.75, -1.5]]}
    cut = {"source": "model", "layers": 2, "data": "text", "calibration_tokens": 256, "seq_len": 16}
    steps: dict[str, dict[str, object]] = {"prune": cut, "export": {"draft": "out/prune", "target": "model"}}
    recipe = {"steps": [{name: settings | {"out": f"out/{name}"}} for name, settings in steps.items()]}
    (folder / "files").mkdir()
    (folder / "files" / "log.jsonl").write_text((json.dumps(entry) + "\n") * 40)
    (folder / "files" / "recipe.yaml").write_text(json.dumps(recipe))


@dataclass(frozen=True, slots=True)
class Point:
    """One fault of one command.

    n: its file change; of kill and term, and of the same command once more (pair), thousandths of its time.
    """

    command: str
    kind: Kind | Literal["pair"]
    n: int
    limit: int = 0

    def run(self, campaign: Campaign) -> Result:
        try:
            after = self.n * campaign.millis[self.command] // 1000
            if self.kind == "pair":
                verdict = campaign.pair(self.command, after)
            else:
                n = after if self.kind in ("kill", "term") else self.n
                verdict = campaign.attempt(self.command, Fault(self.kind, n, self.limit))
        except TimeoutError as error:
            verdict = f"hangs: {error}"
        return Result(self.command, self.kind, self.n, self.limit, verdict)


def points(campaign: Campaign, crashes: int, kills: int, pairs: int, full: float, seed: int) -> list[Point]:
    """Draw a plan: so many crashes and torn writes, kills and pairs, each command as often; in any order.

    full: share of all file changes at which the disk is full.
    """
    rng, names = random.Random(seed), list(campaign.wholes)

    def places(count: int, most: Mapping[str, int]) -> list[tuple[str, int]]:
        return [(name := names[number % len(names)], rng.randint(1, max(2, most[name]))) for number in range(count)]

    thousandths = dict.fromkeys(names, 1000)
    plan = [Point(name, "crash" if rng.random() < 0.5 else "torn", n) for name, n in places(crashes, campaign.changes)]
    plan = [replace(point, limit=rng.choice(LIMITS)) if point.kind == "torn" else point for point in plan]
    plan += [Point(name, "term" if rng.random() < 0.25 else "kill", n) for name, n in places(kills, thousandths)]
    plan += [Point(name, "pair", n) for name, n in places(pairs, thousandths)]
    every = [Point(name, "full", n, rng.choice(LIMITS)) for name in names for n in range(1, campaign.changes[name] + 1)]
    plan += [point for point in every if rng.random() < full]
    rng.shuffle(plan)
    return list(dict.fromkeys(plan))


def fuzzed(start: int, count: int, seed: int) -> Result:
    """Read so many damaged files."""
    words = ["tests/chaos/fuzz.py", "--seed", str(seed), "--start", str(start), "--count", str(count)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    return Result("readers", "damaged file", start, count, _verdict(done, lines[:-1] or [done.stderr[-300:]]), count)


def tested(files: str) -> Result:
    """Run tests: misbehaving servers, hostile names and code, stalling clocks, the laws of decoding."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{files}"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    passed = re.search(r"(\d+) passed", done.stdout)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return Result(files, "test", 0, 0, _verdict(done, failed), len(failed) + int(passed[1] if passed else 0))


def go(campaign: Campaign, plan: list[Point], inputs: int, seed: int, file: Path, minutes: float) -> list[Result]:
    """Run what file lacks of a plan, and append each verdict to it, until it is done or the time is over."""
    end = time.monotonic() + 60 * minutes
    results = [Result(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(r.command, r.kind, r.n, r.limit) for r in results}
    jobs = {(p.command, p.kind, p.n, p.limit): partial(p.run, campaign) for p in plan}
    parts = {start: min(INPUTS, inputs - start) for start in range(0, inputs, INPUTS)}
    jobs |= {("readers", "damaged file", *part): partial(fuzzed, *part, seed) for part in parts.items()}
    jobs |= {(files, "test", 0, 0): partial(tested, files) for files in (TESTS if inputs else ())}
    left = [job for key, job in jobs.items() if key not in done]
    for number, job in enumerate(left):
        if time.monotonic() > end:
            print(f"{len(left) - number} of {len(jobs)} are left; the same command goes on", file=sys.stderr)
            break
        results.append(job())
        with file.open("a") as stream:
            stream.write(json.dumps(asdict(results[-1])) + "\n")
    return results


def table(results: list[Result]) -> str:
    """Return one row per kind of fault, and a line per failure."""
    lines = ["| fault | tried | without effect | failed |", "|---|---:|---:|---:|"]
    for kind in dict.fromkeys(r.kind for r in results):
        rows = [r for r in results if r.kind == kind]
        unfelt, failed = sum(r.verdict == UNFELT for r in rows), sum(r.failures for r in rows)
        lines.append(f"| {kind} | {sum(r.tried for r in rows)} | {unfelt} | {failed} |")
    failed = [f"{r.command}, {r.kind} {r.n} {r.limit}: {r.verdict}" for r in results if r.failures]
    return "\n".join([*lines, *failed])


def _verdict(done: subprocess.CompletedProcess[str], failures: list[str]) -> str:
    return "passed" if done.returncode == 0 else "\n".join(failures) or done.stderr[-300:]


def _complaint(code: int, error: str, fault: Fault) -> str:
    """Return what is wrong with how a faulty run ended; '' if nothing is."""
    if "Traceback" in error:
        return f"traceback: {error.strip().splitlines()[-1][:200]}"
    # a write that stops at the limit kills nobody, and is noticed by its length
    wanted = {"crash": (CRASHED,), "torn": (-25, 1), "full": (1,), "kill": (-9,), "term": (130,)}.get(fault.kind, ())
    if code not in (0, *wanted) and not (fault.kind == "term" and code == -15):  # before Python's handler is there
        return f"exit {code}: {error.strip()[-200:]}"
    return ""


def _differing(found: dict[str, str], wanted: dict[str, str]) -> str:
    return ", ".join(sorted({name for name, _ in found.items() ^ wanted.items()})[:4])


def preload() -> None:
    """Import what commands import, once for all processes that are forked from this one."""
    import torch

    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module in pkgutil.walk_packages(draftlab.__path__, "draftlab."):
        if not module.name.endswith(("__main__", "llama_cpp_worker")):
            importlib.import_module(module.name)
    for name in LAZY:
        importlib.import_module(name)
    gc.freeze()  # a collection in a forked process would copy the whole heap


def main() -> int:
    parser = argparse.ArgumentParser(description="Break commands at every point, and look at what they leave.")
    parser.add_argument("--results", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--points", type=int, default=500, help="crashes and torn writes")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--full", type=float, default=1.0, help="share of all file changes where the disk is full")
    parser.add_argument("--inputs", type=int, default=2000, help="damaged files; 0: neither these nor tests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after that; the same command goes on")
    parser.add_argument("--commands", default=",".join(COMMANDS))
    chosen = parser.parse_args()
    preload()
    folder = chosen.results.absolute()
    campaign = Campaign(folder, chosen.commands.split(","))
    plan = points(campaign, chosen.points, chosen.kills, chosen.pairs, chosen.full, chosen.seed)
    file = folder / f"results-{chosen.seed}.jsonl"
    results = go(campaign, plan, chosen.inputs, chosen.seed, file, chosen.minutes)
    print(table(results))
    failed = sum(result.failures for result in results)
    print(json.dumps({"tried": sum(result.tried for result in results), "failed": failed, "seed": chosen.seed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
