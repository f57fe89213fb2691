"""Lazily read tensors of a checkpoint, without the buffers that transformers ignores."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from draftlab.errors import Quantised, UserError
from draftlab.model.headers import read_headers

PIECE_BYTES = 1 << 25
STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Weights(Mapping[str, Tensor]):
    """The tensors of a checkpoint's safetensors files, each read on access, as dtype on device.

    Files are read and not mapped, large tensors in pieces: pages of a mapping and a copy in another dtype would use
    memory beside the tensor itself.

    Raises:
        UserError: a file is missing, truncated or not safetensors; a tensor is missing or there twice; on access, a
            value is not finite.
    """

    def __init__(self, directory: Path, dtype: torch.dtype | None = None, device: torch.device | None = None) -> None:
        """dtype: default as stored. device: default the CPU."""
        self.directory, self._dtype, self._device = directory, dtype, device
        self._headers = read_headers(directory)

    def __getitem__(self, name: str) -> Tensor:
        rows, stored = self._slice(name), STORED.get(self._headers[name].stored)
        if stored is None or not self.shape(name):
            return rows[...].to(self._device)
        tensor = torch.empty(self.shape(name), dtype=self._dtype or stored, device=self._device)
        step = max(1, PIECE_BYTES * len(tensor) // max(1, stored.itemsize * tensor.numel()))
        for at in range(0, len(tensor), step):
            piece = rows[at : min(at + step, len(tensor))]
            check_finite(piece, name, self.directory)
            tensor[at : at + step] = piece
        return tensor

    def slices(self) -> dict[str, Any]:
        """Return a state dict of lazy slices, as transformers accepts it."""
        return {name: self._slice(name) for name in self}

    def _slice(self, name: str) -> Any:
        return safe_open(self._headers[name].file, framework="pt", backend="pread").get_slice(name)

    @property
    def parameters(self) -> int:
        """Return the number of values in all tensors."""
        return sum(header.values for header in self._headers.values())

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of most values.

        Raises:
            UserError: it is not a floating-point dtype of models; the checkpoint is quantised.
        """
        values: Counter[str] = Counter()
        for header in self._headers.values():
            values[header.stored] += header.values
        most = values.most_common(1)[0][0]
        if most not in STORED:
            raise Quantised(f"{self.directory} is quantised (to {most}); name the checkpoint with unquantised weights")
        return STORED[most]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._headers[name].shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __len__(self) -> int:
        return len(self._headers)


def check_tied(directory: Path) -> None:
    """Raises UserError: a tied head that is stored too differs from the embedding, so that transformers unties it."""
    weights = Weights(directory)
    if not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"]):
        raise UserError(
            f"{directory}: config.json ties head and embedding, but the two differ; "
            "set tie_word_embeddings to false in it"
        )


def check_weight(tensor: Tensor, name: str, directory: Path) -> None:
    """Raises UserError: not of a floating-point dtype, or with values that are not finite."""
    if tensor.dtype not in STORED.values():
        stored = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"{directory}: {name} is stored as {stored}, not as weights are")
    check_finite(tensor, name, directory)


def check_finite(tensor: Tensor, name: str, directory: Path) -> None:
    """Raises UserError: NaN or infinity among the values."""
    if (
        tensor.dtype in STORED.values()
        and tensor.numel()
        and not torch.isfinite(torch.stack(torch.aminmax(tensor))).all()
    ):
        raise UserError(f"{directory}: {name} has values that are not finite (NaN or infinity)")
