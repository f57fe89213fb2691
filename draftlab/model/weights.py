"""The tensors of a checkpoint, read lazily; buffers that transformers ignores are ignored."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftlab.errors import UserError
from draftlab.model.hub import weight_files

# Buffers that checkpoints of LLaMA 1 and 2 and their age hold and that no model reads: transformers makes them itself.
BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.masked_bias|position_ids)$")
PIECE_BYTES = 1 << 25
STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Weights(Mapping[str, Tensor]):
    """The tensors of a checkpoint's safetensors files, read one at a time when asked for, as dtype on device.

    Files are read and not mapped, large tensors a piece at a time: pages of a mapping and a copy in another dtype would
    count as memory beside the tensor itself.

    Raises:
        UserError: a file that is missing, cut off or no safetensors; a tensor that is there twice or not at all; on
            reading, one that holds NaN.
    """

    def __init__(self, directory: Path, dtype: torch.dtype | None = None, device: torch.device | None = None) -> None:
        """dtype, device: left out, as stored, in memory."""
        self.directory, self._as, self._device = directory, dtype, device
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stored: dict[str, str] = {}
        seen: dict[str, Path] = {}
        for file, listed in weight_files(directory).items():
            headers = _headers(file)
            lost, twice = sorted((listed or set()) - set(headers)), sorted(set(headers) & set(seen))
            if lost:
                raise UserError(f"{file} has no tensor {lost[0]!r}, which the index takes from it")
            if twice:
                raise UserError(f"{directory} holds {twice[0]!r} twice: in {seen[twice[0]].name} and {file.name}")
            seen |= dict.fromkeys(headers, file)
            for name, (shape, stored) in headers.items():
                if (listed is None or name in listed) and not BUFFERS.search(name) and stored != "BOOL":
                    self._files[name], self._shapes[name], self._stored[name] = file, shape, stored

    def __getitem__(self, name: str) -> Tensor:
        rows, stored = self._slice(name), STORED.get(self._stored[name])
        if stored is None or not self._shapes[name]:
            return rows[...].to(self._device)
        tensor = torch.empty(self._shapes[name], dtype=self._as or stored, device=self._device)
        step = max(1, PIECE_BYTES * len(tensor) // max(1, stored.itemsize * tensor.numel()))
        for at in range(0, len(tensor), step):
            piece = rows[at : min(at + step, len(tensor))]
            check_finite(piece, name, self.directory)
            tensor[at : at + step] = piece
        return tensor

    def slices(self) -> dict[str, Any]:
        """Return what transformers takes for a state dict and reads when it needs it."""
        return {name: self._slice(name) for name in self}

    def _slice(self, name: str) -> Any:
        return safe_open(self._files[name], framework="pt", backend="pread").get_slice(name)

    @property
    def parameters(self) -> int:
        """How many values all tensors hold."""
        return sum(torch.Size(shape).numel() for shape in self._shapes.values())

    @property
    def dtype(self) -> torch.dtype:
        """What most values are stored as.

        Raises:
            UserError: as no floating-point type that is computed with: quantised.
        """
        values: Counter[str] = Counter()
        for name, shape in self._shapes.items():
            values[self._stored[name]] += torch.Size(shape).numel()
        most = values.most_common(1)[0][0]
        if most not in STORED:
            raise UserError(
                f"{self.directory} is quantised (its weights are stored as {most}); name the plain checkpoint"
            )
        return STORED[most]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def check_finite(tensor: Tensor, name: str, directory: Path) -> None:
    """Raises UserError: NaN or infinity among the values."""
    if (
        tensor.dtype in STORED.values()
        and tensor.numel()
        and not torch.isfinite(torch.stack(torch.aminmax(tensor))).all()
    ):
        raise UserError(f"{directory}: {name} holds values that are not finite (NaN or infinity)")


def _headers(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    try:
        with safe_open(file, framework="pt") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            return {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is not a readable safetensors file: {error}") from None
