"""Settings of search."""

from pathlib import Path

from pydantic import model_validator
from typing_extensions import Self

from draftlab.config import inputs, shared
from draftlab.config.base import DraftedTokens, Numbers, Only, OutputConfig, numbers, option
from draftlab.config.drafters import check_drafter, parse_drafter
from draftlab.errors import UserError
from draftlab.model.hub import checkpoint_name

CANDIDATES, TEXT = "Candidates", "Text of users"  # panels of --help


class SearchConfig(OutputConfig, shared.CheckpointSettings):
    minutes: float = option(15.0, "Time to spend, approximately.", gt=0)
    layers: Numbers | None = option(
        None, "Depths to try, as 1,2,4. Default: 1 to half of the source's.", typed=str, panel=CANDIDATES
    )
    widths: Numbers | None = option(
        None, "Widths to try. Default: half to all of the source's.", typed=str, panel=CANDIDATES
    )
    params: shared.Count = option(
        None, "In place of widths, total parameters of every shape: 1.3b, 796m, 4m.", panel=CANDIDATES
    )
    vocab: shared.Vocab = shared.draft_vocab("--outputs, or of --data", panel=CANDIDATES)
    against: list[str] = option(
        factory=list, help="Shape file or name of a shape that is kept to the end; repeat for several.",
        panel=CANDIDATES, reads=inputs.shape,
    )  # fmt: skip
    drafter: list[str] = option(
        factory=list, help="EAGLE-3 head that is kept to the end, eagle:heads=DIR; repeat for several.",
        panel=CANDIDATES, reads=check_drafter,
    )  # fmt: skip
    k: DraftedTokens = numbers("1-6", "Numbers of drafted tokens to try.")
    parallel: bool = option(False, "Search for parallel drafts, which learn to draft the most of --k in one pass.")
    target: str = shared.target()
    source: str = shared.source()
    data: str = shared.data()
    outputs: Path | None = option(
        None, "Stored target outputs to cut, trim and distil with, instead of --data.", panel=TEXT,
        reads=inputs.store,
    )  # fmt: skip
    prompt_file: Path | None = option(
        None, "JSON-lines file of prompts to replay and to measure on, instead of --data.", panel=TEXT,
        reads=inputs.prompts,
    )  # fmt: skip
    law: Path | None = option(
        None, "Output of draftlab profile --law. Default: it is measured first.", reads=inputs.file
    )
    first_steps: int = option(30, "Distillation steps of the first rung.", ge=1, advanced=True)
    max_steps: int = option(1000, "Most distillation steps of the last rung.", ge=1, advanced=True)
    batch_size: int = option(8, "Sequences per step.", ge=1, advanced=True)
    lr: float = option(4.0e-3, "Peak learning rate, of Muon.", gt=0, advanced=True)
    finalists: int = option(2, "Leaders to measure.", ge=1)
    num_prompts: int = option(16, "Prompts that leaders are measured on.", ge=2, advanced=True)
    mode: shared.EngineMode = shared.mode()
    dtype: shared.WeightsDtype = shared.dtype(advanced=True)
    device: shared.Device = shared.device()
    threads: int | None = shared.threads()
    seed: int = shared.seed()

    only = (
        Only(("widths",), lambda c: c.params is None, "--params chooses the widths; use one of the two"),
        Only(("data",), lambda c: not (c.outputs and c.prompt_file), "--outputs and --prompt-file are all the text"),
    )

    @model_validator(mode="after")
    def _drafts_several_in_parallel(self) -> Self:
        if self.parallel and max(self.k) < 2:
            raise ValueError("--parallel drafts several tokens in one pass: give --k more than 1")
        return self

    @model_validator(mode="after")
    def _drafters_are_heads(self) -> Self:
        try:
            list(self.heads)
        except UserError as error:
            raise ValueError(str(error)) from None
        return self

    def check(self, *, weights: bool) -> None:
        super().check(weights=weights)
        inputs.check_vocabularies(self.target, self.source)

    @property
    def heads(self) -> dict[str, Path]:
        """Return the EAGLE-3 heads by the names of their scores. Raises UserError: another drafter."""
        heads: dict[str, Path] = {}
        for spec in map(parse_drafter, self.drafter):
            if spec.eagle_head is None:
                raise UserError(f"--drafter {spec.text}: search ranks chains of heads, eagle:heads=DIR; score the rest")
            heads[spec.name] = spec.eagle_head
        return heads

    @property
    def offsets(self) -> int:
        """Return how many tokens the drafts learn to draft in one pass."""
        return max(self.k) if self.parallel else 1

    def default_name(self) -> str:
        return f"search-{checkpoint_name(Path(self.source.partition('@')[0]))}"
