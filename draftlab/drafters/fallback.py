"""Prompt lookup; if no match is long enough, a draft model drafts instead."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator
from typing_extensions import Self

from draftlab.drafters import DrafterSpec, drafter, split_at
from draftlab.drafters.model import DraftModelSpec

if TYPE_CHECKING:
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun
    from draftlab.engine.generate import Drafter

FALLBACK_LOOKUP_MAX = 8  # longer matches are right more often; see GateSpec.min_match
MATCH_KINDS = 3  # see GateSpec.min_match


class GateSpec(DrafterSpec):
    """Prompt lookup before another drafter, which drafts if no match is long enough.

    min_match: shortest match to use, in tokens, as 3x1x5: for an n-gram that occurred once before; several times,
    always followed by the same token; several times, followed by different tokens. draft_tokens: most tokens of the
    other drafter; by default as many as prompt lookup copies.
    """

    min_match: Annotated[list[int], split_at("x")] = Field([1, 1, 1])
    draft_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _has_a_length_for_each_kind(self) -> Self:
        if len(self.min_match) != MATCH_KINDS or min(self.min_match) < 1:
            raise ValueError(f"min_match: give {MATCH_KINDS} numbers of 1 or more, as 3x1x5")
        return self

    def after_lookup(self, longest: int, drafter: "Drafter", vocab: int) -> "Drafter":
        """Return the drafter with prompt lookup before it."""
        from draftlab.engine.drafters.fallback import FallbackDrafter
        from draftlab.engine.drafters.ngram import PromptLookupDrafter

        return FallbackDrafter(
            PromptLookupDrafter(longest, self.min_match), drafter, vocab, self.draft_tokens
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
