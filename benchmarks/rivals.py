"""Compare kinds of drafts of SmolLM2 after equal training, and adaptive K with fixed K: python -m benchmarks.rivals

FOLDER is the folder in which recipes/smollm2-published.yaml and then recipes/smollm2-rivals.yaml ran, or with --seeds
recipes/smollm2-rival-seeds.yaml, which trains each kind for a shorter time with three seeds. The last line is one JSON
object. Each row has the figures of a drafter's score on greedy requests, over plain decoding with the same weights of
the target.

over_draft, over_fallback: Speed-up of whole requests divided by that of the draft after ten stores of answers at the
best fixed K, alone and after prompt lookup, each at its own best K, as [value, low, high] of a paired bootstrap over
requests.
training: What the draft or head learnt from: tokens of answers, CPU seconds of all its distillations on one core, and
held-out acceptance after the last of them. A draft's distillations include those of the drafts that it began as.

With --seeds, the rows are those of a kind by seed, and over_draft compares drafts of the same seed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import bounds, drafting_row, environment
from benchmarks.published_draft import over_same_weights
from benchmarks.sheared import recorded
from benchmarks.smollm2 import scores, settings
from draftlab.provenance import read_record
from draftlab.results.ranking import speedup_ratio
from draftlab.results.score import Score

DRAFT, FALLBACK = "10@int8", "fallback:draft=runs_distilled_10,draft_tokens=3@int8"
# the directory in the folder's runs of each draft or head that was trained
TRAINED = {
    DRAFT: "distilled/10",
    "parallel-2@int8": "rivals/parallel-2",
    "eagle:heads=runs_rivals_eagle-2": "rivals/eagle-2",
}


SEEDS = "0", "1", "2"
# by kind, the name of its score and the directory of its training, for a seed
OF_SEED = {
    "draft": ("draft-{}@int8", "draft-{}"),
    "parallel": ("parallel-{}@int8", "parallel-{}"),
    "eagle": ("eagle:heads=runs_eagle-{}", "eagle-{}"),
}


def main(
    folder: Annotated[Path, typer.Argument(help="Folder in which the recipes ran.")],
    seeds: Annotated[
        bool, typer.Option("--seeds", help="Compare the kinds on three seeds.")
    ] = False,
) -> None:
    scored = scores(folder / ("runs/score" if seeds else "runs/rivals/score"))
    by_name = {score.name: score for score in scored}
    rows = by_seed(folder, by_name) if seeds else by_drafter(folder, by_name)
    name = "rival_seeds" if seeds else "rivals"
    print(
        json.dumps(
            {"benchmark": name, "drafters": rows, "settings": settings(scored)} | environment(1)
        )
    )


def by_drafter(folder: Path, scored: Mapping[str, Score]) -> dict[str, Any]:
    rows = {}
    for name, score in scored.items():
        rows[name] = row(score, scored[DRAFT])
        rows[name]["over_fallback"] = bounds(speedup_ratio(score, scored[FALLBACK]))
    for name, place in TRAINED.items():
        rows[name]["training"] = training(folder, folder / "runs" / place)
    return rows


def by_seed(folder: Path, scored: Mapping[str, Score]) -> dict[str, Any]:
    found: dict[str, Any] = {kind: {} for kind in OF_SEED}
    for kind, (name, place) in OF_SEED.items():
        for seed in SEEDS:
            draft = scored[OF_SEED["draft"][0].format(seed)]
            learnt = training(folder, folder / "runs" / place.format(seed))
            found[kind][seed] = row(scored[name.format(seed)], draft) | {"training": learnt}
    return found


def row(score: Score, draft: Score) -> dict[str, Any]:
    lengths = {k: score.tokens_per_pass(k) for k in sorted(score.speculative)}
    over = bounds(speedup_ratio(score, draft))
    return drafting_row(over_same_weights(score)) | {
        "tokens_per_pass_by_k": lengths,
        "over_draft": over,
    }


def training(folder: Path, place: Path) -> dict[str, Any]:
    """Return the tokens and CPU seconds of a draft's distillations, and its held-out acceptance after the last."""
    _, last, _ = recorded(place)
    tokens, seconds = 0, 0.0
    draft: Path | None = place
    while draft and (record := read_record(draft)) and record.command == "distill":
        config, notes, _ = recorded(draft)
        tokens, seconds = tokens + notes["tokens"], seconds + notes["cpu_seconds"]
        draft = folder / config["draft"] if config["draft"] else None
    return {"tokens": tokens, "cpu_seconds": seconds, "acceptance": last["after"]["acceptance"]}


if __name__ == "__main__":
    typer.run(main)
