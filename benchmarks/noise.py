"""Score the same drafts again and again while other processes steal cores: python -m benchmarks.noise [--quick]

A first score without other work is the reference. Then --runs scores are made while --stolen-cores processes compute
for about half of the time. The drafters are prompt lookup, a draft distilled from the embedded target (or --draft), and
the target as its own draft, which cannot give a speed-up. Outputs in --folder are not made again, so a run that was
killed resumes. The benchmark takes about 15 minutes on two cores. The last line is one JSON object:

relative_spread: standard deviation of the best speed-up divided by its mean.
coverage: fraction of the 95 % intervals that contain the reference.
answered: number of scores that say whether a draft is faster than plain decoding.
right, wrong: number of answers that agree with the reference, and of those that do not.
false_faster: number of answers that wrongly call a draft faster.
cannot_tell: number of scores without an answer, because the machine was busy.
reference_in_doubt: drafts for which the reference has no answer.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import child_environ, environment
from draftlab.console import note
from draftlab.results.score import Score, read_score

TEXT = ("--data", "stdlib")
# options that are passed on to draftlab score
SCORED = ("num_prompts", "max_new_tokens", "repeats", "threads", "dtype")
QUICK = {"runs": 2, "num_prompts": 4, "max_new_tokens": 16, "repeats": 1, "steps": 4}


def main() -> None:
    options = parsed()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.dumps(
        {
            name: str(value)
            for name, value in vars(options).items()
            if name not in ("folder", "runs")
        }
    )
    asked = folder / "settings.json"
    if asked.exists() and asked.read_text() != settings:
        raise SystemExit(
            f"{folder} has scores with other settings: {asked.read_text()}; use another --folder"
        )
    asked.write_text(settings)
    if options.draft is None:
        make(
            folder, "pruned", "prune", "--source", "tiny", "--layers", "3", "--width", "128", *TEXT
        )
        training = ("--steps", str(options.steps), "--batch-size", "8", *TEXT)
        make(folder, "draft", "distill", "--draft", "pruned", "--target", "tiny", *training)
    quiet = score(options, "quiet")
    noisy = []
    for number in range(options.runs):
        note(f"run {number + 1} of {options.runs}, disturbed")
        with disturbed(options.stolen_cores, seed=number):
            noisy.append(score(options, f"noisy-{number}"))
    pair = {"target": Path(options.target).name, "draft": Path(options.draft or "draft").name}
    ended = {"benchmark": "noise", "quick": options.quick, "stolen_cores": options.stolen_cores}
    ended |= pair | environment(options.threads)
    print(json.dumps(result(quiet, noisy) | ended))


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/noise"))
    parser.add_argument("--target", default="tiny")
    parser.add_argument(
        "--draft",
        help="draft of the target; by default a draft of the embedded target is pruned and distilled",
    )
    parser.add_argument(
        "--prompt-file", type=Path, help="by default, prompts are from Python's standard library"
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--stolen-cores", type=int, default=1, help="number of processes that compute meanwhile"
    )
    parser.add_argument("--steps", type=int, default=120, help="steps of distillation")
    parser.add_argument(
        "--threads", type=int, default=1, help="with more than one, times are in wall seconds"
    )
    parser.add_argument("--quick", action="store_true", help="make only two runs on four prompts")
    options = parser.parse_args(words)
    if options.draft is None and options.target != "tiny":
        parser.error("--target needs its --draft")
    if options.runs < 2:
        parser.error("a spread needs --runs 2 or more")
    # paths become absolute, because commands run in the folder
    for name in ("folder", "prompt_file", "target", "draft"):
        path = getattr(options, name)
        if path is not None and (name == "folder" or Path(path).exists()):
            setattr(options, name, Path(path).resolve())
    return argparse.Namespace(**vars(options) | (QUICK if options.quick else {}))


def make(folder: Path, name: str, *words: str) -> None:
    """Run a command of draftlab in a folder, unless its output `name` exists."""
    if (folder / name).exists():
        return
    command = [sys.executable, "-m", "draftlab", *words, "--out", name]
    subprocess.run(command, cwd=folder, env=child_environ(), check=True, stdout=sys.stderr)


def score(options: argparse.Namespace, name: str) -> dict[str, Score]:
    prompts = ("--prompt-file", str(options.prompt_file)) if options.prompt_file else TEXT
    make(
        options.folder,
        name,
        "score",
        *("--target", str(options.target), "--draft", str(options.draft or "draft")),
        *("--draft", str(options.target), "--drafter", "latest-lookup", "--k", "2-3"),
        *(f"--{name.replace('_', '-')}={getattr(options, name)}" for name in SCORED),
        *prompts,
    )
    scores = [read_score(file) for file in sorted((options.folder / name).rglob("score.json"))]
    return {score.name: score for score in scores}


@contextlib.contextmanager
def disturbed(cores: int, seed: int) -> Iterator[None]:
    """Keep a number of cores busy at random times, as long as the block runs."""
    thieves = [
        multiprocessing.Process(target=steal, args=(seed * 100 + core, os.getpid()), daemon=True)
        for core in range(cores)
    ]
    for thief in thieves:
        thief.start()
    try:
        yield
    finally:
        for thief in thieves:
            thief.terminate()
            thief.join()


def steal(seed: int, parent: int) -> None:
    """Alternate between computing and sleeping for 5 ms to 2 s each, until the parent process ends."""
    rng = random.Random(seed)
    while os.getppid() == parent:
        end = time.perf_counter() + 0.005 * 400 ** rng.random()
        while time.perf_counter() < end:
            sum(range(1000))
        time.sleep(0.005 * 400 ** rng.random())


def result(quiet: dict[str, Score], noisy: list[dict[str, Score]]) -> dict[str, Any]:
    truth = {name: score.best_k_speedup.value for name, score in quiet.items()}
    best = [max(score.best_k_speedup.value for score in scores.values()) for scores in noisy]
    pairs = [(truth[name], score) for scores in noisy for name, score in scores.items()]
    covered = [
        score.best_k_speedup.low <= value <= score.best_k_speedup.high for value, score in pairs
    ]
    answers = [
        (value > 1, faster) for value, score in pairs if (faster := answer(score)) is not None
    ]
    return {
        "relative_spread": stdev(best) / mean(best),
        "coverage": mean(covered),
        "answered": len(answers),
        "right": sum(is_faster == said for is_faster, said in answers),
        "wrong": sum(is_faster != said for is_faster, said in answers),
        "false_faster": sum(said and not is_faster for is_faster, said in answers),
        "cannot_tell": sum(score.doubt is not None for _, score in pairs),
        "scores": len(pairs),
        "reference": truth,
        "reference_in_doubt": [name for name, score in quiet.items() if score.doubt is not None],
        "best": best,
        "stalled_steps": sum(score.stalls[0] for _, score in pairs)
        / sum(score.stalls[1] for _, score in pairs),
        "relative_spreads": {
            name: stdev(values) / mean(values)
            for name in truth
            if (values := [scores[name].best_k_speedup.value for scores in noisy])
        },
    }


def answer(score: Score) -> bool | None:
    """Return whether a score calls its draft faster than plain decoding, or None if the score cannot tell."""
    gain = score.best_k_speedup
    return None if score.doubt is not None or gain.low <= 1 <= gain.high else gain.low > 1


if __name__ == "__main__":
    main()
