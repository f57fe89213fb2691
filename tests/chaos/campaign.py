"""The campaign of faults: PYTHONPATH=tests:tests/chaos python tests/chaos/campaign.py --seed 0 --minutes 60.

Every command runs once without a fault. Then it runs with a fault at a point that the seed draws, and again until it
ends: it must end in the same files, leave no hidden file, and print one line about the error. Commands with a damaged
input must do their work or refuse it in one line. A round has each kind of fault once for each command; rounds follow
until the time is over. Each result is a line of RESULTS/results-SEED.jsonl, and a stopped campaign continues; remove
RESULTS after a change of the code. One table and one line of JSON come last.
"""

import argparse
import contextlib
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import pkgutil
import random
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from damage import damage
from faults import CRASHED, Fault, Running, digest, left_overs, names, run

import draftlab

TEXTS, CHARACTERS = 90, 1300  # enough for 48 prompts of held-out text
TRAINED = "--data text --steps 4 --batch-size 2 --seq-len 32"
SHORT = f"{TRAINED} --eval-steps 2 --save-steps 2"
SMALL = "--data text --calibration-tokens 256"
TIMED = "--repeats 3 --mode eager"
PROMPTS = "--data text --prompt-tokens 8"
LIMITS = (0, 1, 100, 5000)  # bytes of a file before writing fails
LAZY = (
    "accelerate",
    "peft",
    "matplotlib.backends.backend_svg",
    "transformers.models.llama.modeling_llama",
)
MOST_TRIES = 4
HANG = 300.0  # seconds
UNFELT = "without effect"  # the command ended before its fault, or no file grew beyond the limit
MEASURED = ("profile", "score", "search")  # times decide outputs: the names of files are compared
WITHOUT_OUT = ("run", "init")
PRINTING = {"check", "design", "env", "outputs info", "predict", "report"}
UNTRIED = {  # commands that write
    "auto": "its steps are commands that are tried, in a directory that a killed run takes up again (tests/searching)"
}
# name -> command with the outputs that it reads; --out is added
COMMANDS: dict[str, str] = {
    "prune": f"prune --source model --layers 2 --seq-len 64 {SMALL}",
    "distill": f"distill --draft made/prune --target model {SHORT}",
    "distill-ce": f"distill --loss ce --draft made/prune {SHORT}",
    "outputs": "outputs build --target model --data text --num-sequences 300 --seq-len 24 --top-logprobs 4",
    "texts": f"outputs build --use replay --target model --num-prompts 40 --max-new-tokens 8 {PROMPTS}",
    "distill-outputs": ("distill --draft made/prune --outputs made/outputs --steps 4 --batch-size 2 --save-steps 2"),
    "replay": "replay made/texts --draft made/prune",
    "export": "export made/prune --target model",
    "gguf": "export made/prune --target model --to gguf --outtype f32",
    "import": "import made/gguf/prune-f32.gguf",
    "prune-masks": f"prune --method masks --source model --layers 2 --calibration-tokens 256 {TRAINED}",
    "eagle": f"distill --student eagle --target model {SHORT}",
    "log": "outputs build --from files/log.jsonl --target model --seq-len 16 --top-logprobs 2",
    "run": "run files/recipe.yaml",
    "init": "init --gguf made/gguf/prune-f32.gguf --data text",
    "profile": f"profile larger --k 1 --context 16,64 {TIMED}",
    "score": (
        "score --target model --draft made/prune --drafter latest-lookup --k 2 --num-prompts 3 --max-new-tokens 8 "
        f"{PROMPTS} {TIMED}"
    ),
    "search": (
        "search --target larger --source larger --data text --k 1-2 --layers 1,2 --widths 64 --minutes 0.01 "
        "--first-steps 1"
    ),
}
# commands that write nothing, for damaged inputs
READING = {
    "check": "check made/prune --target model",
    "report": "report made/score",
    "info": "outputs info made/outputs --verify --target model",
    "config": "prune --config made/prune/draftlab.json --dry-run",
    "head": "replay made/texts --draft made/eagle --target model",
    "prompts": "outputs build --use replay --target model --prompt-file files/prompts.jsonl",
}
KINDS = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".yaml": "yaml",
    ".safetensors": "tensors",
    ".txt": "text",
}


@dataclass(frozen=True, slots=True)
class Result:
    """verdict: passed, without effect, or one line on the failure."""

    command: str
    kind: str
    n: int
    limit: int
    verdict: str

    @property
    def failed(self) -> bool:
        return self.verdict not in ("passed", UNFELT)


class Campaign:
    """A folder with a model, a text, and the output of every command, to compare faulty runs with."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder, self.wholes, self.changes, self.millis = folder, {}, {}, {}
        (folder / "made").mkdir(parents=True, exist_ok=True)
        if not (folder / "model").exists():
            apart = multiprocessing.get_context("spawn").Process(target=make_models, args=(folder,))
            apart.start()  # a process apart: this process forks commands and must have no threads
            apart.join()
            write_text(folder / "text")
            write_files(folder)
        for name in names:
            self._whole(name)

    def _whole(self, name: str) -> None:
        out, facts = self.folder / "made" / name, self.folder / f"{name}.json"
        if not (out.exists() and facts.exists()):
            shutil.rmtree(out, ignore_errors=True)
            with self.room() as room:  # as faulty runs do: cards show the command line
                running = Running(self.arguments(name), room)
                ended = running.wait()
                if ended.code:
                    raise SystemExit(f"{name} fails without a fault: {ended.error}")
                self.output(name, room).rename(out)
            facts.write_text(json.dumps([ended.changes, int(1000 * (time.monotonic() - running.started_at))]))
        self.changes[name], self.millis[name] = json.loads(facts.read_text())
        self.wholes[name] = self.files(name, out)

    def files(self, name: str, out: Path) -> dict[str, str]:
        """Return the files and digests that two runs of a command have in common."""
        if name not in MEASURED:
            return digest(out)
        # times choose one
        return {re.sub(r"\b\d+x\d+\b", "SHAPE", file): keys for file, keys in names(out).items()}

    def arguments(self, name: str) -> list[str]:
        out = () if name in (*WITHOUT_OUT, *READING) else ("--out", "out")
        return [*(COMMANDS | READING)[name].split(), *out]

    def output(self, name: str, room: Path) -> Path:
        """Return the output of a command; init writes into the working directory."""
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
                if ended.code == 1 and re.search("exists( already; edit| and is not empty)", ended.error):
                    break  # the fault came after the output was in its place
                if ended.code:
                    return f"cannot go on: {ended.message[:200]}"
            if (files := self._files_in(name, room)) != self.wholes[name]:
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
            if self._files_in(name, room) != self.wholes[name]:
                return "other files"
            return f"left over: {left[0]}" if (left := left_overs(room)) else "passed"

    def damaged(self, name: str, number: int, seed: int) -> str:
        """Run a command with one damaged input; return the verdict."""
        rng = random.Random(f"{seed}:{name}:{number}")
        file = rng.choice(self.inputs(name))
        harm = damage((self.folder / file).read_bytes(), KINDS.get(file.suffix, "binary"), rng)
        with self.room() as room:
            (room / file.parts[0]).unlink()
            shutil.copytree(self.folder / file.parts[0], room / file.parts[0])
            (room / file).write_bytes(harm.content)
            ended = run(self.arguments(name), room, seconds=HANG)
            wrong = ""
            if "Traceback" in ended.error or ended.code not in (0, 1, 3):
                wrong = f"exit {ended.code}: {ended.message[:200]!r}"
            elif ended.code and not (ended.message.isprintable() and len(ended.message) < 1000):
                wrong = f"message: {ended.message[:200]!r}"
            elif (
                ended.code == 0
                and harm.certain
                and file.name not in ended.error  # a note names the file
                and self.wholes.get(name) not in (None, self._files_in(name, room))
            ):
                wrong = "silent"
        return f"{file}, {harm.name}: {wrong}" if wrong else "passed"

    def _files_in(self, name: str, room: Path) -> dict[str, str]:
        return self.files(name, self.output(name, room))

    def inputs(self, name: str) -> list[Path]:
        """Return the files that a command may read."""
        words = (COMMANDS | READING)[name].split()
        places = [self.folder / word for word in words if (self.folder / word).exists()]
        files = [file for place in places for file in (place, *sorted(place.rglob("*"))) if file.is_file()]
        return [file.relative_to(self.folder) for file in files if file.stat().st_size]

    @contextlib.contextmanager
    def room(self) -> Iterator[Path]:
        """Yield a folder with links to the inputs."""
        with tempfile.TemporaryDirectory(prefix="room-", dir=self.folder) as room:
            for name in ("model", "larger", "text", "made", "files"):
                (Path(room) / name).symlink_to(self.folder / name)
            yield Path(room)


def make_models(folder: Path) -> None:
    """Write a random model of five layers with a small tokenizer, and its expansion to twenty layers."""
    from helpers.builders import SIZES, TOKENIZER_TEXT, build

    from benchmarks.expand import expand
    from benchmarks.tiny_target import train_tokenizer
    from draftlab.model import checkpoint

    build("llama").save_pretrained(folder / "model")
    train_tokenizer(TOKENIZER_TEXT, SIZES["vocab_size"], folder / "model")
    shape = checkpoint.read_shape(folder / "model").model_copy(update={"layers": 20})
    expand(folder / "model", folder / "larger", shape)


def write_text(folder: Path) -> None:
    """Write the beginnings of modules of Python's library, which do not change with the house."""
    folder.mkdir()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))[:TEXTS]:
        (folder / f"{file.stem}.txt").write_text(file.read_text("utf-8")[:CHARACTERS])


def write_files(folder: Path) -> None:
    """Write a server's log and a recipe of two steps."""
    entry = {"prompt_ids": [5, 6], "ids": [7, 9], "top_ids": [[7, 8], [3, 9]]}
    entry |= {"logprobs": [-0.5, -1.5], "top_logprobs": [[-0.5, -2.0], [-0.75, -1.5]]}
    cut = {"source": "model", "layers": 2, "data": "text", "calibration_tokens": 256, "seq_len": 16}
    steps: dict[str, dict[str, object]] = {
        "prune": cut,
        "export": {"draft": "out/prune", "target": "model"},
    }
    recipe = {"steps": [{name: settings | {"out": f"out/{name}"}} for name, settings in steps.items()]}
    (folder / "files").mkdir()
    (folder / "files" / "prompts.jsonl").write_text('{"prompt": "def parse"}\n{"prompt": "class"}\n')
    (folder / "files" / "log.jsonl").write_text((json.dumps(entry) + "\n") * 40)
    (folder / "files" / "recipe.yaml").write_text(json.dumps(recipe))


Job = tuple[str, str, int, int]  # command, kind, n, limit


def judged(campaign: Campaign, seed: int, name: str, kind: str, n: int, limit: int) -> Result:
    """Try one fault or damaged input.

    n: Thousandths of the command's time for kinds kill, term and pair, else the number of the change or damage.
    """
    after = n * campaign.millis.get(name, 0) // 1000
    try:
        if kind == "pair":
            verdict = campaign.pair(name, after)
        elif kind == "damage":
            verdict = campaign.damaged(name, n, seed)
        else:
            verdict = campaign.attempt(name, Fault(kind, after if kind in ("kill", "term") else n, limit))
    except TimeoutError as error:
        verdict = f"hangs: {' '.join(str(error).split())}"
    return Result(name, kind, n, limit, verdict)


def plan(campaign: Campaign, seed: int) -> Iterator[list[Job]]:
    """Yield rounds without end: for each command a crash, torn write, full disk, kill, term, rival and two damages."""
    tried = [name for name in (*campaign.wholes, *READING) if campaign.inputs(name)]
    for number in itertools.count():
        rng, jobs = random.Random(f"{seed}:{number}"), list[Job]()
        for name in campaign.wholes:
            for kind in ("crash", "torn", "full", "kill", "term", "pair"):
                most = max(2, campaign.changes[name]) if kind in ("crash", "torn", "full") else 1000
                limit = rng.choice(LIMITS) if kind in ("torn", "full") else 0
                jobs.append((name, kind, rng.randint(1, most), limit))
        jobs += [(name, "damage", 2 * number + i, 0) for name in tried for i in range(2)]
        rng.shuffle(jobs)
        yield list(dict.fromkeys(jobs))


def go(rounds: Iterable[list[Job]], judge: Callable[..., Result], file: Path, minutes: float) -> list[Result]:
    """Run the jobs that have no result in the file, and append each result to it, until the time is over."""
    end, results = time.monotonic() + 60 * minutes, list[Result]()
    if file.exists():
        results = [Result(**json.loads(line)) for line in file.read_text().splitlines()]
    done = {(r.command, r.kind, r.n, r.limit) for r in results}
    for job in itertools.chain.from_iterable(rounds):
        if time.monotonic() > end:
            return results
        if job not in done:
            done.add(job)
            results.append(judge(*job))
            with file.open("a") as stream:
                stream.write(json.dumps(asdict(results[-1])) + "\n")
    return results


def table(results: list[Result]) -> str:
    """Return one row per kind of fault, and a line per failure."""
    lines = ["| fault | tried | without effect | failed |", "|---|---:|---:|---:|"]
    for kind in dict.fromkeys(r.kind for r in results):
        rows = [r for r in results if r.kind == kind]
        unfelt, failed = sum(r.verdict == UNFELT for r in rows), sum(r.failed for r in rows)
        lines.append(f"| {kind} | {len(rows)} | {unfelt} | {failed} |")
    failures = [f"{r.command}, {r.kind} {r.n} {r.limit}: {r.verdict}" for r in results if r.failed]
    return "\n".join([*lines, *failures])


def _complaint(code: int, error: str, fault: Fault) -> str:
    """Return what is wrong with how a faulty run ended; '' if nothing is."""
    if "Traceback" in error:
        return f"traceback: {error.strip().splitlines()[-1][:200]}"
    # a write that stops at the limit kills nobody, and is noticed by its length
    wanted = {
        "crash": (CRASHED,),
        "torn": (-25, 1),
        "full": (1,),
        "kill": (-9,),
        "term": (130,),
    }.get(fault.kind, ())
    if code not in (0, *wanted) and not (fault.kind == "term" and code == -15):  # before Python's handler is there
        return f"exit {code}: {error.strip()[-200:]}"
    return ""


def _differing(found: dict[str, str], wanted: dict[str, str]) -> str:
    return ", ".join(sorted({name for name, _ in found.items() ^ wanted.items()})[:4])


def preload() -> None:
    """Import all modules once for the processes that are forked from this process."""
    import torch

    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(draftlab.__path__, "draftlab."):
        if not module.name.endswith(("__main__", "llama_cpp_worker")):
            importlib.import_module(module.name)
    for name in LAZY:
        importlib.import_module(name)
    gc.freeze()  # a collection in a forked process would copy the whole heap


def main() -> int:
    parser = argparse.ArgumentParser(description="Break commands at random points, and compare their outputs.")
    parser.add_argument("--results", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes",
        type=float,
        default=60,
        help="stop after these minutes; the same command continues",
    )
    parser.add_argument("--commands", default=",".join(COMMANDS))
    chosen = parser.parse_args()
    started = time.monotonic()
    os.environ["HF_HUB_OFFLINE"] = "1"
    preload()
    folder = chosen.results.absolute()
    campaign = Campaign(folder, chosen.commands.split(","))
    minutes = chosen.minutes - (time.monotonic() - started) / 60
    file, judge = folder / f"results-{chosen.seed}.jsonl", partial(judged, campaign, chosen.seed)
    results = go(plan(campaign, chosen.seed), judge, file, minutes)
    print(table(results))
    failed = sum(result.failed for result in results)
    print(json.dumps({"tried": len(results), "failed": failed, "seed": chosen.seed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
