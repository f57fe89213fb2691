"""Options of draft models that end a draft early, at low confidence or high entropy."""

from typing import TYPE_CHECKING

from pydantic import Field

from draftlab.drafters.base import drafter
from draftlab.drafters.model import DraftModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from draftlab.drafters.context import DrafterContext, DrafterRun


class StopSpec(DraftModelSpec):
    """Base class of draft models that end a draft early."""

    def stops(self, p: "Tensor") -> "Tensor":
        """Return whether each row stops, [B], from the draft's probabilities at temperature 1, [B, V]."""
        raise NotImplementedError

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab_research.drafting.stops import ConfidenceStopDrafter

        model = context.load_draft(self.text, self.draft)
        return context.run(ConfidenceStopDrafter(model, context.vocab, self.stops), model=model)


@drafter("confidence-stop")
class ConfidenceStopSpec(StopSpec):
    """Options of the drafter confidence-stop. threshold: Largest probability below which a draft ends.

    transformers does the same with assistant_confidence_threshold.
    """

    threshold: float = Field(0.4, ge=0, le=1)

    def stops(self, p: "Tensor") -> "Tensor":
        return p.amax(-1) < self.threshold


@drafter("entropy-stop")
class EntropyStopSpec(StopSpec):
    """Options of the drafter entropy-stop. threshold: Entropy in nats above which a draft ends.

    The entropy bounds the acceptance rate (SVIP, 2411.18462).
    """

    threshold: float = Field(1.5, ge=0)

    def stops(self, p: "Tensor") -> "Tensor":
        import torch

        return torch.special.entr(p).sum(-1) > self.threshold
