"""Drafts of another vocabulary beside drafts cut from the target: python -m benchmarks.transplant [FOLDER]

FOLDER is that of python -m benchmarks.smollm2, after `draftlab run` of recipes/smollm2-depth.yaml and
smollm2-transplant.yaml there; what was not run is null. The last line is one JSON object.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import environment
from benchmarks.smollm2_studies import DRAFTED, interval
from draftlab.model import checkpoint
from draftlab.provenance import read_record
from draftlab.target_outputs.replay import Drafting, read_replay

TARGETS = ("tiny", "smollm2")
ROWS = ("ids", "copied", "from_pieces", "pieces_each", "at_mean", "roles")


def main(folder: Annotated[Path, typer.Argument(help="Where the recipe ran.")] = Path("runs/smollm2-study")) -> None:
    studies = {target: drafts(folder / "runs" / "transplant" / target) for target in TARGETS}
    print(json.dumps(studies | {"benchmark": "transplant"} | environment(1)))


def drafts(folder: Path) -> dict[str, Any] | None:
    """Return the sizes, the rows, the training and the tokens per pass of each draft that was replayed."""
    files = sorted(folder.glob("replay/*/replay.json"))
    places = [folder, folder.parents[1] / "depth"]
    rows = {}
    for file in files:
        name = file.parent.name
        rows[name] = row(next(place / name for place in places if (place / name).exists()), file.parent)
    return rows or None


def row(draft: Path, replayed: Path) -> dict[str, Any]:
    record, shape, replay = read_record(draft), checkpoint.read_shape(draft), read_replay(replayed)
    assert record is not None
    notes: Any = record.notes
    counts = {k: replay.counts(Drafting(k=k)) for k in DRAFTED}
    return {
        "shape": shape.describe(),
        "body_parameters": shape.body_params(),
        "head_ids": shape.draft_vocab or shape.vocab,
        "rows": {name: notes[name] for name in ROWS} if record.command == "transplant" else None,
        "trained_tokens": notes["tokens"] if record.command == "distill" else 0,
        "heldout_acceptance": [notes[name]["acceptance"] for name in ("before", "after")] if "after" in notes else None,
        "seconds": record.seconds,
        "texts": len(replay.categories),
        "tokens_per_pass": {k: interval(np.stack([c.tokens, c.passes], 1)) for k, c in counts.items()},
    }


if __name__ == "__main__":
    typer.run(main)
