"""Predict which draft shape is fastest next to targets of different cost: python -m benchmarks.shapes_at_cost

An expansion of SmolLM2 writes SmolLM2's text (expand.py), so that a draft has the same acceptance with it. From
benchmarks/results the script takes the tokens per target pass of the drafts of recipes/smollm2-depth.yaml (equal
training) and the milliseconds of their passes, the milliseconds of a pass of SmolLM2 and of its expansions, and the
time of a pass over several tokens relative to a pass over one token. Nothing is measured, and prompts are left out.

The last line is one JSON object: for each target, for each draft the best K and the predicted speed-up of TPOT, tokens
per pass divided by the time of a step in plain passes.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import environment

RESULTS = Path(__file__).parent / "results"
CONTEXT = "1 x 256"  # batch and cached tokens of the drafts' passes
# key of the scores of each target in published_draft.json, and the record of its passes by width
TARGETS = {"135m": ("greedy", "passes"), "1.3b": ("1.3b", "passes_3b"), "3b": ("3b", "passes_3b")}


def main() -> None:
    depth = result("smollm2_studies")["depth"]
    scores = result("published_draft")
    found: dict[str, dict[str, Any]] = {}
    for size, (score, passes) in TARGETS.items():
        target_ms = next(iter(scores[score].values()))["target_pass_ms"]
        widths = result(passes)["over_width_1"]["native"]
        rows = {
            name: fastest(
                draft["tokens_per_pass"],
                depth["passes"]["native"][name]["ms"][CONTEXT] / target_ms,
                widths,
            )
            for name, draft in depth["drafts"].items()
        }
        best = max(rows, key=lambda name: rows[name]["speedup"])
        found[size] = {"target_pass_ms": target_ms, "best": best, "drafts": rows}
    print(json.dumps({"benchmark": "shapes_at_cost", "targets": found} | environment(1)))


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def fastest(
    tokens_per_pass: dict[str, list[float]], draft: float, widths: dict[str, float]
) -> dict[str, Any]:
    """Return the K with the largest predicted speed-up.

    tokens_per_pass: By K, [value, low, high]. draft: Time of a draft pass in plain passes of the target. widths: Time
    of a target pass by its number of tokens, in plain passes.
    """
    known = sorted(map(int, widths))
    times = [widths[str(width)] for width in known]
    rows = [
        {
            "k": int(k),
            "speedup": tokens / (float(np.interp(int(k) + 1, known, times)) + int(k) * draft),
        }
        for k, (tokens, _, _) in tokens_per_pass.items()
    ]
    return max(rows, key=lambda row: row["speedup"])


if __name__ == "__main__":
    main()
