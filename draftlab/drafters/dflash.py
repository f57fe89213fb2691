"""A DFlash head, which drafts a block of tokens in one pass from the states of the target."""

from pathlib import Path
from typing import TYPE_CHECKING

from draftlab.drafters import RunFacts, drafter
from draftlab.drafters.eagle import HeadSpec
from draftlab.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from draftlab.engine.drafters.context import DrafterContext, DrafterRun
    from draftlab.latency.steps import Passes


@drafter("dflash", served_by=("vllm", "sglang"))
class DFlashSpec(HeadSpec):
    """heads: a DFlash head as z-lab publishes it, or in the layout of speculators."""

    format = "DFlash"
    by_age = True

    def check(self, run: RunFacts) -> None:
        super().check(run)
        from draftlab.model import dflash

        dflash.check(Path(self.heads), run.target)

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab.engine.drafters.dflash import DFlashDrafter
        from draftlab.model import dflash

        target = self.target_of(context)
        model = dflash.load(Path(self.heads), context.target_path, target.embed, target.head)
        ks = [k for k in context.ks if k <= model.config.most]
        if not ks:
            raise UserError(
                f"--k: the block of {self.heads} drafts at most {model.config.most} tokens"
            )
        return context.run(DFlashDrafter(target, model), ks=ks, facts=self.facts())

    @classmethod
    def step_cost(cls, passes: "Passes", k: int, accepted: int) -> "np.ndarray":
        return passes.step(k, unread=accepted + 1, at_once=True)
