"""A parallel draft (PARD, An et al. 2025, 2504.18583): one pass drafts K tokens, all but the first from mask tokens."""

from typing import TYPE_CHECKING

from pydantic import Field

from draftlab.config.students import student
from draftlab.training.students.draft import DraftSpec

if TYPE_CHECKING:
    from draftlab.training.distill import Distillation
    from draftlab.training.parallel import Offsets


@student("parallel")
class ParallelStudent(DraftSpec):
    """tokens: K. token: id of the mask token; by default an id that no text has.

    share: Share of an offset's positions that predict the next offset, too. floor: the least share of all
    positions that predict an offset. Both are PARD's.
    """

    unused = frozenset({"lora_rank"})  # adapters leave out the embedding of the mask token
    tokens: int = Field(8, ge=2, le=32)
    token: int | None = Field(None, ge=0)
    share: float = Field(0.7, gt=0, le=1)
    floor: float = Field(0.2, ge=0, le=1)

    def check(self, job: "Distillation") -> None:
        super().check(job)
        self.offsets(job)

    def offsets(self, job: "Distillation") -> "Offsets":
        from draftlab.training.parallel import Offsets, mask_token

        assert job.draft is not None  # starts_from_draft
        token = mask_token(job.draft, job.target_vocab, self.token)
        return Offsets(
            count=self.tokens, token=token, share=self.share, floor=self.floor, seed=job.loop.seed
        )
