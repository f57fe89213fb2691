"""The paper's studies on SmolLM2, collected: python -m benchmarks.smollm2_studies FOLDER

FOLDER is that of python -m benchmarks.smollm2, after `draftlab run` of recipes/smollm2-depth.yaml, -losses.yaml,
-pruning.yaml, -search.yaml, -accuracy.yaml and -batch.yaml there; what was not run is null.
The last line is one JSON object; --figures writes the figures.
"""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import environment
from benchmarks.accuracy_study import correlation, panel
from draftlab.intervals import ratio_interval
from draftlab.latency.cost_model import read_profile
from draftlab.provenance import read_record
from draftlab.results.accuracy import Accuracies
from draftlab.results.plots import Panel, save_figure
from draftlab.results.score import Score, read_score
from draftlab.search.schedule import read_search
from draftlab.target_outputs.replay import Drafting, read_replay

Rows = dict[str, dict[str, Any]]
DRAFTED = range(1, 7)
DRAWN = ("next_sentence acc_norm", "which_article acc", "local_gsm8k_answer bits_per_byte")
K, LENGTH = 3, "tokens per target pass"  # beside accuracy


def main(
    folder: Annotated[Path, typer.Argument(help="Where the recipes ran.")] = Path("runs/smollm2-study"),
    figures: Annotated[Path | None, typer.Option(help="Folder for the figures.")] = None,
) -> None:
    runs = folder / "runs"
    depth, losses, pruning = (drafts(runs / name) for name in ("depth", "losses", "pruning"))
    found = {
        "depth": depth
        and {
            "drafts": depth,
            "live": live(runs / "depth" / "score"),
            "passes": {mode: passes(runs / "depth" / mode) for mode in ("eager", "native")},
        },
        "losses": by_seed({name: row for name, row in losses.items() if not name.startswith("texts/")}) or None,
        "texts": by_seed({name: row for name, row in losses.items() if name.startswith("texts/")}) or None,
        "pruning": pruning or None,
        "search": {kind: searched(runs / "search" / kind) for kind in ("plain", "parallel")},
        "batches": live(runs / "batch"),
        "passes": passes(runs / "cache"),
        "accuracy": accuracy(runs / "accuracy", {**depth, **pruning}),
    }
    if figures is not None:
        draw(figures, found)
    print(json.dumps(found | {"benchmark": "smollm2_studies"} | environment(1)))


def drafts(folder: Path) -> Rows:
    """Return what is known of each draft that a study replayed, by its folder's name."""
    rows: Rows = {}
    for file in sorted(folder.glob("replay/*/replay.json")):
        replay = read_replay(file.parent)
        place = next(path for path in (folder / replay.draft, folder.parent / "texts" / replay.draft) if path.exists())
        record = read_record(place)
        assert record is not None
        notes: Any = record.notes
        cut = read_record(folder / "cut" / place.name)
        counts = {k: replay.counts(Drafting(k=k)) for k in DRAFTED}
        pairs = {k: np.stack([c.tokens, c.passes], 1) for k, c in counts.items()}
        rows[str(place.relative_to(folder.parent)).removeprefix(f"{folder.name}/")] = {
            "acceptance_before": notes["before"]["acceptance"],
            "acceptance": notes["after"]["acceptance"],
            "tokens": notes["tokens"],
            "seconds": notes["seconds"],
            "cut_seconds": cut and cut.seconds,
            "tokens_per_pass": {k: interval(each) for k, each in pairs.items()},
            "by_category": {
                name: interval(pairs[K][replay.categories == name]) for name in sorted(set(replay.categories))
            },
        }
    return rows


def interval(pairs: np.ndarray) -> list[float]:
    found = ratio_interval(pairs)
    return [found.value, found.low, found.high]


def live(folder: Path) -> Rows | None:
    """Return speed-ups with intervals and the latency of a pass, by draft."""
    files = sorted(folder.glob("*/score.json"))
    return {file.parent.name: timed(read_score(file)) for file in files} or None


def passes(folder: Path) -> Rows | None:
    """Return the milliseconds of passes over one token, by model, then by batch and context."""
    profiles = [read_profile(file) for file in sorted(folder.glob("*.yaml"))]
    return {
        p.name: {
            "layers": p.shape.layers if p.shape else None,
            "kv_bytes_per_token": p.shape.kv_bytes_per_token() if p.shape else None,
            "ms": {f"{at.batch} x {at.context}": at.median_ms for at in p.forward if at.width == 1},
        }
        for p in profiles
    } or None


def searched(folder: Path) -> dict[str, Any] | None:
    """Return what a search tried on its last rung, best first, and what it measured."""
    if not (folder / "search.json").exists():
        return None
    search = read_search(folder)
    return {
        "seconds": search.spent_seconds,
        "rungs": [
            {"steps": rung.steps, "trials": [t.model_dump() for t in rung.best_first()]} for rung in search.rungs
        ],
        "measured": [each.model_dump() for each in search.measured],
    }


def timed(score: Score) -> dict[str, Any]:
    gain, shape = score.best_k_speedup, score.draft.shape
    return {
        "batch": score.conditions.batch,
        "layers": shape.layers if shape else None,
        "parameters": shape.params() if shape else None,
        "pass_ms": score.draft_ms,
        "target_pass_ms": score.target.latency[0].median_ms,
        "k": score.best_k,
        "speedup": [gain.value, gain.low, gain.high],
        "by_k": {k: score.speedup_value(k) for k in sorted(score.speculative)},
        "doubt": score.doubt,
    }


def by_seed(rows: Rows) -> Rows:
    """Return mean and spread over seeds, of runs named NAME-SEED."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, row in rows.items():
        groups[name.rpartition("-")[0]].append(row)
    return {name: summary(group) for name, group in groups.items()}


def summary(group: list[dict[str, Any]]) -> dict[str, Any]:
    values = {
        "acceptance": [row["acceptance"] for row in group],
        "tokens_per_pass": [row["tokens_per_pass"][K][0] for row in group],
    }
    spread = {name: statistics.stdev(v) if len(v) > 1 else None for name, v in values.items()}
    return {
        "seeds": len(group),
        "tokens": group[0]["tokens"],
        "seconds": [row["seconds"] for row in group],
        **{name: {"mean": statistics.mean(v), "sd": spread[name]} for name, v in values.items()},
    }


def accuracy(folder: Path, rows: Rows) -> dict[str, Any] | None:
    """Return each draft's accuracies beside its tokens per pass, and their correlations over drafts."""
    if not folder.exists():
        return None
    known = Accuracies([folder])
    drafts = {
        name: {f"{r.task} {r.metric}": r.value for r in known.of(Path(name).name, None)}
        | {LENGTH: row["tokens_per_pass"][K][0]}
        for name, row in rows.items()
    }
    metrics = [name for name in next(iter(drafts.values())) if name != LENGTH]
    column = {name: np.array([each[name] for each in drafts.values()]) for name in (*metrics, LENGTH)}
    found = {metric: correlation(column[metric], column[LENGTH]) for metric in metrics}
    return {"k": K, "drafts": drafts, "correlations": found}


def draw(folder: Path, found: dict[str, Any]) -> None:
    """Write one figure for each study that was run."""
    if found["depth"] and found["depth"]["live"]:
        drafts, timed = found["depth"]["drafts"], found["depth"]["live"]
        kinds = {"whole width, 576": [n for n in timed if "x576" in n], "16M in blocks": ["5x576", "8x384", "12x256"]}
        y = {
            "tokens per target pass, K = 3": lambda n: drafts[n]["tokens_per_pass"][K][0],
            "ms of a pass": lambda n: timed[n]["pass_ms"],
            "speed-up": lambda n: timed[n]["speedup"][0],
        }
        panels = [
            Panel(
                x="layers", y=label,
                series={kind: sorted((timed[n]["layers"], value(n)) for n in names) for kind, names in kinds.items()},
            )
            for label, value in y.items()
        ]  # fmt: skip
        save_figure(folder / "smollm2-depth.svg", panels)
    rates(folder / "smollm2-losses.svg", found["losses"])
    if found["accuracy"]:
        rows = list(found["accuracy"]["drafts"].values())
        columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        panels = [panel(columns, metric, LENGTH) for metric in DRAWN]
        save_figure(folder / "smollm2-accuracy.svg", panels)


def rates(path: Path, rows: Rows | None) -> None:
    """Draw the acceptance of each loss by its rate. rows: by LOSS-RATE."""
    if not rows:
        return
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, row in rows.items():
        loss, _, rate = name.rpartition("-")
        series[loss].append((float(rate), row["acceptance"]["mean"]))
    save_figure(
        path, [Panel(x="rate of Muon", y="held-out acceptance", series={k: sorted(v) for k, v in series.items()})]
    )


if __name__ == "__main__":
    typer.run(main)
