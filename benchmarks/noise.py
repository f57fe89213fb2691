"""Score the same drafts again and again while other processes steal cores: python -m benchmarks.noise [--quick]

An exhaustive score without other work is the reference. Then --runs quick scores are made while --stolen-cores
processes compute for about half of the time. The drafters are prompt lookup, a draft distilled from the embedded target
(or --draft), and the target as its own draft, which cannot give a speed-up. Outputs in --folder are not made again, so
a run that was killed resumes. Thirty runs take about 15 minutes on two cores. The last line is one JSON object:

decided: number of runs that say whether their fastest draft is faster than plain decoding.
right: number of decided runs that do not contradict the reference.
wrong: number of decided runs that contradict the reference: in what they say of plain decoding, or because they call a
    draft slower than their fastest draft although the reference says that it is faster.
false_faster: number of runs that wrongly call a draft faster than plain decoding.
doubtful: number of runs whose fastest draft has a doubt, such as a busy machine.
coverage: fraction of the intervals of timed drafts that contain the speed-up of the reference.
relative_spread: standard deviation of the best speed-up divided by its mean.
load: load average of the machine at the start and at the end. Other work than the benchmark's own raises it.
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
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import child_environ, environment
from draftlab.console import note
from draftlab.results.ranking import Ranked, rank
from draftlab.results.score import Score, read_score

TEXT = ("--data", "stdlib")
# options that are passed on to draftlab score
SCORED = ("num_prompts", "max_new_tokens", "threads", "dtype", "int8", "k")
QUICK = {"runs": 2, "num_prompts": 4, "max_new_tokens": 16, "steps": 4}


def main() -> None:
    options = parsed()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.dumps({name: str(value) for name, value in vars(options).items() if name not in ("folder", "runs")})
    asked = folder / "settings.json"
    if asked.exists() and asked.read_text() != settings:
        raise SystemExit(f"{folder} has scores with other settings: {asked.read_text()}; use another --folder")
    asked.write_text(settings)
    if options.draft is None:
        make(folder, "pruned", "prune", "--source", "tiny", "--layers", "3", "--width", "128", *TEXT)
        training = ("--steps", str(options.steps), "--batch-size", "8", *TEXT)
        make(folder, "draft", "distill", "--draft", "pruned", "--target", "tiny", *training)
    load = [os.getloadavg()[0]]
    quiet = score(options, "quiet", "--exhaustive")
    noisy = []
    for number in range(options.runs):
        note(f"run {number + 1} of {options.runs}, disturbed")
        with disturbed(options.stolen_cores, seed=number):
            noisy.append(score(options, f"noisy-{number}"))
    load.append(os.getloadavg()[0])
    pair = {"target": Path(options.target).name, "draft": Path(options.draft or "draft").name}
    ended = {"benchmark": "noise", "quick": options.quick, "stolen_cores": options.stolen_cores}
    ended |= pair | {"load": load} | environment(options.threads)
    print(json.dumps(result(quiet, noisy) | ended))


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/noise"))
    parser.add_argument("--target", default="tiny")
    parser.add_argument(
        "--draft",
        help="draft of the target; by default a draft of the embedded target is pruned and distilled",
    )
    parser.add_argument("--prompt-file", type=Path, help="by default, prompts are from Python's standard library")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--k", default="2-3")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--int8", choices=["draft", "target", "both"])
    parser.add_argument("--stolen-cores", type=int, default=1, help="number of processes that compute meanwhile")
    parser.add_argument("--steps", type=int, default=120, help="steps of distillation")
    parser.add_argument("--threads", type=int, default=1, help="with more than one, times are in wall seconds")
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


def score(options: argparse.Namespace, name: str, *more: str) -> list[Score]:
    prompts = ("--prompt-file", str(options.prompt_file)) if options.prompt_file else TEXT
    asked = {name: value for name in SCORED if (value := getattr(options, name)) is not None}
    make(
        options.folder,
        name,
        "score",
        *("--target", str(options.target), "--draft", str(options.draft or "draft")),
        *("--draft", str(options.target), "--drafter", "latest-lookup"),
        *(f"--{name.replace('_', '-')}={value}" for name, value in asked.items()),
        *prompts,
        *more,
    )
    return [read_score(file) for file in sorted((options.folder / name).rglob("score.json"))]


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


def result(quiet: Sequence[Score], noisy: Sequence[Sequence[Score]]) -> dict[str, Any]:
    """Return the counts of noisy scores beside a quiet one. Each argument has the scores of all drafts."""
    reference = rank(quiet)
    truth = {row.name: row.speedup.value for row in reference}
    rankings = [rank(scores) for scores in noisy]
    said = [(ranking, faster) for ranking in rankings if (faster := answer(ranking[0])) is not None]
    wrong = [contradicts(ranking, reference) for ranking, _ in said]
    best = [ranking[0].gain.value for ranking in rankings]
    covered = [
        row.speedup.low <= truth[row.name] <= row.speedup.high
        for ranking in rankings
        for row in ranking
        if row.score.timed
    ]
    return {
        "runs": len(rankings),
        "decided": len(said),
        "right": wrong.count(False),
        "wrong": wrong.count(True),
        "false_faster": sum(faster and truth[ranking[0].name] <= 1 for ranking, faster in said),
        "doubtful": sum(ranking[0].doubt is not None for ranking in rankings),
        "coverage": mean(covered),
        "timed_intervals": len(covered),
        "relative_spread": stdev(best) / mean(best),
        "reference": truth,
        "reference_in_doubt": [row.name for row in reference if row.doubt is not None],
        "best": best,
        "winners": Counter(ranking[0].name for ranking in rankings),
    }


def answer(row: Ranked) -> bool | None:
    """Return whether a ranking calls its fastest draft faster than plain decoding, or None if it cannot tell."""
    gain = row.gain
    return None if row.doubt is not None or gain.low <= 1 <= gain.high else gain.low > 1


def contradicts(ranking: Sequence[Ranked], reference: Sequence[Ranked]) -> bool:
    """Return whether a decided ranking says the opposite of the reference: of plain decoding, or of two drafts."""
    place = {row.name: row for row in reference}
    first = ranking[0]
    if answer(first) != (place[first.name].speedup.value > 1):
        return True
    slower = {row.name for row in ranking if row.significant}
    return reference[0].name in slower and place[first.name].significant is True


if __name__ == "__main__":
    main()
