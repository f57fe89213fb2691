"""The page of auto: the verdict, the candidates, what training gave, and the time that every step took."""

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from draftlab.intervals import Interval
from draftlab.pipeline.plan import not_tried, streams
from draftlab.pipeline.steps import Steps
from draftlab.pipeline.verdict import Choice, Training, Verdict
from draftlab.results import plots
from draftlab.results.leaderboard import COLOURS, DARK_COLOURS
from draftlab.results.tables import three_digits
from draftlab.training.learning_curve import fit

POINTS = 48  # of the curve


def page(verdict: Verdict, steps: Steps, command: str) -> str:
    """Return one page that loads nothing. command: what goes on with the run."""
    environment = Environment(loader=PackageLoader("draftlab.results"), autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    slower = sum(choice.speedup > 1 and not choice.changed for choice in verdict.ranking)
    rows = list(map(_row, verdict.ranking))
    rows.insert(slower, ["no draft", "–", "1.00", three_digits(verdict.plain_tokens_per_second), "1.00x", "1.00x"])
    fewest = min(verdict.speedups)
    heads = ["candidate", "K", "tokens per target pass", "tokens/s", f"speed-up, {streams([fewest])}", "all streams"]
    if len(verdict.speedups) == 1:
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    return environment.get_template("auto.html.j2").render(
        title=f"A draft for {verdict.target}", answer=f"{verdict.head()}: {verdict.reason}.", serve=verdict.serve,
        changes=verdict.would_change, measured=[[str(n), gain.as_speedup()] for n, gain in verdict.speedups.items()],
        measured_on=verdict.measured_on, precision=verdict.precision,
        candidates=(heads, rows, 0, slower), left_out=not_tried(verdict.left_out),
        report="report/report.html", curve=_curve(verdict.training), notes=verdict.notes,
        cost=verdict.forecast.line() if verdict.forecast else "", steps=_steps(steps),
        machine=steps.plan.machine.describe(), prompts=f"Prompts: {steps.plan.prompts}.", command=command,
        colours=(COLOURS, DARK_COLOURS),
    )  # fmt: skip


def _row(choice: Choice) -> list[str]:
    rates = [f"{choice.tokens_per_pass:.2f}", three_digits(choice.tokens_per_second)]
    return [choice.label, str(choice.k), *rates, choice.at_fewest.as_speedup(), f"{choice.speedup:.2f}x"]


def _steps(steps: Steps) -> list[list[str]]:
    """Return the rows of the plan's steps; a candidate that turned out not to be possible took no time."""
    seconds = steps.seconds_by_step()
    return [
        [step.name, step.what, f"{step.minutes:.1f}", f"{seconds.get(step.name, 0.0) / 60:.1f}"]
        for step in steps.plan.steps
    ]


def _curve(training: Training | None) -> dict[str, object] | None:
    """Return the plot of the rounds of training with its caption; None where there is no curve."""
    if training is None or len(training.pilots) < 2:
        return None
    curve, pilots = fit(training.pilots, training.k), training.pilots
    tokens = np.geomspace(pilots[0].tokens, 4 * pilots[-1].tokens, POINTS)
    measured = [
        (p.tokens, Interval(value=p.length, low=p.length - 1.96 * p.deviation, high=p.length + 1.96 * p.deviation, n=2))
        for p in pilots
    ]
    svg = plots.plot_learning_curve(measured, tokens.tolist(), [curve.at(float(t)) for t in tokens])
    return {"svg": svg, "caption": f"{training.line()} Band: 95 % interval of the fitted curve."}
