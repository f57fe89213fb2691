"""Names, sizes and dtypes of a checkpoint's tensors, from the headers of its safetensors files. No torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from draftlab.errors import Quantised, UserError
from draftlab.model.hub import weight_files
from draftlab.reading import reading

# Buffers in checkpoints of the age of LLaMA 1 and 2 that no model reads: transformers computes them itself.
BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.masked_bias|position_ids)$")
FLOATS = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Header:
    """A tensor in a file. stored: its dtype as safetensors calls it."""

    file: Path
    shape: tuple[int, ...]
    stored: str

    @property
    def values(self) -> int:
        return math.prod(self.shape)


def read_headers(directory: Path) -> dict[str, Header]:
    """Return the tensors of a checkpoint by name, without the buffers that transformers ignores.

    Raises:
        UserError: a file is missing, truncated or not safetensors; a tensor is missing or there twice.
    """
    tensors: dict[str, Header] = {}
    files: dict[str, Path] = {}
    for file, listed in weight_files(directory).items():
        headers = _headers(file)
        missing, twice = sorted((listed or set()) - set(headers)), sorted(set(headers) & set(files))
        if missing:
            raise UserError(f"{file} has no tensor {missing[0]!r}, which the index assigns to it")
        if twice:
            raise UserError(f"{directory} has {twice[0]!r} twice: in {files[twice[0]].name} and {file.name}")
        files |= dict.fromkeys(headers, file)
        for name, header in headers.items():
            if (listed is None or name in listed) and not BUFFERS.search(name) and header.stored != "BOOL":
                tensors[name] = header
    return tensors


def check_stored(directory: Path, headers: Mapping[str, Header]) -> None:
    """Raises UserError: a tensor is not of a floating-point dtype of models."""
    odd = next((name for name, header in headers.items() if header.stored not in FLOATS), None)
    if odd is not None:
        raise Quantised(
            f"{directory} is quantised ({odd} is stored as {headers[odd].stored}); name the checkpoint with "
            "unquantised weights"
        )


def _headers(file: Path) -> dict[str, Header]:
    from safetensors import safe_open

    with reading(file), safe_open(file, framework="np") as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        return {name: Header(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
