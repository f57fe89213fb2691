"""What `make demo` measured, as one JSON file with the processor's name: python -m benchmarks.demo [FOLDER].

FOLDER: where the demo wrote, runs/quickstart if left out.
"""

import json
import sys
from pathlib import Path

from draftlab import provenance
from draftlab.results.score import Score, read_score


def main(folder: Path = Path("runs/quickstart")) -> None:
    scores = [read_score(file) for file in sorted((folder / "score").glob("*/score.json"))]
    folders = [*sorted(folder.glob("pruned/*")), *sorted(folder.glob("distilled/*")), folder / "score"]
    made = {str(path.relative_to(folder)): provenance.read_record(path) for path in folders}
    first = scores[0]
    assert first.environment is not None
    found = {
        "command": "make demo",
        "processor": first.environment.processor,
        "mode": first.conditions.mode,
        "dtype": first.conditions.dtype,
        "threads": first.conditions.threads,
        "seconds": {name: record.seconds for name, record in made.items() if record is not None},
        "drafts": {score.name: _row(score) for score in scores},
        "acceptance": {name: _learnt(record) for name, record in made.items() if record and "distilled" in name},
    }
    print(json.dumps(found, indent=1))


def _row(score: Score) -> dict[str, object]:
    k, gain, shape = score.best_k, score.gain, score.draft.shape
    return {
        "parameters": shape.params() if shape else None,
        "pass_ms": score.draft_step_ms,
        "target_pass_ms": score.target.latency[0].median_ms,
        "k": k,
        "tokens_per_target_pass": score.tokens_per_pass(k),
        "tokens_per_second": score.output_tps(k),
        "plain_tokens_per_second": score.output_tps(0),
        "speedup": [gain.value, gain.low, gain.high],  # of a K chosen on other prompts
    }


def _learnt(record: provenance.Record) -> dict[str, object]:
    """Return held-out acceptance before and after distilling, and the tokens that took."""
    before, after = record.notes["before"], record.notes["after"]
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    return {"before": before["acceptance"], "after": after["acceptance"], "tokens": record.notes["tokens"]}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
