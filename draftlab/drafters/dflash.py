"""A DFlash head, which drafts a block of tokens in one pass from the states of the target."""

from pathlib import Path
from typing import TYPE_CHECKING

from draftlab import provenance
from draftlab.drafters import DrafterSpec, Input, RunFacts, drafter
from draftlab.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from draftlab.engine.drafters.context import DrafterContext, DrafterRun
    from draftlab.latency.steps import Passes


@drafter("dflash", served_by=("vllm", "sglang"))
class DFlashSpec(DrafterSpec):
    """heads: a DFlash head as z-lab publishes it, or in the layout of speculators."""

    by_age = True
    heads: str

    def inputs(self) -> list[Input]:
        return [Input(self.heads, self._check_heads)]

    def _check_heads(self, name: str, weights: bool) -> None:
        if not (Path(name) / "config.json").is_file():
            raise UserError(f"--drafter {self.text}: {name} has no DFlash head (config.json is missing)")

    def check(self, run: RunFacts) -> None:
        super().check(run)
        from draftlab.model import dflash

        dflash.check(Path(self.heads), run.target)

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab.engine.drafters.dflash import DFlashDrafter
        from draftlab.model import dflash
        from draftlab.model.hf_decoder import HFDecoder
        from draftlab.model.llama import Llama

        target = context.target
        if not isinstance(target, Llama | HFDecoder):
            raise self.refused_by_transformers()
        model = dflash.load(Path(self.heads), context.target_path, target.embed, target.head)
        ks = [k for k in context.ks if k <= model.config.most]
        if not ks:
            raise UserError(f"--k: the block of {self.heads} drafts at most {model.config.most} tokens")
        facts = {"heads_sha256": provenance.fingerprint(Path(self.heads))}
        return context.run(DFlashDrafter(target, model), ks=ks, facts=facts)

    @classmethod
    def step_cost(cls, passes: "Passes", k: int, accepted: int) -> "np.ndarray":
        return passes.step(k, unread=accepted + 1, at_once=True)
