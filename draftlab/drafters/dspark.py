"""The drafter dspark: a DSpark head computes several tokens in one pass, but samples them one after the other."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import Field

from draftlab.drafters import RunFacts, drafter
from draftlab.drafters.dflash import BlockSpec
from draftlab.errors import UserError

if TYPE_CHECKING:
    from draftlab.engine.generate import Drafter
    from draftlab.model.dflash import DFlash
    from draftlab.model.dspark import DSpark
    from draftlab.model.hf_decoder import HFDecoder
    from draftlab.model.llama import Llama


@drafter("dspark", served_by=("vllm", "sglang"))
class DSparkSpec(BlockSpec):
    """Drafts with a DSpark head.

    heads: Directory of the head, in the layout of speculators or of DeepSeek.
    least_confidence: Least estimated probability that all tokens of a draft are accepted. A draft ends before the token
    with which the probability would be lower.
    """

    format = "DSpark"
    module = "draftlab.model.dspark"
    least_confidence: float = Field(0.0, ge=0, lt=1)

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if self.least_confidence and not self.read(Path(self.heads), run.target).confidence:
            raise UserError(
                f"--drafter {self.text}: this DSpark head does not predict confidences; leave least_confidence out"
            )

    def drafter(self, target: "Llama | HFDecoder", head: "DFlash") -> "Drafter":
        from draftlab.engine.drafters.dspark import DSparkDrafter

        return DSparkDrafter(target, cast("DSpark", head), self.least_confidence)

    @property
    def replays(self) -> bool:
        # least_confidence makes the number of drafted tokens random
        return not self.least_confidence
