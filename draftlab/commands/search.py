"""The command that searches for a draft."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftlab.commands.base import Outcome, command, plan
from draftlab.config.search import SearchConfig
from draftlab.output import Output

if TYPE_CHECKING:
    from rich.table import Table

    from draftlab.intervals import Interval
    from draftlab.searching.schedule import Search


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Searched(Outcome):
    """A finished search. draft: checkpoint of the fastest candidate."""

    search: "Search"
    draft: Path

    @property
    def interval(self) -> "Interval":
        """The measured speed-up of the fastest candidate, with its 95 % interval over prompts."""
        return self.search.winner.gain

    @property
    def speedup(self) -> float:
        return self.interval.value


@command(SearchConfig, dry_run=True)
def search(config: SearchConfig, output: Output) -> Searched | Outcome:
    """Find the shape and K with which the target is fastest here; a killed search resumes."""
    from draftlab.searching.shapes import shapes_to_try

    tried = shapes_to_try(config)  # before torch is imported
    from draftlab.searching import run

    if output.dry_run:
        return plan(output, run.estimate(config, tried))
    result = run.search(config, tried, output)
    lines = [_rung_table(result), *result.explain(), str(output.out / "draft")]
    data = {"path": str(output.out), **result.model_dump(mode="json")}
    return Searched(path=output.out, show=lines, data=data, search=result, draft=output.out / "draft")


def _rung_table(search: "Search") -> "Table":
    """Return a table of every candidate on its last rung."""
    from draftlab.model.shape import format_count
    from draftlab.results.leaderboard import NO_DRAFT
    from draftlab.results.tables import terminal_table

    measured = {each.name: each for each in search.measured}
    shown: dict[str, list[str]] = {}
    for rung in reversed(search.rungs):
        for trial in rung.best_first():
            gain = measured[trial.name].gain if trial.name in measured else None
            is_head = trial.name in search.heads
            params = search.heads[trial.name] if is_head else search.shapes[trial.name].params()
            cells = [
                trial.name, format_count(params), f"{trial.draft_ms:.3g}", "" if is_head else str(rung.steps),
                str(trial.k), f"{trial.length:.2f}", f"{trial.speedup:.2f}x",
                f"{gain.value:.2f}x ({gain.low:.2f} to {gain.high:.2f})" if gain else "",
            ]  # fmt: skip
            shown.setdefault(trial.name, cells)
    columns = (
        "draft" if search.heads else "shape", "para-\nmeters", "ms per\npass", "steps", "K", "tokens\nper pass",
        "predicted\nTPOT", "measured\nrequests",
    )  # fmt: skip
    title = f"{Path(search.target).name}: candidates cut from {Path(search.source).name}, the fastest marked"
    plain = search.winner.tokens_per_second / search.winner.gain.value
    rows = [*shown.values(), [NO_DRAFT, "", "", "", "", "1.00", "1.00x", f"1.00x, {plain:.4g} tokens/s"]]
    best = list(shown).index(search.winner.name) if search.pays else len(shown)
    table = terminal_table(columns, rows, best=best, title=title)
    table.caption = (
        f"{search.spent_seconds / 60:.1f} minutes. Predicted: the tokens after the first, from a replay and the "
        f"latency law{', of a head its profile' if search.heads else ''}, at the best K and after the steps in "
        "the table. "
        "Measured: whole requests, with a 95% interval over prompts."
    )
    return table
