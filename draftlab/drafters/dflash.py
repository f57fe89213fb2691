"""A DFlash head, which drafts a block of tokens in one pass from the states of the target."""

from pathlib import Path
from typing import TYPE_CHECKING

from draftlab.drafters import RunFacts, drafter
from draftlab.drafters.eagle import HeadSpec
from draftlab.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from draftlab.acceptance.token_logprobs import TokenLogprobs
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun
    from draftlab.engine.drafters.states import HeadPasses
    from draftlab.latency.steps import Passes
    from draftlab.model import Mode
    from draftlab.model.llama import Llama
    from draftlab.model.size import ApproximateSize
    from draftlab.target_outputs.replay import ReplayContext


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
        self._check_block(min(context.ks), model.config.most)
        ks = [k for k in context.ks if k <= model.config.most]
        return context.run(DFlashDrafter(target, model), ks=ks, facts=self.facts())

    @classmethod
    def size_of(cls, folder: Path, target: Path) -> "ApproximateSize":
        from draftlab.model import dflash

        return dflash.check(folder, target).size

    @classmethod
    def passes_of(
        cls, folder: Path, target_path: Path, target: "Llama", mode: "Mode"
    ) -> "HeadPasses":
        from draftlab.engine.drafters.dflash import BlockPasses
        from draftlab.model import dflash

        return BlockPasses(dflash.load(folder, target_path, target.embed, target.head))

    @classmethod
    def step_cost(cls, passes: "Passes", k: int, accepted: int) -> "np.ndarray":
        return passes.block(k)

    def acceptance(self, replay: "ReplayContext") -> "list[TokenLogprobs]":
        from draftlab.acceptance.block_logprobs import score_blocks
        from draftlab.model import dflash

        folder = Path(self.heads)
        self._check_block(replay.most, dflash.check(folder, replay.target_path).most)
        target = replay.load_target()
        head = dflash.load(folder, replay.target_path, target.embed, target.head)
        return score_blocks(
            target, head, replay.texts, replay.vocab, replay.sampling, replay.most, replay.advance
        )

    def _check_block(self, k: int, most: int) -> None:
        if k > most:
            raise UserError(f"--k: the block of {self.heads} drafts at most {most} tokens")
