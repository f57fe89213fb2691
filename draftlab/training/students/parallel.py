"""The student parallel: a draft that predicts K tokens in one pass (PARD, An et al. 2025, 2504.18583).

The draft predicts the first token at the last token of the text, and all later tokens at mask tokens.
"""

from pydantic import Field

from draftlab.errors import UserError
from draftlab.model import checkpoint, llama, parallel
from draftlab.target_outputs.store import finished_manifest
from draftlab.training.objectives import Offsets
from draftlab.training.run import Distillation
from draftlab.training.students.base import student
from draftlab.training.students.draft import DraftSpec


@student("parallel")
class ParallelStudent(DraftSpec):
    """Options of a parallel draft.

    tokens: Number of tokens that one pass drafts. token: Id of the mask token; by default an id that no text has.
    share: Of the positions that predict an offset, the share that also predicts the next offset. floor: Least share of
    all positions that predict an offset. share and floor are from PARD.
    """

    tokens: int = Field(8, ge=2, le=32)
    token: int | None = Field(None, ge=0)
    share: float = Field(0.7, gt=0, le=1)
    floor: float = Field(0.2, ge=0, le=1)

    def check(self, job: Distillation) -> None:
        super().check(job)
        self.offsets(job)

    def offsets(self, job: Distillation) -> Offsets:
        """Return the offsets that the draft learns to predict.

        The mask token is the token of the options, else the mask token that the draft already has, else an unused id.

        Raises:
            UserError: The engine does not run the draft, or the vocabulary has no id for the mask token.
        """
        assert job.draft is not None  # because of starts_from_draft
        llama.check_supported(job.draft)
        vocab = checkpoint.vocab_size(job.draft)
        # the mask token must also be an id of the target
        if job.outputs is not None:
            vocab = min(vocab, finished_manifest(job.outputs).vocab)
        elif job.target is not None:
            vocab = min(vocab, checkpoint.vocab_size(job.target))
        token = parallel.pard_token(job.draft) if self.token is None else self.token
        if token is None:
            token = parallel.unused_id(job.draft, vocab)
        if token >= vocab:
            raise UserError(
                f"--student {self.text}: the mask token {token} is not an id of the vocabulary; choose token=ID from 0 "
                f"to {vocab - 1}"
            )
        return Offsets(count=self.tokens, token=token, share=self.share, floor=self.floor, seed=job.loop.seed)
