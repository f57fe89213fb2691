"""Collect what `make demo` measured: python -m benchmarks.demo [--folder runs/quickstart] [--figure FILE.svg]

The command prints one JSON object. Machine and date in it are those of this command, so run it on the machine and on
the day of the demo. --figure also draws the speed-ups. With --read FILE.json, the figure is of an earlier result.
"""

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks import drafting_row, environment
from draftlab.results.score import read_score
from draftlab.runs import provenance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--read", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    result = json.loads(options.read.read_text()) if options.read else measured(options.folder)
    if options.figure:
        draw(result, options.figure)
    print(json.dumps(result, indent=1))


def measured(folder: Path) -> dict[str, Any]:
    """Return the results of a finished demo."""
    scores = [read_score(file) for file in sorted((folder / "score").glob("*/score.json"))]
    folders = [
        *sorted(folder.glob("pruned/*")),
        *sorted(folder.glob("distilled/*")),
        folder / "score",
    ]
    records = {str(path.relative_to(folder)): provenance.read_record(path) for path in folders}
    first = scores[0]
    assert first.conditions.threads is not None  # only scores of servers have none
    return {
        "command": "make demo",
        "mode": first.conditions.mode,
        "dtype": first.conditions.dtype,
        "seconds": {name: record.seconds for name, record in records.items() if record is not None},
        "drafts": {score.name: drafting_row(score) for score in scores},
        "acceptance": {name: _learnt(record) for name, record in records.items() if record and "distilled" in name},
    } | environment(first.conditions.threads)


LABEL_WIDTH = 52  # characters
NAMES = {"fallback": "prompt lookup followed by 3 x 128", "latest-lookup": "prompt lookup"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the speed-up of each drafter with its 95 % interval."""
    rows = sorted(result["drafts"].items(), key=lambda row: row[1]["speedup"][0])
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.subplots()
    for place, (_, row) in enumerate(rows):
        value, low, high = row["speedup"]
        axes.barh(place, value, color="#4c78a8", height=0.6)
        axes.errorbar(
            value,
            place,
            xerr=[[value - low], [high - value]],
            color="black",
            capsize=3,
            linewidth=1,
        )
        axes.text(
            0.03,
            place,
            f"{value:.2f} x   {row['tokens_per_second']:.0f} tokens/s",
            va="center",
            color="white",
        )
    plain = rows[0][1]["plain_tokens_per_second"]
    axes.axvline(1, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(
        range(len(rows)),
        [NAMES.get(name, f"draft model {name.replace('x', ' x ')}") for name, _ in rows],
    )
    # wrapped, because names of processors may be wider than the figure
    label = textwrap.fill(
        f"dashed: plain decoding, {plain:.0f} tokens/s; seconds are CPU seconds of one thread of "
        f"{result['cpu'].partition(' (')[0]}",
        LABEL_WIDTH,
    )
    axes.set_xlabel(f"speed-up of whole requests, 95 % interval\n{label}")
    axes.spines[["top", "right"]].set_visible(False)
    with rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _learnt(record: provenance.Record) -> dict[str, object]:
    """Return held-out acceptance before and after distillation, and the number of training tokens."""
    before, after = record.notes["before"], record.notes["after"]
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    return {
        "before": before["acceptance"],
        "after": after["acceptance"],
        "tokens": record.notes["tokens"],
    }


if __name__ == "__main__":
    main()
