"""The command that ranks scores and shows them on a page."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from draftlab.atomic import check_writable, write_atomic
from draftlab.commands.base import Outcome, command
from draftlab.config.results import ReportConfig
from draftlab.errors import UserError, about

if TYPE_CHECKING:
    from draftlab.results.score import Score


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Reported(Outcome):
    """A ranking, and the scores in it."""

    scores: "list[Score]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedReport:
    """Scores to rank, files to write, and thresholds of the fastest draft. command: Command line, for the page."""

    scores: "list[Score]"
    html: Path | None
    markdown: Path | None
    min_speedup: float | None
    min_acceptance_length: float | None
    command: str


def prepare(config: ReportConfig, weights: bool) -> PreparedReport:
    """Read the scores.

    Raises:
        UserError: there is no score, or a file cannot be written.
    """
    from draftlab.results.ranking import read_scores

    if config.html is not None:
        import_module("draftlab.results.plots")  # matplotlib may be missing
    scores = read_scores(config.scores)
    for name in ("html", "markdown"):
        file = getattr(config, name)
        if file is not None:
            with about(config.flag(name)):
                check_writable(file)
    return PreparedReport(
        scores=scores,
        html=config.html,
        markdown=config.markdown,
        min_speedup=config.min_speedup,
        min_acceptance_length=config.min_acceptance_length,
        command=config.command_line("report"),
    )


@command(ReportConfig, prepare=prepare)
def report(prepared: PreparedReport) -> Reported:
    """Rank drafts by their scores, test which differences are significant, and write a page about them."""
    from draftlab.results.ranking import missed_thresholds, rank, verdict_lines
    from draftlab.results.report import accuracy_table, ranking_table
    from draftlab.results.warnings import score_warnings

    scores = prepared.scores
    ranking = rank(scores)
    written = _write(prepared)
    warnings = [f"warning: {text}" for text in score_warnings(scores)]
    missed = missed_thresholds(ranking[0].score, prepared.min_speedup, prepared.min_acceptance_length)
    tables = [ranking_table(ranking), accuracy_table(scores)]
    shown = [table.terminal() for table in tables if table]
    show = [*shown, *verdict_lines(ranking), *warnings, *map(str, written)]
    data: dict[str, object] = {
        "path": str(written[0]) if written else None,
        "ranking": [ranked.as_dict() for ranked in ranking],
    }
    return Reported(path=written[0] if written else None, show=show, data=data, missed=missed, scores=scores)


def _write(prepared: PreparedReport) -> list[Path]:
    """Write the files that were asked for, and return them. Raises UserError: a file cannot be written."""
    from draftlab.results.report import html, markdown

    texts: dict[Path, str] = {}
    if prepared.html is not None:
        texts[prepared.html] = html(prepared.scores, prepared.command)
    if prepared.markdown is not None:
        texts[prepared.markdown] = markdown(prepared.scores)
    for file, text in texts.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, text)
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror}") from None
    return list(texts)
