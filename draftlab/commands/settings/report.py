"""The settings of the command `report`. Torch is not loaded."""

from pathlib import Path
from typing import Self

from draftlab.config.base import OUTPUT, Config, option
from draftlab.runs import workspace


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
