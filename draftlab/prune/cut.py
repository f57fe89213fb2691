"""Keep: what of a source survives. Cutting weights by it, and writing them in another basis, through the axis table.

D hidden dimensions of the source, D' of the draft. The views here are lazy: a tensor is read, turned and cut when it
is asked for, one at a time.
"""

from collections.abc import Iterator, Mapping

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from draftlab.model.checkpoint import layer_of
from draftlab.model.shape import Axis, Shape

# the norm whose scale a matrix reads
READS = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}


class Keep(BaseModel):
    """Kept indices into the source, ascending. heads, kv_heads and ffn have one list per kept layer.

    Under a rotated basis hidden counts principal components, the largest first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: list[int]
    hidden: list[int]
    heads: list[list[int]]
    kv_heads: list[list[int]]
    ffn: list[list[int]]


def keep_all(shape: Shape) -> Keep:
    every = list(range(shape.layers))
    return Keep(
        layers=every,
        hidden=list(range(shape.hidden)),
        heads=[list(range(shape.heads)) for _ in every],
        kv_heads=[list(range(shape.kv_heads)) for _ in every],
        ffn=[list(range(shape.ffn)) for _ in every],
    )


class Cut(Mapping[str, Tensor]):
    """The tensors of the draft, of the given shape, cut out of the source's."""

    def __init__(self, weights: Mapping[str, Tensor], shape: Shape, keep: Keep) -> None:
        self.weights, self.shape, self.keep = weights, shape, keep
        self._axes = shape.axes()

    def __getitem__(self, name: str) -> Tensor:
        layer = layer_of(name)
        tensor = self.weights[name if layer is None else name.replace(f".{layer}.", f".{self.keep.layers[layer]}.", 1)]
        for dim, axis in enumerate(self._axes[name]):
            kept = self._kept_on(axis, layer)
            tensor = tensor if kept is None else tensor.index_select(dim, kept)
        return tensor.contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    def _kept_on(self, axis: Axis, layer: int | None) -> Tensor | None:
        """Source indices along an axis of a draft's layer; None where nothing is cut."""
        if axis == "hidden":
            return torch.tensor(self.keep.hidden)
        if layer is None or axis in ("vocab", "head_dim"):
            return None
        if axis == "ffn":
            return torch.tensor(self.keep.ffn[layer])
        heads = torch.tensor(self.keep.heads[layer] if axis == "q" else self.keep.kv_heads[layer])
        return (heads.unsqueeze(1) * self.shape.head_dim + torch.arange(self.shape.head_dim)).flatten()


class Rotated(Mapping[str, Tensor]):
    """The source with its residual stream x written as x R, R [D, D] orthogonal; the same function.

    An RMSNorm commutes with a rotation once its scale is moved into the matrices that read it (SliceGPT, 2401.15024,
    eq. 2). One R for the whole model keeps it a plain LLaMA. A tied head reads the embedding without a scale of its
    own, so only untied models can be rotated.
    """

    def __init__(self, weights: Mapping[str, Tensor], shape: Shape, rotation: Tensor) -> None:
        if shape.tied:
            raise ValueError("a tied head cannot take in the last norm's scale")
        self.weights, self.rotation = weights, rotation.float()
        self._axes = shape.axes()

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.weights[name]
        if name.endswith("norm.weight") and self._axes[name] == ("hidden",):
            return torch.ones_like(tensor)
        turned = tensor.float()
        scale = self._scale(name)
        turned = turned if scale is None else turned * scale
        for dim, axis in enumerate(self._axes[name]):
            if axis == "hidden":
                turned = (turned.movedim(dim, -1) @ self.rotation).movedim(-1, dim)
        return turned.to(tensor.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    def _scale(self, name: str) -> Tensor | None:
        if name == "lm_head.weight":
            return self.weights["model.norm.weight"].float()
        part = name.split(".", 3)[-1].removesuffix(".weight")
        norm = READS.get(part) if name.startswith("model.layers.") and name.endswith(".weight") else None
        return None if norm is None else self.weights[f"model.layers.{layer_of(name)}.{norm}.weight"].float()
