"""Settings of search."""

from pathlib import Path

from pydantic import model_validator
from typing_extensions import Self

from draftlab.config import shared
from draftlab.config.base import (
    DraftedTokens,
    Numbers,
    Only,
    OutputConfig,
    from_workspace,
    numbers,
    option,
)

CANDIDATES, TEXT = "Candidates", "Text of users"  # panels of --help


class SearchConfig(OutputConfig, shared.CheckpointSettings):
    """Candidates, the time for them, and the text that decides."""

    minutes: float = option(15.0, "Time to spend, approximately.", gt=0)
    layers: Numbers | None = option(
        None,
        "Depths to try, as 1,2,4. Default: 1 to half of the source's.",
        typed=str,
        panel=CANDIDATES,
    )
    widths: Numbers | None = option(
        None, "Widths to try. Default: half to all of the source's.", typed=str, panel=CANDIDATES
    )
    vocab: shared.Vocab = shared.draft_vocab("--outputs, or of --data", panel=CANDIDATES)
    k: DraftedTokens = numbers("1-6", "Numbers of drafted tokens to try.")
    parallel: bool = option(
        False, "Search for parallel drafts, which learn to draft the most of --k in one pass."
    )
    target: str = from_workspace(
        "target", "Checkpoint of the target: a directory, or a hub name with @REVISION."
    )
    source: str = shared.source()
    data: str = shared.data()
    outputs: Path | None = option(
        None, "Stored target outputs to cut, trim and distil with, instead of --data.", panel=TEXT
    )
    prompt_file: Path | None = option(
        None,
        "JSON-lines file of prompts to replay and to measure on, instead of --data.",
        panel=TEXT,
    )
    first_steps: int = option(30, "Distillation steps of the first rung.", ge=1, advanced=True)
    dtype: shared.WeightsDtype = shared.dtype(advanced=True)
    device: shared.Device = shared.device()
    threads: int | None = shared.threads()

    only = (
        Only(
            ("data",),
            lambda c: not (c.outputs and c.prompt_file),
            "--outputs and --prompt-file are all the text",
        ),
    )

    @model_validator(mode="after")
    def _drafts_several_in_parallel(self) -> Self:
        if self.parallel and max(self.k) < 2:
            raise ValueError("--parallel drafts several tokens in one pass: give --k more than 1")
        return self
