"""Which shape does draftlab search choose next to SmolLM2 and next to a costlier target that writes the same text?

    python -m benchmarks.search_by_cost 135m=runs/search/135m 1.3b=runs/search/1.3b 3b=runs/search/3b

Run it after recipes/smollm2-search-by-cost.yaml. The last line is one JSON object: for each target, the minutes spent,
all candidates on the last rung that they reached, and the measured speed-ups of whole requests.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import environment
from draftlab.searching.schedule import Search, read_search


def main(
    searches: Annotated[list[str], typer.Argument(help="SIZE=OUTPUT of draftlab search.")],
) -> None:
    targets = {}
    for each in searches:
        size, _, folder = each.partition("=")
        targets[size] = facts(read_search(Path(folder)))
    print(json.dumps({"benchmark": "search_by_cost", "targets": targets} | environment(1)))


def facts(search: Search) -> dict[str, Any]:
    """Return what a search found: its candidates, and the drafts that it measured, the fastest first."""
    candidates = {}
    for rung in search.rungs:
        for trial in rung.trials:
            candidates[trial.name] = {
                "steps": rung.steps, "k": trial.k, "tokens_per_pass": trial.length, "pass_ms": trial.draft_ms,
                "predicted_tpot": trial.speedup,
            }  # fmt: skip
    measured = {
        draft.name: {"k": draft.k, "speedup": draft.gain.model_dump()} for draft in search.measured
    }
    return {
        "minutes": search.spent_seconds / 60, "shapes": list(search.shapes), "candidates": candidates,
        "measured": measured,
    }  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
