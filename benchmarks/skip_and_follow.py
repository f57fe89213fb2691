"""Layer skipping and a draft that follows its traffic, on SmolLM2: python -m benchmarks.skip_and_follow FOLDER

FOLDER is the folder in which recipes/smollm2-siblings.yaml ran. Finished parts are kept there, under runs/skipped. The
last line is one JSON object.

layer_skip: The target drafts with some of its layers, which a search over its greedy answers to 33 questions chose;
prompt lookup is timed in turn with it. Questions of the score may be among the 33, which flatters layer skipping.
follow_traffic: Tokens per target pass of the stock draft of 15 layers, and of the same draft after
examples/follow_traffic.py trained it on earlier answers, both judged on newer answers; kept: whether the script keeps
the new draft.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import bounds, environment
from benchmarks.smollm2 import row, scores, settings
from draftlab.commands import COMMANDS
from draftlab.provenance import read_record
from draftlab.target_outputs.replay import read_replay, rows_of
from examples.follow_traffic import JUDGED_K, follow

TARGET = "models/smollm2-135m-instruct"
SKIP = "layer-skip:outputs=runs/siblings/greedy"
PROMPTS, LENGTH, K = 12, 64, "1-3"
STEPS, BATCH = 14, 8  # of the training that follows the traffic, as in the recipe


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of recipes/smollm2-siblings.yaml.")],
) -> None:
    os.chdir(folder)
    runs = Path("runs/skipped")
    found = {
        "layer_skip": part(runs / "score.json", scored),
        "follow_traffic": part(runs / "follow.json", followed),
    }
    print(json.dumps({"benchmark": "skip_and_follow"} | found | environment(1)))


def part(file: Path, measure: Any) -> Any:
    """Return what the file holds, which is measured first if the file is missing."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        value = measure(file.parent)
        file.write_text(json.dumps(value))
    return json.loads(file.read_text())


def scored(runs: Path) -> dict[str, Any]:
    COMMANDS["score"](
        target=TARGET, drafter=[SKIP, "prompt-lookup"], prompt_file=Path("questions.jsonl"),
        num_prompts=PROMPTS, max_new_tokens=LENGTH, k=K, repeats=1, dtype="bfloat16", threads=1,
        out=runs / "score",
    )  # fmt: skip
    found = scores(runs / "score")
    return {"settings": settings(found)} | {score.name: row(score) for score in found}


def followed(runs: Path) -> dict[str, Any]:
    for at, name in enumerate(("answers", "greedy")):
        place = runs / "traffic" / f"{at}-{name}"
        place.parent.mkdir(exist_ok=True)
        if not place.exists():
            shutil.copytree(Path("runs/siblings") / name, place)
    stock, new = Path("runs/siblings/stock/15"), runs / "followed"
    kept = follow(runs / "traffic", stock, new, steps=STEPS, batch_size=BATCH, eval_steps=STEPS)
    record = read_record(new)
    assert record is not None
    judged = {}
    for name in (stock.name, new.name):
        replay = read_replay(new.with_name(f"{new.name}-judged") / name)
        judged[name] = bounds(rows_of(replay, [int(JUDGED_K)])[0].tokens_per_pass)
    return {"kept": kept == new, "tokens_per_pass": judged, "notes": record.notes}


if __name__ == "__main__":
    typer.run(main)
