"""Export of drafts as Hugging Face directories, with the target's tokenizer and number of logits, in one dtype."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from draftlab.exporting.gguf import fake_quantize
from draftlab.model import checkpoint, devices, hub, saving
from draftlab.model.hf_files import HEAD_IDS, read_head_ids
from draftlab.model.trimmed_head import as_whole
from draftlab.training.vocabulary import resize


def write(draft: Path, out: Path, *, tokenizer_from: Path, dtype: torch.dtype | None) -> list[str]:
    """Write a draft as a Hugging Face directory, and return a list of the changes.

    Args:
        tokenizer_from: Checkpoint whose tokenizer files are copied. The written draft gets its number of logits.
        dtype: Type of the written weights. None: the type does not change.

    Raises:
        UserError: A file in `tokenizer_from` is damaged.
    """
    changed = []
    other_tokenizer = tokenizer_files(tokenizer_from) != tokenizer_files(draft)
    stored = checkpoint.stored_dtype(draft)
    if dtype is not None and dtype != stored:
        changed.append(f"weights from {devices.dtype_name(stored)} to {devices.dtype_name(dtype)}")
    config = checkpoint.read_config(draft)
    source = checkpoint.Weights(draft).items()
    if (ids := read_head_ids(draft, checkpoint.vocab_size(draft))) is not None:
        config, source = as_whole(config, checkpoint.Weights(draft), ids)
        changed.append(
            f"trimmed LM head of {len(ids):,} ids completed to all ids; each new row is the mean of the trimmed rows"
        )
    weights = ((name, tensor.to(dtype or stored)) for name, tensor in source)
    saving.write_checkpoint(out, config, weights, tokenizer_from)
    if resized := resize(out, checkpoint.vocab_size(tokenizer_from)):
        changed.append(f"logits {resized}")
    if other_tokenizer:
        changed.append(f"tokenizer files of {tokenizer_from.name}")
    return changed


@contextlib.contextmanager
def as_quantized(draft: Path, qtype: str | None) -> Iterator[Path]:
    """Yield a copy of a draft or head in float32, with every matrix rounded to the values of a GGUF type.

    The name of the copy ends in @TYPE. The copy is removed at the end of the `with` statement. For None, yield the
    draft itself.
    """
    if qtype is None:
        yield draft
        return

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor  # ids of a head
        return fake_quantize(tensor.float(), qtype) if tensor.ndim == 2 else tensor.float()

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / f"{hub.checkpoint_name(draft)}@{qtype}"
        out.mkdir()
        weights = ((name, rounded(tensor)) for name, tensor in checkpoint.Weights(draft).items())
        saving.write_checkpoint(out, checkpoint.read_config(draft), weights, draft)
        if (draft / HEAD_IDS).is_file():
            shutil.copyfile(draft / HEAD_IDS, out / HEAD_IDS)
        yield out


def parse_quantized_name(name: str) -> tuple[str, str | None]:
    """Split a name such as 'draft@q8_0' into name and GGUF type. The type is None if the name has no known type."""
    base, _, qtype = name.rpartition("@")
    return (base, qtype) if base and qtype in hub.ROUNDED else (name, None)


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Return the contents of a tokenizer's files, by the name of the file."""
    return {name: (directory / name).read_bytes() for name in saving.tokenizer_files(directory)}
