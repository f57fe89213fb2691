"""The drafter runner-up: a draft model's chain, with a second candidate beside each of its first tokens."""

from typing import TYPE_CHECKING

from pydantic import Field, model_validator
from typing_extensions import Self

from draftlab.drafters import drafter
from draftlab.drafters.fallback import FallbackSpec
from draftlab_research.trees import MAX_TREE_TOKENS, TreesSpec

if TYPE_CHECKING:
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun


@drafter("runner-up")
class RunnerUpSpec(TreesSpec, FallbackSpec):
    """Options of the drafter runner-up.

    draft_tokens: Number of tokens of the chain. runners_up: Number of these tokens, from the first on, that have a
    second candidate. prompt_lookup_max: Longest n-gram of a prompt lookup that comes before the draft, in tokens. With
    0, no prompt lookup does. min_match: Same as for fallback.
    """

    draft_tokens: int = Field(4, ge=1, le=MAX_TREE_TOKENS // 2)  # pyright: ignore[reportIncompatibleVariableOverride]
    runners_up: int = Field(2, ge=1)
    prompt_lookup_max: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.runners_up > self.draft_tokens:
            raise ValueError(
                f"runners_up: at most {self.draft_tokens}, because the chain has {self.draft_tokens} draft_tokens"
            )
        if not self.prompt_lookup_max and "min_match" in self.model_fields_set:
            raise ValueError("min_match: works only with prompt_lookup_max")
        return self

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab.engine.drafters.fallback import FallbackDrafter
        from draftlab.engine.drafters.ngram import PromptLookupDrafter
        from draftlab_research.drafting.runner_up import RunnerUpDrafter

        model = context.own_engine(self, context.load_draft(self.text, self.draft))
        context.own_engine(self, context.target)
        most = self.draft_tokens + self.runners_up
        drafter = RunnerUpDrafter(model, context.vocab, self.draft_tokens, self.runners_up)
        if not self.prompt_lookup_max:
            return context.run(drafter, model=model, ks=[most])
        lookup = PromptLookupDrafter(self.prompt_lookup_max, self.min_match)
        return context.run(FallbackDrafter(lookup, drafter, context.vocab), model=model, ks=[most])
