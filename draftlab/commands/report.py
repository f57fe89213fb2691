"""The command report, which ranks scores and shows them on a page."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from draftlab.commands.base import Job, Outcome, check_plots, command
from draftlab.config.base import OUTPUT, Config, option
from draftlab.errors import UserError, about
from draftlab.model import hub
from draftlab.runs import workspace
from draftlab.runs.atomic import check_writable, write_atomic, writing
from draftlab.shell import typed

if TYPE_CHECKING:
    from draftlab.results.ranking import Ranked
    from draftlab.results.score import Score


class ReportConfig(Config):
    """The settings of the command `report`: the scores to rank, and the files to write."""

    scores: list[Path] = option(
        factory=list,
        help="score.json files, or directories with them.",
        argument=True,
        shown_default="runs/, or runs in draftlab.yaml",
    )
    html: Path | None = option(None, "HTML file to write: a page with tables and plots.", panel=OUTPUT, acts="always")
    markdown: Path | None = option(None, "Markdown file to write: the tables.", panel=OUTPUT, acts="always")
    min_speedup: float | None = option(
        None,
        "Exit with code 3 unless the interval of the fastest draft's speed-up over plain decoding, prefill included, "
        "is above this, in every ranking.",
        ge=0,
    )
    min_acceptance_length: float | None = option(
        None,
        "Exit with code 3 if the fastest draft of a ranking has fewer tokens per target pass than this.",
        ge=0,
    )

    def resolved(self) -> Self:
        return self if self.scores else self.model_copy(update={"scores": [workspace.load().runs]})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Reported(Outcome):
    """The outcome of report. scores: The scores that were ranked."""

    scores: "list[Score]"


def prepare(config: ReportConfig, weights: bool) -> "Job[tuple[ReportConfig, list[Score]]]":
    """Read the scores, and check that the files of --html and --markdown can be written.

    Raises:
        UserError: There is no score, or a file cannot be written.
    """
    from draftlab.results.ranking import read_scores

    if config.html is not None:
        check_plots()
    scores = read_scores(config.scores)
    for flag, file in (("--html", config.html), ("--markdown", config.markdown)):
        if file is not None:
            with about(flag):
                check_writable(file)
    return Job(lambda: (config, scores))


@command(ReportConfig, prepare=prepare, example="report runs/score-3x128 --html report.html")
def report(chosen: "tuple[ReportConfig, list[Score]]") -> Reported:
    """Rank drafts by their scores, test which differences are significant, and write a page about them."""
    from draftlab.results.ranking import (
        grouped,
        missed_thresholds,
        overall,
        score_warnings,
        verdict_lines,
    )
    from draftlab.results.report import (
        accuracy_table,
        export_command,
        fastest_draft,
        html,
        markdown,
        overall_lines,
        ranking_table,
    )

    config, scores = chosen
    groups = grouped(scores)
    fastest = fastest_draft(groups)
    served = export_command(groups) or (_serve(fastest) if fastest else "")
    texts: dict[Path, str] = {}
    if config.html is not None:
        texts[config.html] = html(scores, config.command_line("report"), serve=served)
    if config.markdown is not None:
        texts[config.markdown] = markdown(scores)
    for file, text in texts.items():
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, text)
    path = next(iter(texts), None)
    show: list[object] = []
    missed: list[str] = []
    for group in groups:
        show += [ranking_table(group).terminal(), *verdict_lines(group.ranking)]
        missed += missed_thresholds(group.ranking[0], config.min_speedup, config.min_acceptance_length)
    show += overall_lines(groups)
    accuracy = accuracy_table(scores)
    show += [accuracy.terminal()] if accuracy else []
    show += [*(f"warning: {text}" for text in score_warnings(scores)), *map(str, texts)]
    way = overall(groups).way
    return Reported(
        path=path,
        show=show,
        data={
            "path": str(path) if path else None,
            "groups": [group.as_dict() for group in groups],
            "fastest": way and way.as_dict(),
        },
        missed=missed,
        scores=scores,
        next=_following(served) if path else f"{config.command_line('report')} --html report.html",
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


def _serve(fastest: "Ranked") -> str:
    """Return the command that serves the target in vLLM with the fastest drafter, or "" if there is no such command.

    If no drafter is faster than plain decoding, or if the fastest drafter changed the target's text, the command serves
    the target alone. There is no command if the drafter has weights, if the score was measured on a server, if the
    measurement is doubtful, or if the name of the target is unknown.
    """
    from draftlab.drafters.base import parse_drafter
    from draftlab.results.report import target_named

    score = fastest.score
    target = target_named(score) or workspace.load().target
    if fastest.doubt or score.served or Path(target.partition("@")[0]).name != score.target.name:
        return ""
    words = ["vllm", "serve", Path(target)]
    if fastest.gain.above(1) and not score.output_differs:
        try:
            config = parse_drafter(score.name).speculative_config(fastest.k)
        except UserError:  # the score's name is not a drafter, but the folder of a draft model
            config = None
        if config is None:
            return ""
        words += ["--speculative-config", json.dumps(config)]
    return typed(*words)
