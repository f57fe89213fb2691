"""What `make demo` measured, as one JSON file with the processor's name: python -m benchmarks.demo [FOLDER].

FOLDER: where the demo wrote, runs/quickstart if left out.
"""

import json
import sys
from pathlib import Path

from draftlab import provenance
from draftlab.record import Score, read_score


def main(folder: Path = Path("runs/quickstart")) -> None:
    scores = [read_score(file) for file in sorted((folder / "score").glob("*/score.json"))]
    made = {str(d.relative_to(folder)): provenance.read_record(d) for d in sorted(folder.glob("*/*")) + [folder / "score"]}
    first = scores[0]
    found = {
        "command": "make demo",
        "processor": first.environment.processor,
        "mode": first.conditions.mode,
        "dtype": first.conditions.dtype,
        "threads": first.conditions.threads,
        "seconds": {name: record.seconds for name, record in made.items() if record is not None},
        "drafts": {score.name: _row(score) for score in scores},
    }
    print(json.dumps(found, indent=1))


def _row(score: Score) -> dict[str, object]:
    k, gain = score.best_k, score.gain
    return {
        "k": k,
        "speedup": [gain.value, gain.low, gain.high],
        "tokens_per_target_pass": score.acceptance(k).mean_acceptance_length,
    }


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
