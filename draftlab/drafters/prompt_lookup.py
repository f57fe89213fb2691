"""The drafter prompt-lookup: copies the tokens that followed the same n-gram earlier in the text."""

from typing import TYPE_CHECKING

from pydantic import Field

from draftlab.drafters import DrafterSpec, drafter
from draftlab.servers.kinds import PROMPT_LOOKUP_MAX

if TYPE_CHECKING:
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun


@drafter("prompt-lookup", served_by=("vllm", "sglang", "llama.cpp", "transformers"))
class PromptLookupSpec(DrafterSpec):
    prompt_lookup_max: int = Field(PROMPT_LOOKUP_MAX, ge=1)

    def speculative_config(self, k: int) -> dict[str, object]:
        from draftlab.servers.vllm import speculative_config

        config = speculative_config("", k, "prompt lookup")
        return config | {"prompt_lookup_max": self.prompt_lookup_max}

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab.engine.drafters.ngram import PromptLookupDrafter

        return context.run(PromptLookupDrafter(self.prompt_lookup_max))
