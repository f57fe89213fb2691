"""The drafter peagle (P-EAGLE, 2602.01469): EAGLE-3 heads of one or several layers that draft all tokens in one pass.

The pass reads the text's new tokens with the target's states, and then mask tokens. All mask tokens have the same
learnt state in place of a state of the target. A mask token attends to the text and to the mask tokens before it.

B rows (texts of a batch), T positions, K drafted tokens, D hidden, V vocab. Positions are those of EAGLE-3, see
draftlab/heads/eagle3/drafter.py. The mask tokens follow the last position. The distribution q of a drafted token does
not depend on the other drafted tokens, so the verify rules for chains are lossless.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from draftlab.acceptance.token_logprobs import TokenLogprobs
from draftlab.drafters.base import drafter
from draftlab.drafters.context import DrafterContext, DrafterRun, ReplayContext
from draftlab.drafters.passes import Passes
from draftlab.engine.generate import Draft, TokenIds, draw_each
from draftlab.heads.base import check_mask_token
from draftlab.heads.eagle3 import layout
from draftlab.heads.eagle3.decoder import EagleLlama
from draftlab.heads.eagle3.drafter import EagleDrafter, EagleHeadSpec
from draftlab.heads.eagle3.layout import Head, HeadShape
from draftlab.model.devices import staged
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.hub import MASK_FIELDS
from draftlab.model.llama import Llama
from draftlab.model.shape import Shape
from draftlab.sampling import SamplingParams


class PEagleShape(HeadShape):
    """Sizes of a P-EAGLE head. mask_token_id: Id of the mask token."""

    kind: ClassVar[str] = "peagle"
    many_layers: ClassVar[bool] = True

    layers: int = Field(ge=1)
    mask_token_id: int = Field(ge=0)

    @classmethod
    def own_fields(cls, content: Mapping[str, Any], layers: int) -> dict[str, Any]:
        masks = {content[name] for name in MASK_FIELDS & content.keys()}
        if len(masks) > 1:
            raise ValueError(f"the mask token has several ids; write the same id in {', '.join(sorted(MASK_FIELDS))}")
        return {"layers": layers, "mask_token_id": masks.pop() if masks else None}

    @property
    def shape(self) -> Shape:
        return self.shape_of(self.layers, self.qk_norm)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        states = self.target_hidden * len(self.layer_ids)
        return super().sizes() | {"mask_hidden": (1, 1, states)}


class PEagle(EagleLlama):
    """A P-EAGLE head: an EagleLlama whose attribute `mask` is set."""

    def __init__(self, head: Head, embedding: Tensor, directory: Path) -> None:
        super().__init__(head, embedding, directory)
        assert isinstance(head.config, PEagleShape)
        state = self.combine(head.weights["mask_hidden"].flatten())
        self.mask = head.config.mask_token_id, state


def check(folder: Path, target: Path) -> PEagleShape:
    """Check config.json and the tensor sizes of a P-EAGLE head, and return its shape. No weights are read.

    Raises:
        UserError: the folder has no P-EAGLE head, the head is for another target, or draftlab does not support it.
    """
    shape = layout.check_as(PEagleShape, folder, target)
    check_mask_token(shape.mask_token_id, shape.vocab, folder)
    return shape


def load(folder: Path, target_path: Path, target: Llama | HFDecoder, device: torch.device) -> PEagle:
    """Load a P-EAGLE head in the dtype of its target. Raises UserError: the errors of check and layout.read_as."""
    shape = check(folder, target_path)
    embedding = target.embed.to(device)
    return PEagle(layout.read_as(shape, folder, target_path, embedding.dtype, device), embedding, folder)


class PEagleDrafter(EagleDrafter):
    """Drafts a chain with one pass of a P-EAGLE head."""

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        assert self.head.mask is not None  # PEagle sets it
        token, state = self.head.mask
        starts, places = self.new_positions(texts)
        states = F.pad(self.head.combine(self.states_at(places)), (0, 0, 0, count - 1))
        new = torch.arange(states.shape[1], device=states.device)
        unread = [len(text) - 1 - start for text, start in zip(texts, starts, strict=True)]
        masked = new >= staged(unread, states.device).unsqueeze(1)
        states = torch.where(masked.unsqueeze(-1), state, states)  # [B, T + K - 1, D]
        logits, _, at = self.run(texts, starts, states, token)
        chosen = (at - at.min()).unsqueeze(1) + new[:count]
        logits = logits.gather(1, chosen.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
        return draw_each(logits, uniform, sampling, self.vocab)


@drafter("peagle", served_by=("vllm",))
class PEagleSpec(EagleHeadSpec):
    """Drafts with a P-EAGLE head.

    heads: Directory of the head, in the layout of speculators, or in the layout of SpecForge with a mask_token_id.
    """

    format = "P-EAGLE"
    remedy = ""
    by_age = True
    cache_lag = 1  # as for an EAGLE-3 head, see EagleSpec

    @classmethod
    def read(cls, folder: Path, target: Path) -> PEagleShape:
        return check(folder, target)

    @classmethod
    def load(cls, folder: Path, target_path: Path, target: Llama | HFDecoder, device: torch.device) -> PEagle:
        return load(folder, target_path, target, device)

    @classmethod
    def drafter(cls, target: Llama | HFDecoder, head: EagleLlama) -> EagleDrafter:
        return PEagleDrafter(target, head)

    def build(self, context: DrafterContext) -> DrafterRun:
        return context.run(self.head_drafter(context), facts=self.facts())

    @classmethod
    def step_cost(cls, passes: Passes, k: int, accepted: int) -> np.ndarray:
        return passes.step(k, unread=accepted + 1, at_once=True)

    def acceptance(self, replay: ReplayContext) -> list[TokenLogprobs]:
        return self.chains(replay)
