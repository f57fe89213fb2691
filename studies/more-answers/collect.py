"""How far more answers of the target train a draft: python -m benchmarks.learning_curve FOLDER

FOLDER is the folder in which recipes/smollm2-published.yaml ran. The last line is one JSON object.

drafts: The cut, and the draft after each store of answers. tokens: Tokens of answers that the draft has been trained
on. acceptance: On the held-out answers of the last store in its training. tokens_per_pass: Tokens per target pass on
the target's greedy answers to the questions, by K, [value, low, high] over the texts. seconds: Of training, on one
core. answers: Tokens of each store, and the seconds in which the target wrote them on one core.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import environment
from benchmarks.sheared import recorded
from benchmarks.smollm2_studies import interval
from draftlab.target_outputs.replay import read_replay

KS = 1, 3, 5


def main(folder: Annotated[Path, typer.Argument(help="Folder in which the recipe ran.")]) -> None:
    runs = folder / "runs"
    places = sorted((runs / "distilled").iterdir(), key=lambda place: int(place.name))
    found: dict[str, Any] = {"drafts": [], "answers": []}
    tokens = 0
    for place in places:
        settings, notes, seconds = recorded(place)
        if not tokens:
            found["drafts"].append(
                row(runs, Path(settings["draft"]).name, 0, notes["before"]["acceptance"])
            )
        tokens += notes["tokens"]
        entry = row(runs, place.name, tokens, notes["after"]["acceptance"])
        how = {name: settings[name] for name in ("lr", "loss")}
        found["drafts"].append(entry | how | {"seconds": seconds})
        answers, built, written = recorded(folder / settings["outputs"])
        found["answers"].append(
            {"tokens": built["tokens"], "temperature": answers["temperature"], "seconds": written}
        )
    print(json.dumps(found | {"benchmark": "learning_curve"} | environment(1)))


def row(runs: Path, name: str, tokens: int, acceptance: float) -> dict[str, Any]:
    """Return the acceptance of a draft, and its tokens per pass by K."""
    replay = read_replay(runs / "replay" / name)
    lengths = {}
    for k in KS:
        counts = replay.counts(k)
        lengths[k] = interval(np.stack([counts.tokens, counts.passes], 1))
    return {"name": name, "tokens": tokens, "acceptance": acceptance, "tokens_per_pass": lengths}


if __name__ == "__main__":
    typer.run(main)
