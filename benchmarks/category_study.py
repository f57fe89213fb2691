"""The best draft and K for each category of text, collected from the scores of recipes/study-categories.yaml."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.figures import save_figure
from draftlab.results.plots import Panel
from draftlab.results.ranking import category_rows
from draftlab.results.score import Score, read_score


def main(
    scores: Annotated[
        Path, typer.Argument(help="Folder of scores with the same target and prompts.")
    ],
    plot: Annotated[Path | None, typer.Option(help="Figure to write, .svg or .png.")] = None,
) -> None:
    read = {score.name: score for score in map(read_score, sorted(scores.rglob("score.json")))}
    first = next(iter(read.values()))
    drafts = {name: _figures(score) for name, score in read.items()}
    if plot is not None:
        series = {
            name: [(float(k), v) for k, v in of["speedup"].items()] for name, of in drafts.items()
        }
        save_figure(
            plot, [Panel(x="drafted tokens, K", y="speed-up over plain decoding", series=series)]
        )
    same = {
        "conditions": first.conditions.model_dump(),
        "versions": first.versions,
        "created": first.created,
    }
    print(json.dumps({"benchmark": "category_study", "drafts": drafts} | same))


def _figures(score: Score) -> dict[str, Any]:
    return {
        "speedup": {k: score.speedup_value(k) for k in score.speculative},
        "tokens_per_target_pass": {k: score.tokens_per_pass(k) for k in score.speculative},
        "categories": category_rows(score),
        "distinct_4grams": score.distinct_4grams,
    }


if __name__ == "__main__":
    typer.run(main)
