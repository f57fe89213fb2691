"""Does a draft's accuracy on tasks predict how well it drafts? Correlations over drafts, from their scores.

The script reads the scores that `draftlab score --tasks` wrote. It correlates each lm-eval metric with the tokens per
target pass and with the speed-up, both at the same K. It also correlates the cost of a draft pass with the speed-up.
Correlations are Pearson's, with bootstrap intervals over drafts. The intervals are wide, because there are few drafts.
"""

import json
import math
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.figures import save_figure
from draftlab.results.plots import Panel
from draftlab.results.score import Score, read_score

DRAWS = 4000


def main(
    scores: Annotated[
        Path, typer.Argument(help="Folder of scores with the same target, prompts and tasks.")
    ],
    k: Annotated[int, typer.Option(help="Drafted tokens per step.")] = 2,
    plot: Annotated[Path | None, typer.Option(help="Figure to write, .svg or .png.")] = None,
) -> None:
    read = [read_score(file) for file in sorted(scores.rglob("score.json"))]
    drafts = {score.name: _figures(score, k) for score in read}
    names = list(next(iter(drafts.values())))
    columns = {name: np.array([figures[name] for figures in drafts.values()]) for name in names}
    metrics = names[3:]
    pairs = [(metric, of) for metric in metrics for of in names[:2]] + [
        ("draft pass over target's", "speed-up")
    ]
    found = {f"{of} ~ {metric}": correlation(columns[metric], columns[of]) for metric, of in pairs}
    if plot is not None:
        save_figure(plot, [panel(columns, metric, names[0]) for metric in metrics])
    print(
        json.dumps({"benchmark": "accuracy_study", "k": k, "drafts": drafts, "correlations": found})
    )


def _figures(score: Score, k: int) -> dict[str, float]:
    cost = score.cost_ratio
    assert cost is not None  # the engine runs both models
    return {
        "tokens per target pass": score.acceptance(k).mean_acceptance_length,
        "speed-up": score.speedup_value(k),
        "draft pass over target's": cost,
    } | {f"{task.task} {task.metric}": task.value for task in score.draft.tasks}


def correlation(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return Pearson's r of two columns, with its 95 % bootstrap interval over drafts.

    Bootstrap samples in which a column has no variance are left out.
    """
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, len(x), len(x)) for _ in range(DRAWS)]
    found = [_pearson(x[at], y[at]) for at in drawn]
    low, high = np.percentile([r for r in found if not math.isnan(r)], [2.5, 97.5])
    return {"r": _pearson(x, y), "low": float(low), "high": float(high), "n": len(x)}


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return float(np.corrcoef(x, y)[0, 1])


def panel(columns: dict[str, np.ndarray], metric: str, of: str) -> Panel:
    x, y = columns[metric], columns[of]
    slope, start = np.polyfit(x, y, 1)
    ends = [(float(at), float(start + slope * at)) for at in (x.min(), x.max())]
    points = [(float(a), float(b)) for a, b in zip(x, y, strict=True)]
    return Panel(x=metric, y=of, series={"drafts": points}, lines={"drafts": ends})


if __name__ == "__main__":
    typer.run(main)
