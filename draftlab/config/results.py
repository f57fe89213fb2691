"""Settings of report."""

from pathlib import Path

from typing_extensions import Self

from draftlab import workspace
from draftlab.config.base import OUTPUT, Config, option


class ReportConfig(Config):
    """A ranking of scores, and a page about them."""

    scores: list[Path] = option(
        factory=list,
        help="score.json files, or directories of them.",
        argument=True,
        shown_default="the workspace's runs",
    )
    html: Path | None = option(None, "File to write a page with tables and plots to.", panel=OUTPUT)
    markdown: Path | None = option(None, "File to write the tables to, as Markdown.", panel=OUTPUT)
    min_speedup: float | None = option(
        None, "Exit with 3 if no draft reaches this speed-up of whole requests."
    )
    min_acceptance_length: float | None = option(
        None, "Exit with 3 if the fastest draft yields fewer tokens per target pass."
    )

    def resolved(self) -> Self:
        return self if self.scores else self.model_copy(update={"scores": [workspace.load().runs]})
