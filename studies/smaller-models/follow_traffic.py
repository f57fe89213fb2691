"""A draft of SmolLM2 that follows its traffic: python -m benchmarks.follow_traffic FOLDER

FOLDER is the folder in which recipes/smollm2-siblings.yaml ran. examples/follow_traffic.py trains its stock draft of 15
layers on earlier answers of the target, and judges both drafts on newer answers. The last line is one JSON object.

tokens_per_pass: Tokens per target pass on the newer answers, stock and trained, [value, low, high] over texts. kept:
Whether the script keeps the trained draft.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import bounds, environment
from draftlab.provenance import read_record
from draftlab.target_outputs.replay import read_replay, rows_of
from examples.follow_traffic import JUDGED_K, follow

STEPS, BATCH = 14, 8  # of the training, as in the recipe


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of recipes/smollm2-siblings.yaml.")],
) -> None:
    os.chdir(folder)
    for at, name in enumerate(("answers", "greedy")):
        place = Path("runs/traffic") / f"{at}-{name}"
        if not place.exists():
            shutil.copytree(Path("runs/siblings") / name, place)
    stock, new = Path("runs/siblings/stock/15"), Path("runs/followed")
    kept = follow(Path("runs/traffic"), stock, new, steps=STEPS, batch_size=BATCH, eval_steps=STEPS)
    record = read_record(new)
    assert record is not None
    judged = {}
    for name, draft in (("stock", stock), ("trained", new)):
        replay = read_replay(new.with_name(f"{new.name}-judged") / draft.name)
        judged[name] = bounds(rows_of(replay, [int(JUDGED_K)])[0].tokens_per_pass)
    found = {"kept": kept == new, "tokens_per_pass": judged, "k": int(JUDGED_K)}
    trained = {"tokens": record.notes["tokens"], "cpu_seconds": record.notes["cpu_seconds"]}
    print(json.dumps({"benchmark": "follow_traffic"} | found | trained | environment(1)))


if __name__ == "__main__":
    typer.run(main)
