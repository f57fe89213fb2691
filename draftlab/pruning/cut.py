"""Lazy views of a source's weights: cut to the kept indices, or rotated. model/shape.py names the axes of each tensor.

A tensor is read, rotated and cut when it is looked up.
Shapes: D hidden dimensions of the source, D' of the draft.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from draftlab.model.checkpoint import layer_of
from draftlab.model.devices import exact_products
from draftlab.model.shape import Axis, Shape
from draftlab.reading import FileModel

# a matrix -> the norm whose output the matrix reads, both by their roles in model/shape.py
READS = {
    "q": "input_norm",
    "k": "input_norm",
    "v": "input_norm",
    "gate": "post_norm",
    "up": "post_norm",
    "head": "norm",
}


class Keep(FileModel):
    """Indices of the layers, hidden dimensions, heads and neurons of the source to keep, ascending.

    heads, kv_heads and ffn have one list for each kept layer. If the residual stream is rotated, `hidden` has indices
    of principal components. Component 0 is the largest.
    """

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


class TensorView(Mapping[str, Tensor]):
    """A lazy mapping of weights, whose keys are the tensor names of a shape."""

    def __init__(self, weights: Mapping[str, Tensor], shape: Shape) -> None:
        self.weights = weights
        self.shape = shape
        self.axes = shape.axes()
        self.roles: dict[str, str] = {}
        for layer in range(shape.layers):
            self.roles |= {name: role for role, name in shape.names(layer).items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)


class Untied(TensorView):
    """The weights of a source with tied embeddings, plus a separate head, which is a copy of the embedding."""

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[self.shape.names()["embed"] if self.roles[name] == "head" else name]


class Cut(TensorView):
    """The weights of the source, cut to a smaller shape."""

    def __init__(self, weights: Mapping[str, Tensor], shape: Shape, keep: Keep) -> None:
        super().__init__(weights, shape)
        self.keep = keep

    def __getitem__(self, name: str) -> Tensor:
        layer = layer_of(name)
        tensor = self.weights[name if layer is None else name.replace(f".{layer}.", f".{self.keep.layers[layer]}.", 1)]
        for dim, axis in enumerate(self.axes[name]):
            indices = self._indices(axis, layer)
            # indices are ascending, so as many as there are keep the whole axis
            if indices is not None and len(indices) < tensor.shape[dim]:
                tensor = tensor.index_select(dim, indices)
        return tensor.contiguous()

    def _indices(self, axis: Axis, layer: int | None) -> Tensor | None:
        """Return the indices of the source to keep along an axis, or None to keep all. layer: Layer of the draft."""
        if axis == "hidden":
            return torch.tensor(self.keep.hidden)
        if layer is None or axis in ("vocab", "head_dim"):
            return None
        if axis == "ffn":
            return torch.tensor(self.keep.ffn[layer])
        heads = torch.tensor(self.keep.heads[layer] if axis == "q" else self.keep.kv_heads[layer])
        return (heads.unsqueeze(1) * self.shape.head_dim + torch.arange(self.shape.head_dim)).flatten()


class Rotated(TensorView):
    """The weights of the source after its residual stream x, [T, D], is mapped to x R, [T, D'].

    The matrix R, [D, D'], has orthonormal columns. If D' = D, R is a rotation, and the logits stay the same. If D' < D,
    the stream keeps only D' directions.

    An RMSNorm commutes with a rotation if its scale is first moved into the matrices after the norm (SliceGPT,
    2401.15024, eq. 2). All layers share one R, so the model stays a plain LLaMA. A tied head cannot take the last
    norm's scale, so tied models are refused. Products are computed on the device of R.

    Raises:
        ValueError: The embeddings are tied.
    """

    def __init__(self, weights: Mapping[str, Tensor], shape: Shape, rotation: Tensor) -> None:
        if shape.tied:
            raise ValueError("a model with tied embeddings cannot be rotated; untie the head first")
        super().__init__(weights, shape)
        self.rotation = rotation.float()

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.weights[name]
        if self.roles[name] in READS.values():
            return torch.ones_like(tensor)
        rotated = tensor.to(self.rotation)
        if (norm := READS.get(self.roles[name])) is not None:
            scale = self.weights[self.shape.names(layer_of(name) or 0)[norm]]
            rotated = rotated * scale.to(rotated)
        for dim, axis in enumerate(self.axes[name]):
            if axis == "hidden":
                with exact_products():
                    rotated = (rotated.movedim(dim, -1) @ self.rotation).movedim(-1, dim)
        return rotated.to(tensor)
