"""Masks as in Sheared LLaMA beside the default cut, for equal total compute: python -m benchmarks.sheared FOLDER

FOLDER is the folder in which recipes/smollm2-sheared.yaml ran. The last line is one JSON object.

masks, default: Results of the two ways to cut, with all seeds. acceptance_cut, acceptance: On held-out text, of the cut
and of the distilled draft. tokens_per_pass: Tokens per target pass on greedy answers at K = 3, [value, low, high] over
the texts. seconds: Of the cut and of the distillation, on one core. sweep: The acceptance of cuts by masks, by rate.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import environment
from benchmarks.smollm2_studies import interval, over_seeds
from draftlab.provenance import read_record
from draftlab.target_outputs.replay import read_replay

K = 3
WAYS = "masks", "default"


def main(folder: Annotated[Path, typer.Argument(help="Folder in which the recipe ran.")]) -> None:
    study = folder / "runs" / "sheared"
    found: dict[str, Any] = {way: summary(study, way) for way in WAYS}
    sweep = [*study.glob("cut/rate-*"), study / "cut" / "masks-0"]
    found["sweep"] = {
        f"{config['lr']:g}": notes["agreement"]["acceptance"]
        for config, notes, _ in map(recorded, sweep)
    }
    settings, _, _ = recorded(study / "cut" / "masks-0")
    found["settings"] = {
        name: settings[name]
        for name in ("layers", "width", "steps", "batch_size", "seq_len", "lr", "reweigh_steps")
    } | {"k": K}
    print(json.dumps(found | {"benchmark": "sheared"} | environment(1)))


def summary(study: Path, way: str) -> dict[str, Any]:
    """Return the results of all seeds of a way to cut, with their means and deviations."""
    seeds = []
    for place in sorted((study / "trained").glob(f"{way}-*")):
        _, cut, cut_seconds = recorded(study / "cut" / place.name)
        settings, notes, trained_seconds = recorded(place)
        counts = read_replay(study / "replay" / place.name).counts(K)
        seeds.append(
            {
                "seed": settings["seed"],
                "acceptance_cut": cut["agreement"]["acceptance"],
                "acceptance": notes["after"]["acceptance"],
                "tokens": notes["tokens"],
                "cut_seconds": cut_seconds,
                "seconds": cut_seconds + trained_seconds,
                "tokens_per_pass": interval(np.stack([counts.tokens, counts.passes], 1)),
            }
        )
    means = {
        name: over_seeds([each[name] for each in seeds])
        for name in ("acceptance_cut", "acceptance", "cut_seconds", "seconds")
    }
    lengths = over_seeds([each["tokens_per_pass"][0] for each in seeds])
    return {"seeds": seeds, **means, "tokens_per_pass": lengths}


def recorded(place: Path) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Return the settings, the notes and the seconds in the record of an output."""
    record = read_record(place)
    assert record is not None
    notes: Any = record.notes
    return record.config, notes, record.worked_seconds


if __name__ == "__main__":
    typer.run(main)
