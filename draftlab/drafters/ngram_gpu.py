"""The drafter ngram-gpu: prompt lookup as vLLM does it on GPUs."""

from typing import TYPE_CHECKING

from draftlab.drafters import drafter
from draftlab.drafters.prompt_lookup import LookupSpec, VLLMLookupSpec

if TYPE_CHECKING:
    from draftlab.engine.drafters.ngram import TextDrafter


@drafter("ngram-gpu", served_by=("vllm",))
class NgramGpuSpec(VLLMLookupSpec):
    def lookup(self) -> "TextDrafter":
        from draftlab.engine.drafters.ngram import NgramGpuDrafter

        return NgramGpuDrafter(self.prompt_lookup_max)

    acceptance = LookupSpec.copies
