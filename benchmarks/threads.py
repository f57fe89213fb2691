"""What a second core gives a recipe: python -m benchmarks.threads FOLDER

A distillation from stored answers and the writing of answers, each by one and by two threads in turns, in the folder of
recipes/smollm2.yaml after it. The JSON on the last line has tokens per second of all repeats, and medians' ratios.
"""

import json
import os
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from benchmarks import environment
from draftlab.commands import COMMANDS
from draftlab.provenance import read_record

TARGET, DRAFT, ANSWERS, PROMPTS = (
    "models/smollm2-135m-instruct", "runs/pruned/10", "runs/answers", "prompts.jsonl",
)  # fmt: skip


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of the study.")],
    repeats: Annotated[int, typer.Option(help="Of each, by each number of threads.")] = 2,
    steps: Annotated[int, typer.Option(help="Of a training.")] = 6,
    prompts: Annotated[int, typer.Option(help="To answer.")] = 32,
) -> None:
    os.chdir(folder)
    distil = {"draft": DRAFT, "outputs": ANSWERS, "vocab": "16k", "steps": steps, "batch_size": 16, "save_steps": steps}
    write = {
        "use": "distill", "target": TARGET, "prompt_file": PROMPTS, "num_prompts": prompts, "max_new_tokens": 128,
        "temperature": 0.5, "batch_size": 16,
    }  # fmt: skip
    work: dict[str, dict[str, Any]] = {"distill": distil | {"eval_steps": steps}, "outputs build": write}
    rates: dict[str, dict[int, list[float]]] = {name: {1: [], 2: []} for name in work}
    for _ in range(repeats):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for name, settings in work.items():
                rates[name][threads].append(rate(name, settings))
    ratios = {name: median(by[2]) / median(by[1]) for name, by in rates.items()}
    print(json.dumps({"benchmark": "threads", "two_over_one": ratios, "tokens_per_second": rates} | environment(2)))


def rate(command: str, settings: dict[str, Any]) -> float:
    """Return the tokens per second of a run, loading included."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        COMMANDS[command](**settings, out=out)
        record = read_record(out)
        assert record is not None
        tokens = record.notes["tokens"]
        return float(str(tokens)) / record.seconds


if __name__ == "__main__":
    typer.run(main)
