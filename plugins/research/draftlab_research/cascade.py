"""Options of a cascade: a draft model that verifies the tokens of a cheaper drafter."""

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from draftlab.config.base import MAX_K
from draftlab.drafters.base import drafter
from draftlab.drafters.model import DraftModelSpec
from draftlab.servers.kinds import PROMPT_LOOKUP_MAX
from draftlab_research.ngram import NgramSpec

if TYPE_CHECKING:
    from draftlab.drafters.context import DrafterContext, DrafterRun


@drafter("cascade")
class CascadeSpec(DraftModelSpec, NgramSpec):
    """Options of a cascade, in addition to those of a draft model and of ngram.

    inner: Cheaper drafter. inner_tokens: Number of tokens that it drafts for each pass of the draft model.
    """

    inner: Literal["ngram", "latest-lookup"] = "ngram"
    inner_tokens: int = Field(2, ge=1, le=MAX_K)

    @model_validator(mode="after")
    def _corpus_is_used(self) -> Self:
        idle = self.model_fields_set & {"order", "tokens", "data", "outputs"}
        if self.inner != "ngram" and idle:
            raise ValueError(f"{', '.join(sorted(idle))}: works only with inner=ngram")
        return self

    @property
    def reads_data(self) -> bool:
        return self.inner == "ngram" and super().reads_data

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab.drafters.lookup import LatestLookupDrafter
        from draftlab_research.drafting.cascade import CascadeDrafter

        model = context.load_draft(self.text, self.draft)
        if self.inner == "ngram":
            inner = NgramSpec.build(self, context).drafter
        else:
            inner = LatestLookupDrafter(PROMPT_LOOKUP_MAX)
        return context.run(CascadeDrafter(model, context.vocab, inner, self.inner_tokens), model=model)
