"""The drafter prompt-lookup: copies the tokens that followed the same n-gram earlier in the text."""

from typing import TYPE_CHECKING

from pydantic import Field

from draftlab.drafters import DrafterSpec, drafter
from draftlab.servers.kinds import PROMPT_LOOKUP_MAX

if TYPE_CHECKING:
    from draftlab.acceptance.token_logprobs import TokenLogprobs
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun
    from draftlab.target_outputs.replay import ReplayContext


@drafter("prompt-lookup", served_by=("vllm", "sglang", "llama.cpp", "transformers"))
class PromptLookupSpec(DrafterSpec):
    by_age = True
    prompt_lookup_max: int = Field(PROMPT_LOOKUP_MAX, ge=1)

    def speculative_config(self, k: int) -> dict[str, object]:
        from draftlab.servers.vllm import speculative_config

        config = speculative_config("", k, "prompt lookup")
        return config | {"prompt_lookup_max": self.prompt_lookup_max}

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab.engine.drafters.ngram import PromptLookupDrafter

        return context.run(PromptLookupDrafter(self.prompt_lookup_max))

    def acceptance(self, replay: "ReplayContext") -> "list[TokenLogprobs]":
        from draftlab.acceptance.lookup_logprobs import score_copies
        from draftlab.engine.drafters.ngram import PromptLookupDrafter

        drafter = PromptLookupDrafter(self.prompt_lookup_max)
        return score_copies(drafter, replay.texts, replay.vocab, replay.most, replay.advance)
