"""The report on scores, and the command that serves what was fastest."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftlab.drafters.base import parse_drafter
from draftlab.errors import UserError
from draftlab.model import hub
from draftlab.results.ranking import Group, Ranked, grouped
from draftlab.results.report import export_command, fastest_draft, html, markdown, target_named
from draftlab.results.score import Score
from draftlab.runs import workspace
from draftlab.runs.atomic import write_atomic, writing
from draftlab.shell import typed


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report on scores, to write as a page or as Markdown. command: Command line that writes it again."""

    scores: list[Score]
    html_file: Path | None
    markdown_file: Path | None
    command: str

    def run(self) -> list[Score]:
        """Write the files, and return the scores. Raises UserError: a file cannot be written."""
        texts: dict[Path, str] = {}
        if self.html_file is not None:
            texts[self.html_file] = html(self.scores, self.command, serve=following_command(grouped(self.scores)))
        if self.markdown_file is not None:
            texts[self.markdown_file] = markdown(self.scores)
        for file, text in texts.items():
            with writing(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(file, text)
        return self.scores


def following_command(groups: Sequence[Group]) -> str:
    """Return the command that exports or serves the fastest draft, or "" if there is none."""
    fastest = fastest_draft(groups)
    return export_command(groups) or (serve_command(fastest) if fastest else "")


def serve_command(fastest: Ranked) -> str:
    """Return the command that serves the target in vLLM with the fastest drafter, or "" if there is no such command.

    If no drafter is faster than plain decoding, or if the fastest drafter changed the target's text, the command serves
    the target alone. There is no command if the drafter has weights, if the score was measured on a server, if the
    measurement is doubtful, or if vLLM would not find the target by its name.
    """
    score = fastest.score
    target = target_named(score) or workspace.load().target
    place = target.partition("@")[0]
    if fastest.doubt or score.served or Path(place).name != score.target.name:
        return ""
    if hub.kind_of_name(place) not in ("directory", "hub"):
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
