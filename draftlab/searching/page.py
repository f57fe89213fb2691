"""The page of auto: the verdict, the candidates, the rounds of training, and the time of every step."""

from collections.abc import Callable

from draftlab.results.plots import COLOURS, DARK_COLOURS
from draftlab.results.tables import page_template, three_digits
from draftlab.searching.plan import Plan, not_tried, streams
from draftlab.searching.verdict import Choice, Verdict


def page(verdict: Verdict, plan: Plan, seconds: Callable[[str], float], command: str) -> str:
    """Return one page that loads nothing.

    Args:
        seconds: Returns the seconds that a step of the plan took.
        command: Command that continues the run.
    """
    faster = sum(choice.speedup > 1 and not choice.changed for choice in verdict.ranking)
    rows = list(map(_row, verdict.ranking))
    rows.insert(
        faster,
        ["no draft", "–", "1.00", three_digits(verdict.plain_tokens_per_second), "1.00x", "1.00x"],
    )
    labels = [row[0] for row in rows]
    chosen = labels.index(verdict.choice) if verdict.use and not verdict.doubt else None
    fewest = streams([min(verdict.speedups)])
    heads = [
        "candidate",
        "K",
        "tokens per target pass",
        "tokens/s",
        f"speed-up, {fewest}",
        "all streams",
    ]
    if len(verdict.speedups) == 1:
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    rounds = verdict.training.rounds if verdict.training else []
    steps = [
        [step.name, step.what, f"{step.minutes:.1f}", f"{seconds(step.name) / 60:.1f}"]
        for step in plan.steps
    ]
    return page_template("auto.html.j2").render(
        title=f"Draft models for {verdict.target}",
        answer=f"{verdict.head()}: {verdict.reason}.",
        serve=verdict.serve,
        changes=verdict.would_change,
        measured=[[str(n), gain.as_speedup()] for n, gain in verdict.speedups.items()],
        precision=verdict.precision,
        candidates=(heads, rows, chosen, faster),
        left_out=not_tried(verdict.left_out),
        report="report/report.html",
        rounds=[[f"{each.tokens:,.0f}", f"{each.length:.2f}"] for each in rounds],
        stopped=verdict.training.stopped if verdict.training else "",
        notes=verdict.notes,
        steps=steps,
        machine=plan.machine.describe(),
        prompts=f"Prompts: {plan.prompts}.",
        command=command,
        colours=(COLOURS, DARK_COLOURS),
    )


def _row(choice: Choice) -> list[str]:
    rates = [f"{choice.tokens_per_pass:.2f}", three_digits(choice.tokens_per_second)]
    return [
        choice.label,
        str(choice.k),
        *rates,
        choice.at_fewest.as_speedup(),
        f"{choice.speedup:.2f}x",
    ]
