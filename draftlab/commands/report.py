"""The command report, which ranks scores and shows them on a page."""

import shlex

from draftlab.commands.base import Outcome
from draftlab.commands.checks import check_plots
from draftlab.commands.settings.report import ReportConfig
from draftlab.errors import UserError, about
from draftlab.model import hub
from draftlab.results.ranking import (
    grouped,
    missed_thresholds,
    overall,
    read_scores,
    score_warnings,
    verdict_lines,
)
from draftlab.results.report import accuracy_table, overall_lines, ranking_table
from draftlab.results.score import Score
from draftlab.runs.atomic import check_writable
from draftlab.scoring.report import Report, following_command


def prepare(config: ReportConfig, weights: bool) -> Report:
    """Read the scores, and check that the files of --html and --markdown can be written.

    Raises:
        UserError: There is no score, or a file cannot be written.
    """
    if config.html is not None:
        check_plots()
    scores = read_scores(config.scores)
    for flag, file in (("--html", config.html), ("--markdown", config.markdown)):
        if file is not None:
            with about(flag):
                check_writable(file)
    return Report(
        scores=scores,
        html_file=config.html,
        markdown_file=config.markdown,
        command=config.command_line("report"),
    )


def show(scores: list[Score], config: ReportConfig) -> Outcome:
    groups = grouped(scores)
    files = [file for file in (config.html, config.markdown) if file is not None]
    path = next(iter(files), None)
    show: list[object] = []
    missed: list[str] = []
    for group in groups:
        show += [ranking_table(group).terminal(), *verdict_lines(group.ranking)]
        missed += missed_thresholds(group.ranking[0], config.min_speedup, config.min_acceptance_length)
    show += overall_lines(groups)
    accuracy = accuracy_table(scores)
    show += [accuracy.terminal()] if accuracy else []
    show += [*(f"warning: {text}" for text in score_warnings(scores)), *map(str, files)]
    way = overall(groups).way
    return Outcome(
        path=path,
        show=show,
        data={
            "path": str(path) if path else None,
            "groups": [group.as_dict() for group in groups],
            "fastest": way and way.as_dict(),
        },
        missed=missed,
        next=_following(following_command(groups)) if path else f"{config.command_line('report')} --html report.html",
    )


def _following(served: str) -> str | None:
    """Return the command that serves the fastest draft, or None if its draft is not here."""
    words = shlex.split(served)
    if words[:2] == ["draftlab", "export"]:
        try:
            hub.local(words[2])
        except UserError:  # the score was made in another folder
            return None
    return served or None
