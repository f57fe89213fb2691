"""A draft as a Hugging Face directory that runtimes take: adapters merged, as many logits as the target, one dtype."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from draftlab import checkpoint, hub
from draftlab.distill.vocabulary import resize
from draftlab.errors import UserError
from draftlab.export.gguf import TYPES, rounded

ADAPTER = "adapter_config.json"


def locate(name: str | Path) -> Path:
    """A checkpoint, or a directory of peft's with adapters for one."""
    return Path(name) if (Path(name) / ADAPTER).is_file() else hub.locate(name)


def write(draft: Path, out: Path, *, words_from: Path, vocab: int | None, dtype: torch.dtype | None) -> list[str]:
    """Write it into out, with the tokenizer of words_from; what was changed, in words."""
    changed = []
    config, weights, stored = _opened(draft)
    if (draft / ADAPTER).is_file():
        changed.append("adapters merged")
    if dtype is not None and dtype != stored:
        changed.append(f"weights from {checkpoint.dtype_name(stored)} to {checkpoint.dtype_name(dtype)}")
    kept = ((name, tensor.to(dtype or stored)) for name, tensor in weights.items())
    checkpoint.write_checkpoint(out, config, kept, words_from)
    if vocab is not None and (resized := resize(out, vocab)):
        changed.append(f"logits {resized}")
    if _words(words_from) != _words(draft):
        changed.append(f"tokenizer files of {words_from.name}")
    return changed


def _opened(draft: Path) -> tuple[dict[str, object], Mapping[str, Tensor], torch.dtype]:
    if not (draft / ADAPTER).is_file():
        return checkpoint.read_config(draft), checkpoint.Weights(draft), checkpoint.stored_dtype(draft)
    from peft import AutoPeftModelForCausalLM

    try:
        model = AutoPeftModelForCausalLM.from_pretrained(draft).merge_and_unload()
    except (ValueError, OSError, RuntimeError) as error:
        raise UserError(f"{draft}: its adapters cannot be merged: {' '.join(str(error).split())[:200]}") from error
    weights = dict(checkpoint.model_weights(model, model.dtype))
    return model.config.to_diff_dict() | {"vocab_size": model.config.vocab_size}, weights, model.dtype


def round_weights(draft: Path, out: Path, kind: str) -> None:
    """Write draft into out, in float32, with every matrix rounded as GGUF's kind keeps it."""
    weights = (
        (name, rounded(tensor.float(), kind) if tensor.ndim == 2 else tensor.float())
        for name, tensor in checkpoint.Weights(draft).items()
    )
    checkpoint.write_checkpoint(out, checkpoint.read_config(draft), weights, draft)


def unrounded(name: str) -> tuple[str, str | None]:
    """'draft@q8_0' is draft, and a type of TYPES; any other name is itself."""
    base, _, kind = name.rpartition("@")
    return (base, kind) if base and kind in TYPES else (name, None)


def _words(directory: Path) -> list[bytes | None]:
    files = (directory / name for name in checkpoint.TOKENIZER_FILES)
    return [file.read_bytes() if file.is_file() else None for file in files]
