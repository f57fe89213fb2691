"""The drafter peagle: a P-EAGLE head, which is an EAGLE-3 head that drafts all tokens in one pass."""

from typing import TYPE_CHECKING

from draftlab.drafters import drafter
from draftlab.drafters.eagle import EagleHeadSpec

if TYPE_CHECKING:
    import numpy as np

    from draftlab.engine.drafters.context import DrafterContext, DrafterRun
    from draftlab.engine.drafters.eagle import EagleDrafter
    from draftlab.latency.steps import Passes
    from draftlab.model.eagle_llama import EagleLlama
    from draftlab.model.hf_decoder import HFDecoder
    from draftlab.model.llama import Llama


@drafter("peagle", served_by=("vllm",))
class PEagleSpec(EagleHeadSpec):
    """Drafts with a P-EAGLE head.

    heads: Directory of the head, in the layout of speculators, or in the layout of SpecForge with a mask_token_id.
    """

    format = "P-EAGLE"
    module = "draftlab.model.peagle"
    remedy = ""
    by_age = True
    cache_lag = 1  # as for an EAGLE-3 head, see EagleSpec
    acceptance = EagleHeadSpec.chains

    @classmethod
    def drafter(cls, target: "Llama | HFDecoder", head: "EagleLlama") -> "EagleDrafter":
        from draftlab.engine.drafters.peagle import PEagleDrafter

        return PEagleDrafter(target, head)

    def build(self, context: "DrafterContext") -> "DrafterRun":
        return context.run(self.head_drafter(context), facts=self.facts())

    @classmethod
    def step_cost(cls, passes: "Passes", k: int, accepted: int) -> "np.ndarray":
        return passes.step(k, unread=accepted + 1, at_once=True)
