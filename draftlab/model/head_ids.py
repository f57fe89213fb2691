"""The ids of a trimmed head (trimmed_head.py), in a file beside its checkpoint. No torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from draftlab.errors import UserError
from draftlab.model.hf_files import vocab_size
from draftlab.reading import read_json, reading

HEAD_IDS = "head_ids.json"


def read_head_ids(directory: Path, vocab: int) -> list[int] | None:
    """Return the ids of a checkpoint's head, ascending, or None if it has all.

    Raises:
        UserError: the file is not a list of ids below vocab.
    """
    file = directory / HEAD_IDS
    if not file.is_file():
        return None
    with reading(file):
        kind = TypeAdapter(list[Annotated[int, Field(ge=0, lt=vocab, strict=True)]])
        ids = kind.validate_python(read_json(file))
    if not ids or ids != sorted(set(ids)):
        raise UserError(f"{file}: want ids, each once and in ascending order")
    return ids


def write_head_ids(directory: Path, ids: Sequence[int]) -> None:
    (directory / HEAD_IDS).write_text(json.dumps(list(ids)))


def check_size(size: int, vocab: int, special: int = 0) -> None:
    """Raises UserError: a head of that size has no room for the special ids, or is no smaller than the whole."""
    if not special < size < vocab:
        raise UserError(f"--vocab {size}: want more than the {special} special ids, and fewer than all {vocab:,}")


def check_trimmable(draft: Path, size: int) -> None:
    """Raises UserError: the draft's head is trimmed already, or not larger than this size."""
    vocab = vocab_size(draft)
    check_size(size, vocab)
    if (ids := read_head_ids(draft, vocab)) is not None:
        raise UserError(f"--vocab {size}: the head of {draft} is trimmed already, to {len(ids):,} ids; leave it out")
