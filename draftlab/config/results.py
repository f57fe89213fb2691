"""Settings of report and compare."""

from pathlib import Path

from typing_extensions import Self

from draftlab import workspace
from draftlab.config.base import Config, OutputConfig, option

RUNS = "the workspace's runs"


class ReportConfig(OutputConfig):
    """A page about some scores."""

    scores: list[Path] = option(
        factory=list, help="score.json files, or directories of them.", argument=True, shown_default=RUNS
    )

    def default_name(self) -> str:
        return "report"

    def resolved(self) -> Self:
        return self if self.scores else self.model_copy(update={"scores": [workspace.load().runs]})


class CompareConfig(Config):
    """A ranking of some scores and predictions."""

    scores: list[Path] = option(
        factory=list,
        help="score.json files, directories of them, or files that predict --json printed.",
        argument=True,
        shown_default=RUNS,
    )
    min_speedup: float | None = option(None, "Exit with status 3 if no draft reaches this speed-up of whole requests.")
    min_acceptance_length: float | None = option(
        None, "Exit with status 3 if the fastest draft yields fewer tokens per target pass."
    )

    def resolved(self) -> Self:
        return self if self.scores else self.model_copy(update={"scores": [workspace.load().runs]})
