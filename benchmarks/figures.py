"""Draw figures of the pages from their records: python -m benchmarks.figures [--folder docs/figures]

demo.svg is drawn by benchmarks.demo, and llama-65b-predicted.svg by draftlab predict --plot (docs/paper.md).
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.pages import RECORDS, ROOT
from draftlab.results.plots import Panel, save_panels

Records = Callable[[str], Any]  # content of a record, by its name
NO_DRAFT = (1.0, "no draft")
CUTS = {
    "default": "the default",
    "even": "layers at even distances",
    "joint-3e-5": "joint masks",
    "masks": "masks, weights frozen",
    "first": "first layers and neurons",
    "no-refit": "without the refit",
    "random": "random",
}
DRAFTERS = {"plain@int8": "ten-layer draft", "latest-lookup": "prompt lookup"}


def depth(name: str, modes: dict[str, str]) -> Callable[[Records], list[Panel]]:
    """Return a function that draws a depth sweep. modes: Names of the record's modes."""

    def panels(record: Records) -> list[Panel]:
        sweep = record(name)
        points = {shown: [(row["layers"], row["ms"]) for row in sweep["rows"][mode]] for mode, shown in modes.items()}
        title = f"350M parameters in all, {sweep['device'].replace('(R)', '')}"
        return [Panel(title=title, x="layers", y="ms per pass over one token", series=points)]

    return panels


def batches(record: Records) -> list[Panel]:
    rows = record("batches")["batches"].items()
    points = {
        shown: sorted((row["batch"], row["by_k"]["2"]) for key, row in rows if key.startswith(name))
        for name, shown in DRAFTERS.items()
    }
    return [Panel(title="SmolLM2, K = 2", x="prompts at once", y="speed-up", series=points, level=NO_DRAFT)]


def accuracy(record: Records) -> list[Panel]:
    """The drafts of tiny: speed-up against accuracy, and against latency."""
    rows = record("accuracy_study")["drafts"].values()
    columns = {
        "code_next_line acc": "accuracy in choosing the next line",
        "draft pass over target's": "draft pass / target pass",
    }
    return [
        Panel(
            title=f"{len(rows)} drafts of tiny",
            x=shown,
            y="speed-up",
            series={"drafts": [(row[column], row["speed-up"]) for row in rows]},
            lines={"drafts": []},
            level=NO_DRAFT,
        )
        for column, shown in columns.items()
    ]


def deep_or_wide(record: Records) -> list[Panel]:
    """Drafts of SmolLM2 with equal parameters in their layers, and drafts of the whole width."""
    live = record("depth")["live"]
    kinds = {
        "equal parameters in layers": ["5x576", "8x384", "12x256"],
        "whole width": ["2x576", "7x576", "10x576"],
    }
    points = {
        kind: [(live[name]["layers"], live[name]["speedup"][0]) for name in names] for kind, names in kinds.items()
    }
    bars = {
        kind: [(live[name]["layers"], value) for name in names for value in (*live[name]["speedup"][1:], math.nan)]
        for kind, names in kinds.items()
    }
    return [
        Panel(
            title="SmolLM2, best K",
            x="layers",
            y="speed-up",
            series=points,
            lines=bars,
            bottom=0.7,
            level=NO_DRAFT,
        )
    ]


def cuts(record: Records) -> list[Panel]:
    drafts = record("pruning")["drafts"]
    points = {
        shown: [(float(x), drafts[name][key]) for x, name in enumerate(CUTS)]
        for shown, key in (("after the cut", "acceptance_before"), ("distilled", "acceptance"))
    }
    return [
        Panel(
            title="five-layer drafts of SmolLM2",
            x="",
            y="held-out acceptance",
            series=points,
            names=list(CUTS.values()),
            lines={name: [] for name in points},
        )
    ]


FIGURES: dict[str, Callable[[Records], list[Panel]]] = {
    "depth-sweep-cpu": depth("depth_sweep", {"eager": "eager", "compiled": "native"}),
    "depth-sweep-h200": depth("h200_sweep", {"eager": "eager", "graphs": "CUDA graphs"}),
    "smollm2-batch": batches,
    "smollm2-depth": deep_or_wide,
    "smollm2-pruning": cuts,
    "tiny-accuracy": accuracy,
}


def read(name: str) -> Any:
    return json.loads(RECORDS[name].read_text())


def main(
    folder: Annotated[Path, typer.Option(help="Folder to write to.")] = ROOT / "docs" / "figures",
) -> None:
    for name, panels in FIGURES.items():
        save_panels(folder / f"{name}.svg", panels(read))


if __name__ == "__main__":
    typer.run(main)
