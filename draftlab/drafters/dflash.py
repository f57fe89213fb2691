"""The drafter dflash: a DFlash head reads the target's states, and drafts a block of tokens in one pass."""

from pathlib import Path
from typing import TYPE_CHECKING

from draftlab.console import note
from draftlab.drafters import drafter
from draftlab.drafters.eagle import HeadSpec
from draftlab.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from draftlab.acceptance.token_logprobs import TokenLogprobs
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun
    from draftlab.engine.drafters.states import HeadPasses
    from draftlab.engine.generate import Drafter
    from draftlab.latency.steps import Passes
    from draftlab.model import Mode
    from draftlab.model.dflash import DFlash
    from draftlab.model.hf_decoder import HFDecoder
    from draftlab.model.llama import Llama
    from draftlab.model.size import ApproximateSize
    from draftlab.target_outputs.replay import ReplayContext


class BlockSpec(HeadSpec):
    """Base class of drafters with a head that drafts a block of tokens in one pass."""

    by_age = True

    @classmethod
    def load(cls, folder: Path, target_path: Path, target: "Llama | HFDecoder", device: "torch.device") -> "DFlash":
        """Load a head on a device, with the embedding and output layer of its target. Raises UserError: See read."""
        shared = (target.embed.to(device), target.head.to(device))
        return cls.model().load(folder, target_path, *shared)

    def drafter(self, target: "Llama | HFDecoder", head: "DFlash") -> "Drafter":
        raise NotImplementedError

    def build(self, context: "DrafterContext") -> "DrafterRun":
        target = self.readable(context.target)
        head = self.load(Path(self.heads), context.target_path, target, context.device)
        self._check_block(min(context.ks), head.config.most)
        ks = [k for k in context.ks if k <= head.config.most]
        if len(ks) < len(context.ks):
            note(
                f"{self.heads} drafts at most {head.config.most} tokens in one pass, so larger values of --k are left "
                "out"
            )
        return context.run(self.drafter(target, head), ks=ks, facts=self.facts())

    @classmethod
    def size_of(cls, folder: Path, target: Path) -> "ApproximateSize":
        return cls.read(folder, target).size

    @classmethod
    def passes_of(cls, folder: Path, target_path: Path, target: "Llama | HFDecoder", mode: "Mode") -> "HeadPasses":
        from draftlab.engine.drafters.dflash import BlockPasses

        return BlockPasses(cls.load(folder, target_path, target, target.device))

    @classmethod
    def step_cost(cls, passes: "Passes", k: int, accepted: int) -> "np.ndarray":
        return passes.block(k)

    def acceptance(self, replay: "ReplayContext") -> "list[TokenLogprobs]":
        from draftlab.acceptance.block_logprobs import score_blocks

        folder = Path(self.heads)
        self._check_block(replay.most, self.read(folder, replay.target_path).most)
        target = self.readable(replay.load_target())
        head = self.load(folder, replay.target_path, target, target.device)
        return score_blocks(target, head, replay.texts, replay.vocab, replay.sampling, replay.most, replay.advance)

    def _check_block(self, k: int, most: int) -> None:
        if k > most:
            raise UserError(f"--k {k}: {self.heads} drafts at most {most} tokens in one pass; use --k {most} or less")


@drafter("dflash", served_by=("vllm", "sglang"))
class DFlashSpec(BlockSpec):
    """Drafts with a DFlash head. heads: Directory of the head, in the layout of z-lab or of speculators."""

    format = "DFlash"
    module = "draftlab.model.dflash"

    def drafter(self, target: "Llama | HFDecoder", head: "DFlash") -> "Drafter":
        from draftlab.engine.drafters.dflash import DFlashDrafter

        return DFlashDrafter(target, head)
