"""Measure `draftlab auto`, which makes a draft for a target in one command: python -m benchmarks.auto

`auto` runs on the target tiny in an empty folder. The drafter that it chooses is then scored in one process with the
drafts of recipes/quickstart.yaml. --smollm2 reads finished runs of `auto` on SmolLM2. The last line is a JSON object,
with null for parts that did not run:

server_rule_gap: draftlab's tokens per target pass minus those of the server that --vllm names, for the draft that was
chosen for tiny. Without --vllm, or if no draft was chosen: the largest gap of the last run of benchmarks.server_rules.
server_rule_half_width: half the width of draftlab's interval for the same draft.
streams_prediction_error: result of the last run of benchmarks.streams.
"""

import json
import resource
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import environment
from draftlab.commands import COMMANDS
from draftlab.commands.auto import auto
from draftlab.reading import read_model, read_object
from draftlab.recipe import run
from draftlab.results.ranking import speedup_ratio
from draftlab.results.score import read_score, score_files
from draftlab.searching.verdict import Verdict

BY_HAND = Path("runs/quickstart")
STREAMS, RULES = (
    Path(__file__).parent / "results" / name for name in ("streams.json", "server_rules.json")
)


def main(
    folder: Annotated[Path, typer.Option(help="Folder for all outputs.")] = Path("runs/auto-tiny"),
    minutes: Annotated[float, typer.Option(help="Minutes that auto may take on tiny.")] = 10.0,
    smollm2: Annotated[
        list[Path] | None,
        typer.Option(help="Finished output of draftlab auto on SmolLM2. May be repeated."),
    ] = None,
    by_hand: Annotated[
        bool, typer.Option(help="Compare with the drafts of recipes/quickstart.yaml.")
    ] = True,
    vllm: Annotated[
        Path | None, typer.Option(help="Path of the program vllm, to compare its acceptance.")
    ] = None,
) -> None:
    start, cpu = time.time(), _cpu_seconds()
    auto(target="tiny", minutes=minutes, threads=1, out=folder)
    seconds, cpu = time.time() - start, _cpu_seconds() - cpu
    verdict, done = read_model(Verdict, folder, "auto.json"), [folder, *(smollm2 or [])]
    by_hand_ratio = over_by_hand(folder, verdict) if by_hand else None
    served = None if vllm is None else gap(folder, vllm, minutes)
    rules = read_object(RULES)
    result = {
        "tiny_minutes": seconds / 60,
        "tiny_cpu_minutes": cpu / 60,
        "planned_minutes": verdict.planned_minutes,
        "auto_over_best_by_hand": by_hand_ratio and by_hand_ratio["value"],
        "by_hand": by_hand_ratio,
        "server_rule_gap": -served["gap"] if served else rules["server_rule_gap"],
        "server_rule_half_width": (served["high"] - served["low"]) / 2
        if served
        else rules["half_width"],
        "served": served,
        "streams_prediction_error": read_object(STREAMS)["streams_prediction_error"],
        "verdicts": {
            path.name: read_model(Verdict, path, "auto.json").model_dump(mode="json")
            for path in done
        },
    }
    print(json.dumps(result | environment(1)))


def over_by_hand(folder: Path, verdict: Verdict) -> dict[str, Any]:
    """Score the drafter that auto chose and drafters made by hand in one process. Return the ratio of their speed-ups.

    The ratio is that of auto's choice (1 if auto chose no draft) to the best drafter made by hand. Those are prompt
    lookup, the drafts of recipes/quickstart.yaml, and prompt lookup followed by each of these drafts.
    """
    drafts = [str(BY_HAND / "distilled" / name) for name in ("3x128", "4x192")]
    if not all(Path(draft, "draftlab.json").is_file() for draft in drafts):
        run(recipe=Path("recipes/quickstart.yaml"))
    drafters = ["latest-lookup", *(f"fallback:draft={draft}" for draft in drafts)]
    by_hand = {
        *(Path(draft).name for draft in drafts),
        *(drafter.replace("/", "_") for drafter in drafters),
    }
    ours = [verdict.draft] if verdict.use and not verdict.drafter else []
    out = folder / "by-hand"
    COMMANDS["score"](
        target="tiny", draft=[*drafts, *ours], drafter=sorted({*drafters, *filter(None, [verdict.drafter])}),
        prompt_file=folder / "prompts/measure.jsonl", k=[2, 3, 5], max_new_tokens=64, int8="both",
        threads=1, exhaustive=True, repeats=2, out=out, force=True,
    )  # fmt: skip
    scores = {
        score.name.removesuffix("@int8"): score for score in map(read_score, score_files([out]))
    }
    best = max((scores[name] for name in by_hand), key=lambda score: score.best_k_speedup.value)
    speedups = {name: score.best_k_speedup.as_speedup() for name, score in scores.items()}
    gain = best.best_k_speedup
    ends = {"value": 1 / gain.value, "low": 1 / gain.high, "high": 1 / gain.low}
    if verdict.use:
        ratio = speedup_ratio(scores[verdict.ranking[0].name], best)
        ends = {"value": ratio.value, "low": ratio.low, "high": ratio.high}
    return {**ends, "best": best.name, "speedups": speedups}


def gap(folder: Path, vllm: Path, minutes: float) -> Any:
    """Return the acceptance of the chosen draft in vLLM and in draftlab on the same texts, from export --verify-with.

    Return None if auto chose prompt lookup or no draft, because then there is no export to verify.
    """
    out = folder.with_name(f"{folder.name}-vllm")
    auto(target="tiny", minutes=minutes, threads=1, server="vllm", verify_with=vllm, out=out)
    record = (
        json.loads((out / "export/draftlab.json").read_text())
        if (out / "export/draftlab.json").exists()
        else None
    )
    return record and record["notes"].get("acceptance")


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    typer.run(main)
