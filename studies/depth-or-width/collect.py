"""Collect the results of the paper's studies, repeated on SmolLM2: python -m benchmarks.smollm2_studies FOLDER

FOLDER is the folder of benchmarks.smollm2, in which `draftlab run` has run recipes/smollm2-depth.yaml, -losses.yaml,
-pruning.yaml, -search.yaml, -accuracy.yaml and -batch.yaml. The last line is one JSON object, with null for studies
that were not run. --figures writes figures, too. To draw the figures of an earlier result, FOLDER may be a file with
this JSON object. --siblings collects only the study of recipes/smollm2-siblings.yaml, and --students only that of
recipes/smollm2-students.yaml.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import bounds, environment
from benchmarks.accuracy_study import correlation, panel
from benchmarks.figures import save_figure
from draftlab.intervals import ratio
from draftlab.latency.cost_model import CostModel, Profile, read_profile
from draftlab.latency.steps import expected_time, plain_ms, step_costs, steps
from draftlab.latency.workload import workload_of_replay
from draftlab.provenance import read_record
from draftlab.results.plots import Panel
from draftlab.results.score import Score, read_score
from draftlab.searching.schedule import read_search
from draftlab.target_outputs.replay import read_replay

Rows = dict[str, dict[str, Any]]
DRAFTED, DRAFTED_BY_SIBLINGS, STUDENTS_DRAFT = range(1, 7), range(1, 6), (1, 3)
DRAWN = ("next_sentence acc_norm", "which_article acc", "local_gsm8k_answer bits_per_byte")
K, LENGTH = 3, "tokens per target pass"  # accuracy is compared with this quantity
EQUAL = ["5x576", "8x384", "12x256"]  # shapes with 16M parameters in their blocks
CUTS = {
    "default": "the default", "pca": "untied, rotated", "even": "even layers", "no-refit": "no refit",
    "masks": "masks, weights frozen", "joint-3e-5": "joint masks, 3e-5", "joint-1e-4": "joint masks, 1e-4",
    "joint-1e-3": "joint masks, 1e-3", "joint-3e-3": "joint masks, 3e-3", "first": "first layers, neurons",
    "random": "random",
}  # fmt: skip
DRAFTERS = {"plain@int8": "plain draft", "latest-lookup": "prompt lookup"}


def main(
    folder: Annotated[
        Path, typer.Argument(help="Folder in which the recipes ran, or a file of results.")
    ] = Path("runs/smollm2-study"),
    figures: Annotated[Path | None, typer.Option(help="Folder for figures.")] = None,
    only_siblings: Annotated[
        bool, typer.Option("--siblings", help="Collect only the study of ready siblings.")
    ] = False,
    only_students: Annotated[
        bool, typer.Option("--students", help="Students of equal compute alone.")
    ] = False,
) -> None:
    if only_siblings:
        print(json.dumps(siblings(folder / "runs" / "siblings")))
        return
    if only_students:
        print(json.dumps(students(folder / "runs" / "students")))
        return
    found = json.loads(
        folder.read_text() if folder.is_file() else json.dumps(studies(folder / "runs"))
    )
    if figures is not None:
        draw(figures, found)
    print(json.dumps(found))


def studies(runs: Path) -> dict[str, Any]:
    """Return the results of all studies, with None for those that were not run."""
    depth, losses, pruning = (drafts(runs / name) for name in ("depth", "losses", "pruning"))
    return {
        "depth": depth
        and {
            "drafts": depth,
            "live": live(runs / "depth" / "score"),
            "passes": {mode: passes(runs / "depth" / mode) for mode in ("eager", "native")},
        },
        "losses": by_seed(
            {name: row for name, row in losses.items() if not name.startswith("texts/")}
        )
        or None,
        "texts": by_seed({name: row for name, row in losses.items() if name.startswith("texts/")})
        or None,
        "pruning": pruning or None,
        "search": {kind: searched(runs / "search" / kind) for kind in ("plain", "parallel")},
        "shape": {
            "live": live(runs / "score-shapes"),
            "trainings": trainings(runs / "distilled", "6x256*"),
        },
        "batches": live(runs / "batch"),
        "passes": passes(runs / "cache"),
        "accuracy": accuracy(runs / "accuracy", {**depth, **pruning}),
        "benchmark": "smollm2_studies",
    } | environment(1)


def siblings(folder: Path) -> dict[str, Any]:
    """Return the results of ready siblings: drafts cut from the target, as cut ("stock") and distilled with some seeds.

    Results are by number of layers. "speedup" is predicted for whole requests, with the prefills of both models, at the
    best K.
    """
    models = {p.name: CostModel.of(p, extrapolate=True) for p in passes_of(folder / "passes")}
    target = models[next(name for name in models if not name.isdigit())]
    rows: dict[str, dict[str, Any]] = defaultdict(lambda: {"distilled": []})
    for place in sorted(folder.glob("distilled/*")):
        record, (layers, _, seed) = read_record(place), place.name.partition("-")
        assert record is not None
        notes: Any = record.notes
        row, draft = rows[layers], models[layers]
        row["parameters"] = draft.profile.shape and draft.profile.shape.params()
        row["stock"] = {"acceptance": notes["before"]["acceptance"]} | whole_requests(
            folder / "replay" / layers, draft, target
        )
        row["distilled"].append(
            {
                "seed": int(seed),
                "acceptance": notes["after"]["acceptance"],
                "tokens": notes["tokens"],
            }
            | {"seconds": notes["seconds"]}
            | whole_requests(folder / "replay" / place.name, draft, target)
        )
    for row in rows.values():
        for name in ("acceptance", "speedup"):
            row[name] = over_seeds([np.ravel(each[name])[0] for each in row["distilled"]])
    return {"benchmark": "smollm2_siblings", "layers": rows} | environment(1)


def over_seeds(values: list[float]) -> dict[str, Any]:
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "sd": spread, "n": len(values)}


def students(folder: Path) -> dict[str, Any]:
    """Return kinds of drafts trained for equal CPU seconds, by kind, with all seeds.

    acceptance: On held-out answers, sampled. tokens_per_pass, timed_by_k: Of timed greedy requests, by K. speedup: At a
    K chosen on other prompts, as [value, low, high] over the prompts.
    """
    timed = {p.parent.name: read_score(p) for p in sorted(folder.glob("score/*/score.json"))}
    rows: dict[str, dict[str, Any]] = defaultdict(lambda: {"trained": []})
    for place in sorted(folder.glob("trained/*-*")):
        record, (kind, _, seed) = read_record(place), place.name.rpartition("-")
        assert record is not None
        notes: Any = record.notes
        (score,) = (each for name, each in timed.items() if name.endswith(place.name))
        speedup = score.best_k_speedup
        rows[kind]["trained"].append(
            {
                "seed": int(seed),
                "steps": record.config["steps"],
                "tokens": notes["tokens"],
                "cpu_seconds": notes["cpu_seconds"],
                "acceptance_before": notes["before"]["acceptance"],
                "acceptance": notes["after"]["acceptance"],
                "tokens_per_pass": {k: score.tokens_per_pass(k) for k in STUDENTS_DRAFT},
                "k": score.best_k,
                "speedup": bounds(speedup),
                "timed_by_k": {k: score.speedup_value(k) for k in sorted(score.speculative)},
                "identical": score.identical,
                "doubt": score.doubt,
            }
        )
    for row in rows.values():
        trained = row["trained"]
        row["cpu_seconds"] = over_seeds([each["cpu_seconds"] for each in trained])
        row["acceptance"] = over_seeds([each["acceptance"] for each in trained])
        row["speedup"] = over_seeds([each["speedup"][0] for each in trained])
        row["tokens_per_pass"] = {
            k: over_seeds([each["tokens_per_pass"][k] for each in trained]) for k in STUDENTS_DRAFT
        }
    conditions = next(iter(timed.values())).conditions
    return {
        "benchmark": "smollm2_students",
        "kinds": rows,
        "settings": conditions.model_dump(mode="json"),
    } | environment(1)


def whole_requests(replayed: Path, draft: CostModel, target: CostModel) -> dict[str, Any]:
    """Return the best K for whole requests, and the predicted speed-up there, [value, low, high] over the prompts.

    replayed: Directory of a replay of the draft.
    """
    work = workload_of_replay(read_replay(replayed))
    costs = step_costs(draft, target, work, max(DRAFTED_BY_SIBLINGS), 1)
    prefill = target.prefill_ms(work.prompt_tokens)
    plain = plain_ms(costs, work) + prefill
    both = prefill + draft.prefill_ms(work.prompt_tokens)
    times = {
        k: expected_time(costs, work.prompt_tokens, steps(work, k)).total + both
        for k in DRAFTED_BY_SIBLINGS
    }
    k = min(times, key=lambda k: float(times[k].sum()))
    return {"k": k, "speedup": interval(np.stack([plain, times[k]], 1))}


def drafts(folder: Path) -> Rows:
    """Return the results of each draft that a study replayed, by the draft's path in the folder of the study."""
    rows: Rows = {}
    for file in sorted(folder.glob("replay/*/replay.json")):
        replay = read_replay(file.parent)
        place = next(
            path
            for path in (folder / replay.draft, folder.parent / "texts" / replay.draft)
            if path.exists()
        )
        record = read_record(place)
        assert record is not None
        notes: Any = record.notes
        cut = read_record(folder / "cut" / place.name)
        counts = {k: replay.counts(k) for k in DRAFTED}
        pairs = {k: np.stack([c.tokens, c.passes], 1) for k, c in counts.items()}
        rows[str(place.relative_to(folder.parent)).removeprefix(f"{folder.name}/")] = {
            "acceptance_before": notes["before"]["acceptance"],
            "acceptance": notes["after"]["acceptance"],
            "tokens": notes["tokens"],
            "seconds": notes["seconds"],
            "cut_seconds": cut and cut.seconds,
            "mask_steps": cut and cut.config.get("steps"),
            "tokens_per_pass": {k: interval(each) for k, each in pairs.items()},
            "by_category": {
                name: interval(pairs[K][replay.categories == name])
                for name in sorted(set(replay.categories))
            },
        }
    return rows


def trainings(folder: Path, names: str) -> dict[str, dict[str, Any]]:
    """Return tokens, seconds and held-out acceptance of training runs. names: Pattern of the names of their folders."""
    records = {
        path.parent.name: read_record(path.parent)
        for path in sorted(folder.glob(f"{names}/draftlab.json"))
    }
    notes: dict[str, Any] = {
        name: record.notes for name, record in records.items() if record is not None
    }
    return {
        name: {
            "tokens": each["tokens"],
            "seconds": each["seconds"],
            "acceptance": each["after"]["acceptance"],
        }
        for name, each in notes.items()
    }


def interval(pairs: np.ndarray) -> list[float]:
    found = ratio(pairs)
    return [found.value, found.low, found.high]


def live(folder: Path) -> Rows | None:
    """Return the measured speed-ups and the latency of a pass from the scores in a folder, by draft."""
    files = sorted(folder.glob("*/score.json"))
    return {file.parent.name: timed(read_score(file)) for file in files} or None


def passes(folder: Path) -> Rows | None:
    """Return the milliseconds of one-token passes from the profiles in a folder, by model, and by batch and context."""
    return {
        p.name: {
            "layers": p.shape.layers if p.shape else None,
            "kv_bytes_per_token": p.shape.kv_bytes_per_token() if p.shape else None,
            "ms": {f"{at.batch} x {at.context}": at.median_ms for at in p.forward if at.width == 1},
        }
        for p in passes_of(folder)
    } or None


def passes_of(folder: Path) -> list[Profile]:
    return [read_profile(file) for file in sorted(folder.glob("*.yaml"))]


def searched(folder: Path) -> dict[str, Any] | None:
    """Return the trials of each rung of a search, the best first, and its measurements. None if there is no search."""
    if not (folder / "search.json").exists():
        return None
    search = read_search(folder)
    return {
        "seconds": search.spent_seconds,
        "rungs": [
            {"steps": rung.steps, "trials": [t.model_dump() for t in rung.trials]}
            for rung in search.rungs
        ],
        "measured": [each.model_dump() for each in search.measured],
    }


def timed(score: Score) -> dict[str, Any]:
    shape, tpot = score.draft.shape, score.best_k_tpot_speedup
    return {
        "batch": score.conditions.batch,
        "layers": shape.layers if shape else None,
        "parameters": shape.params() if shape else None,
        "pass_ms": score.draft_ms,
        "target_pass_ms": score.target_ms,
        "k": score.best_k,
        "speedup": bounds(score.best_k_speedup),
        "tpot_speedup": tpot and bounds(tpot),
        "identical": score.identical,
        "equal_texts": score.equal_texts,
        "by_k": {k: score.speedup_value(k) for k in sorted(score.speculative)},
        "doubt": score.doubt,
    }


def by_seed(rows: Rows) -> Rows:
    """Return the mean and the spread over seeds of runs named NAME-SEED, by NAME."""
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
    """Return each draft's accuracies and tokens per pass, and the correlations of both over drafts."""
    if not folder.exists():
        return None
    scores = {score.name: score for score in map(read_score, sorted(folder.rglob("score.json")))}
    drafts = {
        name: {f"{r.task} {r.metric}": r.value for r in scores[Path(name).name].draft.tasks}
        | {LENGTH: row["tokens_per_pass"][K][0]}
        for name, row in rows.items()
    }
    metrics = [name for name in next(iter(drafts.values())) if name != LENGTH]
    column = {
        name: np.array([each[name] for each in drafts.values()]) for name in (*metrics, LENGTH)
    }
    found = {metric: correlation(column[metric], column[LENGTH]) for metric in metrics}
    return {"k": K, "drafts": drafts, "correlations": found}


def draw(folder: Path, found: dict[str, Any]) -> None:
    """Write a figure for each study that was run. found: Results, as read from JSON."""
    figures = {
        "depth": depth_panels(found["depth"]),
        "pruning": pruning_panels(found["pruning"]),
        "losses": loss_panels(found["losses"], found["texts"]),
        "batch": batch_panels(found["batches"], found["passes"]),
        "accuracy": accuracy_panels(found["accuracy"]),
    }
    for name, panels in figures.items():
        if panels:
            save_figure(folder / f"smollm2-{name}.svg", panels)


def depth_panels(depth: dict[str, Any] | None) -> list[Panel]:
    """Return panels that show tokens per pass, time of a pass and speed-up by the number of layers of the draft."""
    if not depth or not depth["live"] or not all(depth["passes"].values()):
        return []
    drafts, timed = depth["drafts"], depth["live"]
    kinds = {"16M in blocks": EQUAL, "whole width, 576": [name for name in timed if "x576" in name]}

    def series(value: Callable[[str], float]) -> dict[str, list[tuple[float, float]]]:
        return {
            kind: sorted((timed[n]["layers"], value(n)) for n in names)
            for kind, names in kinds.items()
        }

    ms = {
        f"{mode}, {kind}": sorted(
            (rows[name]["layers"], rows[name]["ms"]["1 x 256"]) for name in names
        )
        for mode, rows in depth["passes"].items()
        for kind, names in kinds.items()
    }
    return [
        Panel(
            x="layers",
            y=f"{LENGTH}, K = {K}",
            series=series(lambda n: drafts[n]["tokens_per_pass"][str(K)][0]),
        ),
        Panel(x="layers", y="ms of a pass behind 256 tokens", series=ms),
        Panel(x="layers", y="speed-up", series=series(lambda n: timed[n]["speedup"][0])),
    ]


def pruning_panels(rows: Rows | None) -> list[Panel]:
    """Return a panel of held-out acceptance after the cut and after distillation, and a panel of tokens per pass."""
    if not rows:
        return []
    names = [name for name in CUTS if name in rows]
    accepted = {
        label: [(float(x), rows[name][key]) for x, name in enumerate(names)]
        for label, key in (("cut", "acceptance_before"), ("distilled", "acceptance"))
    }
    tokens = [rows[name]["tokens_per_pass"][str(K)] for name in names]
    points = {"drafts": [(float(x), value) for x, (value, _, _) in enumerate(tokens)]}
    bars = {"drafts": error_bars([(low, high) for _, low, high in tokens])}
    labels = [CUTS[name] for name in names]
    return [
        Panel(
            x="",
            y="held-out acceptance",
            series=accepted,
            names=labels,
            lines={name: [] for name in accepted},
        ),
        Panel(
            x="", y=f"tokens per pass, K = {K}", series=points, names=labels, lines=bars, bottom=1
        ),
    ]


def loss_panels(losses: Rows | None, texts: Rows | None) -> list[Panel]:
    """Return panels of held-out acceptance and of tokens per greedy pass, for losses (named LOSS-RATE) and for texts.

    Bars show one standard deviation over seeds.
    """
    by_rate: dict[str, Rows] = defaultdict(dict)
    for name, row in sorted((losses or {}).items()):
        loss, _, rate = name.rpartition("-")
        by_rate[f"rate {rate}"][loss] = row
    written = {
        "texts": {name.replace("texts/", "text: "): row for name, row in (texts or {}).items()}
    }
    per_pass = f"tokens per greedy pass, K = {K}"
    return [
        spread_panel("acceptance", "held-out acceptance", by_rate),
        spread_panel("tokens_per_pass", per_pass, by_rate, bottom=1),
    ] * bool(losses) + [spread_panel("tokens_per_pass", per_pass, written, bottom=1)] * bool(texts)


def spread_panel(value: str, label: str, groups: dict[str, Rows], bottom: float = 0) -> Panel:
    """Return a panel of means over seeds by name, with a series for each group, and bars of one standard deviation.

    value: Key of the result to show.
    """
    names = list(dict.fromkeys(name for rows in groups.values() for name in rows))
    spreads = {group: [rows[name][value] for name in names] for group, rows in groups.items()}
    ends = {
        group: [
            (each["mean"] - (each["sd"] or 0.0), each["mean"] + (each["sd"] or 0.0)) for each in row
        ]
        for group, row in spreads.items()
    }
    series = {
        group: [(float(x), each["mean"]) for x, each in enumerate(row)]
        for group, row in spreads.items()
    }
    bars = {group: error_bars(row) for group, row in ends.items()}
    return Panel(x="", y=label, series=series, names=names, lines=bars, bottom=bottom)


def error_bars(ends: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points of a line that draws a vertical bar from low to high at x = 0, 1, ..., with gaps in between."""
    return [(float(x), at) for x, (low, high) in enumerate(ends) for at in (low, high, math.nan)]


def batch_panels(timed: Rows | None, passes: Rows | None) -> list[Panel]:
    """Return a panel of the speed-up by batch size for each drafter and K, and a panel of the time of a pass."""
    gains: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, row in (timed or {}).items():
        for k, gain in row["by_k"].items():
            gains[f"{DRAFTERS[name.rpartition('-b')[0]]}, K = {k}"].append((row["batch"], gain))
    ms: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, row in (passes or {}).items():
        for at, value in row["ms"].items():
            rows, context = at.split(" x ")
            ms[f"{'draft' if name == 'plain' else 'target'}, rows: {rows}"].append(
                (float(context), value)
            )
    shown = [
        ("prompts at once", "speed-up", gains),
        ("tokens in the cache", "ms of a pass over one token", ms),
    ]
    return [
        Panel(x=x, y=y, series={name: sorted(points) for name, points in sorted(series.items())})
        for x, y, series in shown
        if series
    ]


def accuracy_panels(accuracies: dict[str, Any] | None) -> list[Panel]:
    if not accuracies:
        return []
    rows = list(accuracies["drafts"].values())
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return [panel(columns, metric, LENGTH) for metric in DRAWN]


if __name__ == "__main__":
    typer.run(main)
