"""The drafter prompt-lookup: copies the tokens that followed the same n-gram earlier in the text, as vLLM does."""

from typing import TYPE_CHECKING

from pydantic import Field

from draftlab.drafters import DrafterSpec, drafter
from draftlab.servers.kinds import PROMPT_LOOKUP_MAX

if TYPE_CHECKING:
    from draftlab.acceptance.token_logprobs import TokenLogprobs
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun
    from draftlab.engine.drafters.ngram import TextDrafter
    from draftlab.target_outputs.replay import ReplayContext


class LookupSpec(DrafterSpec):
    """Base class of the lookups in the text itself, whose drafts for a smaller K begin those for a larger K."""

    by_age = True
    prompt_lookup_max: int = Field(PROMPT_LOOKUP_MAX, ge=1)

    def lookup(self) -> "TextDrafter":
        raise NotImplementedError

    def build(self, context: "DrafterContext") -> "DrafterRun":
        return context.run(self.lookup())

    def copies(self, replay: "ReplayContext") -> "list[TokenLogprobs]":
        """Return which tokens of the texts in a replay are drafted, in the form of acceptance()."""
        from draftlab.acceptance.lookup_logprobs import score_copies

        return score_copies(self.lookup(), replay.texts, replay.vocab, replay.most, replay.advance)


class VLLMLookupSpec(LookupSpec):
    """Base class of the lookups that vLLM starts with method ngram."""

    def speculative_config(self, k: int) -> dict[str, object]:
        from draftlab.servers.vllm import speculative_config

        config = speculative_config("", k, "prompt lookup")
        return config | {"prompt_lookup_max": self.prompt_lookup_max}


@drafter("prompt-lookup", served_by=("vllm", "transformers"))
class PromptLookupSpec(VLLMLookupSpec):
    def lookup(self) -> "TextDrafter":
        from draftlab.engine.drafters.ngram import PromptLookupDrafter

        return PromptLookupDrafter(self.prompt_lookup_max)

    acceptance = LookupSpec.copies
