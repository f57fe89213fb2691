"""P-EAGLE heads (2602.01469): EAGLE-3 heads, of one or several layers, that draft all tokens in one pass.

The pass reads the text's tokens with the target's states, and then mask tokens. All mask tokens have the same learnt
state in place of a state of the target. A mask token attends to the text and to the mask tokens before it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from draftlab.model import eagle
from draftlab.model.eagle import Head, HeadShape
from draftlab.model.eagle_llama import EagleLlama
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.hub import MASK_FIELDS
from draftlab.model.llama import Llama
from draftlab.model.shape import Shape


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
    shape = eagle.check_as(PEagleShape, folder, target)
    eagle.check_mask_token(shape.mask_token_id, shape.vocab, folder)
    return shape


def load(folder: Path, target_path: Path, target: Llama | HFDecoder, device: torch.device) -> PEagle:
    """Load a P-EAGLE head in the dtype of its target. Raises UserError: the errors of check and eagle.read_as."""
    shape, embedding = check(folder, target_path), target.embed.to(device)
    return PEagle(eagle.read_as(shape, folder, target_path, embedding.dtype, device), embedding, folder)
