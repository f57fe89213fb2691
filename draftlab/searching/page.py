"""The page of auto: the verdict, the candidates, the rounds of training, and the time of every step."""

from collections.abc import Callable

from draftlab.results import plots
from draftlab.results.ranking import NO_DRAFT
from draftlab.results.report import Figure
from draftlab.results.tables import Table, page_template, three_digits
from draftlab.searching.plan import Plan, not_tried, streams
from draftlab.searching.verdict import Verdict


def page(verdict: Verdict, plan: Plan, seconds: Callable[[str], float], command: str) -> str:
    """Return one page that loads nothing.

    Args:
        seconds: Returns the seconds that a step of the plan took.
        command: Command that continues the run.
    """
    board = _candidates(verdict)
    labels = [choice.label for choice in verdict.ranking]
    marks = {label: plots.Mark.of(label, i) for i, label in enumerate(labels)}
    gains = [(marks[choice.label], choice.at_fewest) for choice in verdict.ranking]
    at_fewest = streams([min(verdict.speedups)])
    first = Figure(
        svg=plots.plot_ranking(gains),
        table=Table(
            heads=(),
            rows=[],  # the candidates' table has the numbers
            title="Speed-up of each candidate",
            caption=f"Tokens per second of whole requests over those of the target alone, at {at_fewest}, "
            "each candidate at its best number of drafted tokens.",
        ),
    )
    return page_template("auto.html.j2").render(
        target=verdict.target,
        answer=f"{verdict.head()}: {verdict.reason}.",
        serve=verdict.serve,
        changes=verdict.would_change,
        first=first,
        board=board,
        tables=_tables(verdict, plan, seconds),
        notes=not_tried(verdict.left_out) + verdict.notes,
        marks=marks,
        colours=(plots.COLOURS, plots.DARK_COLOURS),
        page_colour=plots.VARIABLES.__getitem__,
        command=command,
    )


def _candidates(verdict: Verdict) -> Table:
    several = len(verdict.speedups) > 1
    rows = []
    for choice in verdict.ranking:
        cells = {
            "candidate": choice.label,
            "drafted tokens (K)": str(choice.k),
            "tokens per target pass": f"{choice.tokens_per_pass:.2f}",
            "tokens/s": three_digits(choice.tokens_per_second),
            f"speed-up, {streams([min(verdict.speedups)])}": choice.at_fewest.as_speedup(),
        }
        rows.append(cells | ({"speed-up, mean": f"{choice.speedup:.2f}x"} if several else {}))
    plain = dict.fromkeys(rows[0], "1.00x") | {
        "candidate": NO_DRAFT,
        "drafted tokens (K)": "–",
        "tokens per target pass": "1.00",
        "tokens/s": three_digits(verdict.plain_tokens_per_second),
    }
    faster = sum(choice.speedup > 1 and not choice.changed for choice in verdict.ranking)
    rows.insert(faster, plain)
    labels = [row["candidate"] for row in rows]
    return Table.of(
        rows,
        title="Candidates",
        caption="Each at its best K, on the prompts that chose K. The choice looks better there than on other prompts.",
        best=labels.index(verdict.choice) if verdict.use and not verdict.doubt else None,
    )


def _tables(verdict: Verdict, plan: Plan, seconds: Callable[[str], float]) -> list[Table]:
    """Return the tables of details: the choice on other prompts, the training, and the steps."""
    ran = f" How both sides ran: {verdict.precision}." if verdict.precision else ""
    measured = Table(
        title="The choice on other prompts",
        heads=["concurrent requests", "speed-up of whole requests (95% interval over prompts)"],
        rows=[[str(n), gain.as_speedup()] for n, gain in verdict.speedups.items()],
        caption="Tokens per second of whole requests, prefill included, over those of the target alone, on prompts "
        f"that nothing was chosen on.{ran}",
    )
    steps = Table(
        title="Steps",
        heads=["step", "what it made", "planned, minutes", "taken, minutes"],
        rows=[
            [step.name, step.what, f"{step.minutes:.1f}", f"{seconds(step.name) / 60:.1f}"]
            for step in plan.steps
        ],
        caption=f"{plan.machine.describe()}. Prompts: {plan.prompts}.",
    )
    if verdict.training is None:
        return [measured, steps]
    training = Table(
        title="What training gave",
        heads=["tokens trained on", "tokens per target pass"],
        rows=[[f"{each.tokens:,.0f}", f"{each.length:.2f}"] for each in verdict.training.rounds],
        caption=f"Replayed over the target's answers. Training ended: {verdict.training.stopped}.",
    )
    return [measured, training, steps]
