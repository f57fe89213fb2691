"""The settings of the command `search`. Torch is not loaded."""

from pathlib import Path

from draftlab.config import shared
from draftlab.config.base import (
    DraftedTokens,
    Numbers,
    Only,
    OutputConfig,
    advanced_option,
    numbers,
    option,
)

# panels of --help
CANDIDATES = "Candidates"
TEXT = "Text of users"


class SearchConfig(OutputConfig, shared.CheckpointSettings):
    """The settings of the command `search`: the candidates, the time to spend, and the text to train and measure on."""

    minutes: float = option(15.0, "Time to spend, approximately.", gt=0)
    layers: Numbers | None = option(
        None,
        "Numbers of layers to try, as 1,2,4. Default: from 1 to half of the source's layers.",
        typed=str,
        panel=CANDIDATES,
    )
    widths: Numbers | None = option(
        None,
        "Hidden sizes to try. Default: half, three quarters and all of the source's hidden size.",
        typed=str,
        panel=CANDIDATES,
    )
    vocab: shared.Vocab = shared.draft_vocab("--outputs or --data", panel=CANDIDATES)
    k: DraftedTokens = numbers("1-6", "Numbers of drafted tokens per step to try, as 1-6 or 2,4,8.")
    parallel: bool = option(
        False,
        "Search for parallel drafts, which draft several tokens in one pass: as many as the largest --k.",
    )
    target: str = shared.target()
    source: str = shared.source()
    data: str = shared.data()
    outputs: Path | None = option(
        None,
        "Stored target outputs on which drafts are calibrated, trimmed and distilled, instead of --data.",
        panel=TEXT,
    )
    prompt_file: Path | None = option(
        None,
        "JSON-lines file of prompts on which drafts are replayed and measured, instead of --data.",
        panel=TEXT,
    )
    first_steps: int = advanced_option(
        30,
        "Number of distillation steps of every candidate in the first round. Later rounds have fewer candidates and "
        "more steps.",
        ge=1,
    )
    dtype: shared.WeightsDtype = shared.dtype(advanced=True)
    device: str = shared.device()
    threads: int | None = shared.threads()

    only = (
        Only(
            ("data",),
            lambda c: not (c.outputs and c.prompt_file),
            "leave it out, because --outputs and --prompt-file replace it",
        ),
        Only(
            ("parallel",),
            lambda c: max(c.k) > 1,
            "a parallel draft drafts several tokens in one pass; use a --k above 1",
        ),
    )

    @property
    def text_source(self) -> str | None:
        return None if self.outputs is not None and self.prompt_file is not None else self.data
