"""An EAGLE-3 head (Li et al. 2025, 2503.01840): one layer that drafts from the states of the frozen target."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, NonNegativeInt

from draftlab.config.kinds import StudentSpec, split_at, student
from draftlab.errors import UserError

if TYPE_CHECKING:
    from draftlab.training.run import Distillation, OpenStudent

LARGEST_DEFAULT = 32_000  # largest default number of draft ids, as in heads of SafeAILab and speculators

Layers = Annotated[list[NonNegativeInt] | None, split_at("+")]


class HeadStudent(StudentSpec):
    """The base class of heads, which read the target's hidden states.

    free: Options that do not decide the shape of the head, so that they can be set next to --draft.
    """

    free: ClassVar[frozenset[str]]
    unused = frozenset(
        {
            "server",
            "api_key_file",
            "served_model_name",
            "top_logprobs",
            "gradient_checkpointing",
            "reweigh_steps",
        }
    )

    def check(self, job: "Distillation") -> None:
        if "draft" in job.text.shares:
            raise UserError(
                "--text: a head cannot train on text of a draft; use --text data, --text target, or a mixture of both"
            )
        fixed = sorted(self.model_fields_set - {"text"} - self.free)
        if job.draft is not None and fixed:
            raise UserError(
                f"--draft {job.draft} already decides the shape of the head; leave these options of --student out: "
                f"{', '.join(fixed)}"
            )


@student("eagle")
class EagleStudent(HeadStudent):
    """Options of an EAGLE-3 head, with the names of the library speculators.

    ttt_steps: Number of steps of training-time test, which is the number of tokens in a row that the head learns to
    draft. layer_ids: Layers of the target whose states the head reads, as 2+12+21; by default 2, n / 2 and n - 3 of n
    layers. norm_before_residual: Whether hidden_norm's output, not its input, is the residual. SGLang does not support
    this.

    EAGLE-3.1 has the further options norm_before_fc (one RMSNorm for all states of the target) or fc_norm (one RMSNorm
    for the states of each layer), norm_output (the normed state is fed back) and sliding_window (number of latest
    tokens that the head reads).
    """

    free = frozenset({"ttt_steps"})
    lr_share = 0.5  # learning rate relative to that of pruned drafts, from runs on SmolLM2-135M
    ttt_steps: int = Field(4, ge=1, le=16)
    layer_ids: Layers = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    sliding_window: int | None = Field(None, ge=1)

    def check(self, job: "Distillation") -> None:
        super().check(job)
        if job.text.seq_len <= self.ttt_steps + 1:
            raise UserError(
                f"--seq-len {job.text.seq_len} is too short for --student {self.text} with ttt_steps={self.ttt_steps}; "
                f"use --seq-len {self.ttt_steps + 2} or more"
            )
        if job.draft is not None and job.vocab:
            raise UserError(f"--draft {job.draft} already decides the ids of the head; leave --vocab out")
        from draftlab.training.eagle import head_of

        head_of(self, job)

    def facts(self, job: "Distillation") -> Mapping[str, object]:
        from draftlab.training import eagle

        return eagle.facts(self, job)

    def open(self, job: "Distillation", state: Path) -> "OpenStudent":
        from draftlab.training import eagle

        return eagle.open_head(self, job, state)
