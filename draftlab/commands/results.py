"""The commands that present scores."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftlab.commands.base import Outcome, command
from draftlab.config.results import CompareConfig, ReportConfig
from draftlab.output import Output

if TYPE_CHECKING:
    from draftlab.results.score import Score


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Reported(Outcome):
    """A page, and the scores that it shows."""

    scores: "list[Score]"


@command(ReportConfig)
def report(config: ReportConfig, output: Output) -> Reported:
    """Write one self-contained HTML page with tables and plots, and its Markdown version, from scores."""
    from draftlab.results.report import json_rows, write_report
    from draftlab.results.tables import score_table

    scores = write_report(config.scores, output)
    page = output.out / "report.html"
    data = {"path": str(page), "scores": json_rows(scores)}
    return Reported(path=page, show=[score_table(scores), str(page)], data=data, scores=scores)


@command(CompareConfig)
def compare(config: CompareConfig) -> Outcome:
    """Rank drafts by scores or predictions, and test which differences are significant."""
    from draftlab.results.compare import as_dict, comparison_table, missed_thresholds, rank, read_candidates
    from draftlab.results.compare import verdict_lines as lines
    from draftlab.results.warnings import score_warnings

    ranking = rank(read_candidates(config.scores))
    best = ranking[0].candidate
    warnings = score_warnings([ranked.candidate.score for ranked in ranking if ranked.candidate.score])
    missed = missed_thresholds(best, best.tokens_per_pass, config.min_speedup, config.min_acceptance_length)
    show = [comparison_table(ranking), *lines(ranking), *(f"warning: {text}" for text in warnings)]
    return Outcome(path=None, show=show, data={"ranking": list(map(as_dict, ranking))}, missed=missed)
