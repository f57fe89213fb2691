"""Options of draft models that end a draft early, at low confidence or high entropy."""

from typing import TYPE_CHECKING

from pydantic import Field

from draftlab.drafters import drafter
from draftlab.drafters.model import DraftModelSpec

if TYPE_CHECKING:
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun


@drafter("confidence-stop")
class ConfidenceStopSpec(DraftModelSpec):
    threshold: float = Field(0.4, ge=0, le=1)

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab_research.drafting.stops import ConfidenceStopDrafter, confidence_below

        model = context.load_draft(self.text, self.draft)
        return context.run(
            ConfidenceStopDrafter(model, context.vocab, confidence_below(self.threshold)),
            model=model,
        )


@drafter("entropy-stop")
class EntropyStopSpec(DraftModelSpec):
    """Options of the drafter entropy-stop. threshold: Entropy in nats above which a draft ends."""

    threshold: float = Field(1.5, ge=0)

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab_research.drafting.stops import ConfidenceStopDrafter, entropy_above

        model = context.load_draft(self.text, self.draft)
        return context.run(
            ConfidenceStopDrafter(model, context.vocab, entropy_above(self.threshold)), model=model
        )
