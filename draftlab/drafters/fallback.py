"""The drafter fallback: prompt lookup first, and a draft model for texts without a match that is long enough."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveInt

from draftlab.config.base import MAX_K
from draftlab.drafters import DrafterSpec, drafter, split_at
from draftlab.drafters.model import DraftModelSpec

if TYPE_CHECKING:
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun
    from draftlab.engine.generate import Drafter

FALLBACK_LOOKUP_MAX = 8  # longer matches are right more often; see GateSpec.min_match


class GateSpec(DrafterSpec):
    """Base class of drafters that first try prompt lookup. If no match is long enough, another drafter drafts.

    min_match: Smallest length of a match, in tokens, for three kinds of n-grams, such as 3x1x5. The first number is for
    n-grams that occurred once before. The second is for n-grams that occurred several times, always before the same
    token. The third is for n-grams that occurred several times, before different tokens. With the default, trained
    drafts of SmolLM2-135M had the most tokens per target pass.
    draft_tokens: Largest number of tokens that the other drafter drafts. Default: K.
    """

    min_match: Annotated[list[PositiveInt], split_at("x")] = Field(
        [2, 1, 3], min_length=3, max_length=3
    )
    draft_tokens: int | None = Field(None, ge=1, le=MAX_K)

    def after_lookup(self, longest: int, drafter: "Drafter", vocab: int) -> "Drafter":
        """Return a drafter that tries prompt lookup, and then `drafter`.

        longest: Largest length of a match, in tokens. vocab: Width of the target's logits.
        """
        from draftlab.engine.drafters.fallback import FallbackDrafter
        from draftlab.engine.drafters.ngram import LatestLookupDrafter

        return FallbackDrafter(
            LatestLookupDrafter(longest, self.min_match), drafter, vocab, self.draft_tokens
        )


@drafter("fallback")
class FallbackSpec(DraftModelSpec, GateSpec):
    prompt_lookup_max: int = Field(FALLBACK_LOOKUP_MAX, ge=1)

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab.engine.drafters.parallel import model_drafter

        model = context.load_draft(self.text, self.draft)
        drafter = self.after_lookup(
            self.prompt_lookup_max, model_drafter(model, context.vocab), context.vocab
        )
        return context.run(drafter, model=model)
