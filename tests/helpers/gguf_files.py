"""GGUF files as tests read them."""

from pathlib import Path

import gguf as library
import numpy as np
import torch


def contents(file: Path) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Settings and tensors, dequantised."""
    reader = library.GGUFReader(file)
    fields = {f.name: f.contents() for f in reader.fields.values()}
    tensors = {
        t.name: torch.from_numpy(
            np.array(t.data if t.tensor_type.name == "I64" else library.quants.dequantize(t.data, t.tensor_type))
        )
        for t in reader.tensors
    }
    return fields, tensors


def neighbours_apart(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return rows of each head from llama.cpp's order (0, C/2, 1, C/2 + 1, ...) to that of Hugging Face."""
    order = torch.cat([torch.arange(0, head_dim, 2), torch.arange(1, head_dim, 2)])
    heads = weight.shape[0] // head_dim
    return weight.view(heads, head_dim, *weight.shape[1:])[:, order].flatten(0, 1)
