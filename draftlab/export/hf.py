"""A draft as a Hugging Face directory that runtimes take: as many logits as the target, one dtype."""

from pathlib import Path

import torch

from draftlab.distill.vocabulary import resize
from draftlab.export.gguf import TYPES, rounded
from draftlab.model import checkpoint, saving


def write(draft: Path, out: Path, *, words_from: Path, vocab: int | None, dtype: torch.dtype | None) -> list[str]:
    """Write it into out, with the tokenizer of words_from; what was changed, in words."""
    changed = []
    stored = checkpoint.stored_dtype(draft)
    if dtype is not None and dtype != stored:
        changed.append(f"weights from {checkpoint.dtype_name(stored)} to {checkpoint.dtype_name(dtype)}")
    kept = ((name, tensor.to(dtype or stored)) for name, tensor in checkpoint.Weights(draft).items())
    saving.write_checkpoint(out, checkpoint.read_config(draft), kept, words_from)
    if vocab is not None and (resized := resize(out, vocab)):
        changed.append(f"logits {resized}")
    if _words(words_from) != _words(draft):
        changed.append(f"tokenizer files of {words_from.name}")
    return changed


def write_fake_quantized(draft: Path, out: Path, kind: str) -> None:
    """Write draft into out, in float32, with every matrix rounded as GGUF's kind keeps it."""
    weights = (
        (name, rounded(tensor.float(), kind) if tensor.ndim == 2 else tensor.float())
        for name, tensor in checkpoint.Weights(draft).items()
    )
    saving.write_checkpoint(out, checkpoint.read_config(draft), weights, draft)


def parse_quantized_name(name: str) -> tuple[str, str | None]:
    """'draft@q8_0' is draft, and a type of TYPES; any other name is itself."""
    base, _, kind = name.rpartition("@")
    return (base, kind) if base and kind in TYPES else (name, None)


def _words(directory: Path) -> list[bytes | None]:
    files = (directory / name for name in saving.TOKENIZER_FILES)
    return [file.read_bytes() if file.is_file() else None for file in files]
