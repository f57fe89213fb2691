"""Models with random weights, to time the passes of a shape."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from draftlab.model.llama import Llama
from draftlab.model.shape import Shape


class RandomWeights(Mapping[str, Tensor]):
    """Random weights of a shape, drawn each time they are read, so that memory has them once."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.axes, self.dtype, self.device = shape, shape.axes(), dtype, device

    def __getitem__(self, name: str) -> Tensor:
        size = self.shape.dims(self.axes[name])
        if len(size) == 1:
            return torch.ones(size, dtype=self.dtype, device=self.device)
        return torch.randn(size, dtype=self.dtype, device=self.device).mul_(size[-1] ** -0.5)

    def __iter__(self) -> Iterator[str]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)


def random_model(shape: Shape, dtype: torch.dtype, device: torch.device, context: int) -> Llama:
    """Return a model of that shape with random weights, which take the time of trained weights."""
    frequencies = 10000.0 ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    model = Llama(shape, RandomWeights(shape, dtype, device), frequencies, 1.0, 1e-6, context)
    if shape.draft_vocab is not None:
        model.trim_head(list(range(shape.draft_vocab)))
    return model
