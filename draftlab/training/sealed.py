"""Tensors of unfinished runs, with their hash and their run's: damage and other runs' files are noticed."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from draftlab.atomic import run_identity
from draftlab.errors import UserError
from draftlab.model.saving import write_tensors
from draftlab.reading import reading


def save(file: Path, tensors: Mapping[str, Tensor], run: str | None = None) -> None:
    """Write tensors. run: identity of the run; None: of the one that claimed the folder of the file.

    Raises:
        UserError: the file cannot be written.
    """
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    facts = {"sha256": _digest(whole), "run": run_identity(file.parent) if run is None else run}
    write_tensors(file, whole, facts)


def load(file: Path, run: str | None = None) -> dict[str, Tensor]:
    """Return the tensors that save wrote.

    Raises:
        UserError: the file is missing, damaged or another run's.
    """
    advice = f"--force starts again, or remove {file.parent}"
    try:
        with reading(file):
            with safe_open(file, framework="pt") as handle:
                facts = handle.metadata() or {}
            tensors = load_file(file)
    except UserError as error:
        raise UserError(f"{error}; {advice}") from None
    if facts.get("sha256") != _digest(tensors):
        raise UserError(f"{file} is damaged: its hash is not the stored one; {advice}")
    if facts.get("run") != (run_identity(file.parent) if run is None else run):
        raise UserError(f"{file} is of another run; {advice}")
    return tensors


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
