"""Options of draft models that end a draft early, at low confidence or high entropy."""

from typing import TYPE_CHECKING

from pydantic import Field

from draftlab.drafters import drafter
from draftlab.drafters.model import DraftModelSpec

if TYPE_CHECKING:
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun
    from draftlab_research.drafting.stops import StopRule


class StopSpec(DraftModelSpec):
    """Base class of draft models that end a draft by a StopRule."""

    def rule(self) -> "StopRule":
        raise NotImplementedError

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab_research.drafting.stops import ConfidenceStopDrafter

        model = context.load_draft(self.text, self.draft)
        return context.run(ConfidenceStopDrafter(model, context.vocab, self.rule()), model=model)


@drafter("confidence-stop")
class ConfidenceStopSpec(StopSpec):
    threshold: float = Field(0.4, ge=0, le=1)

    def rule(self) -> "StopRule":
        from draftlab_research.drafting.stops import confidence_below

        return confidence_below(self.threshold)


@drafter("entropy-stop")
class EntropyStopSpec(StopSpec):
    """Options of the drafter entropy-stop. threshold: Entropy in nats above which a draft ends."""

    threshold: float = Field(1.5, ge=0)

    def rule(self) -> "StopRule":
        from draftlab_research.drafting.stops import entropy_above

        return entropy_above(self.threshold)
