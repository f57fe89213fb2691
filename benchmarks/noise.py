"""Score the same drafts again and again while another process steals both cores: python -m benchmarks.noise

A quiet reference first, then --runs scores, each beside a process that keeps every core busy for random stretches. The
drafts are prompt lookup, one cut from the embedded target, and the target itself, which cannot be faster than none.
relative_spread: standard deviation of the best speed-up over its mean; coverage: share of 95 % intervals that hold the
reference; false_faster: scores that call a draft faster which is not; cannot_tell: scores that call none, and
reference_in_doubt: drafts of which the reference does not. The last line is one JSON object.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import environment
from draftlab.console import note
from draftlab.results.score import Score, read_score

ROOT = Path(__file__).parents[1]
TEXT = ("--data", "stdlib")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1, help="with more than one, seconds are the wall clock's")
    options = parser.parse_args()
    if options.runs < 2:
        parser.error("a spread needs --runs 2 or more")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        draftlab(work, "prune", "--source", "tiny", "--layers", "3", "--width", "128", *TEXT, "--out", "draft")
        quiet = score(work, "quiet", options)
        noisy = []
        for number in range(options.runs):
            note(f"run {number + 1} of {options.runs}, disturbed")
            with disturbed(seed=number):
                noisy.append(score(work, f"noisy-{number}", options))
    print(json.dumps(result(quiet, noisy) | {"benchmark": "noise"} | environment(options.threads)))


def draftlab(folder: Path, *words: str) -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "draftlab", *words], cwd=folder, env=environ, check=True, stdout=sys.stderr)


def score(folder: Path, name: str, options: argparse.Namespace) -> dict[str, Score]:
    draftlab(
        folder, "score", "--target", "tiny", "--draft", "draft", "--draft", "tiny", "--drafter", "prompt-lookup",
        "--k", "2-3", "--num-prompts", str(options.prompts), "--max-tokens", "64", "--tasks", "none",
        "--threads", str(options.threads), *TEXT, "--out", name,
    )  # fmt: skip
    scores = [read_score(file) for file in sorted((folder / name).rglob("score.json"))]
    return {score.name: score for score in scores}


@contextlib.contextmanager
def disturbed(seed: int) -> Iterator[None]:
    """Steal every core at random while the block runs."""
    thieves = [
        multiprocessing.Process(target=steal, args=(seed * 100 + core,), daemon=True)
        for core in range(os.cpu_count() or 1)
    ]
    for thief in thieves:
        thief.start()
    try:
        yield
    finally:
        for thief in thieves:
            thief.terminate()
            thief.join()


def steal(seed: int) -> None:
    """Compute for 5 ms to 2 s at a time, about half of the time."""
    rng = random.Random(seed)
    while True:
        end = time.perf_counter() + 0.005 * 400 ** rng.random()
        while time.perf_counter() < end:
            sum(range(1000))
        time.sleep(0.005 * 400 ** rng.random())


def result(quiet: dict[str, Score], noisy: list[dict[str, Score]]) -> dict[str, Any]:
    truth = {name: score.best_k_speedup.value for name, score in quiet.items()}
    best = [max(score.best_k_speedup.value for score in scores.values()) for scores in noisy]
    found = [(truth[name], score) for scores in noisy for name, score in scores.items()]
    covered = [score.best_k_speedup.low <= value <= score.best_k_speedup.high for value, score in found]
    return {
        "relative_spread": stdev(best) / mean(best),
        "coverage": mean(covered),
        "false_faster": sum(value <= 1 and "Faster:" in score.headline() for value, score in found),
        "cannot_tell": sum(score.doubt is not None for _, score in found),
        "scores": len(found),
        "reference": truth,
        "reference_in_doubt": [name for name, score in quiet.items() if score.doubt is not None],
        "best": best,
        "stalled_steps": sum(score.stalls[0] for _, score in found) / sum(score.stalls[1] for _, score in found),
    }


if __name__ == "__main__":
    main()
