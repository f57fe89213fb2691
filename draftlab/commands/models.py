"""How commands find the models that they name."""

import contextlib
from pathlib import Path

from draftlab.errors import UserError, about
from draftlab.heads.base import head_kind
from draftlab.model import hub
from draftlab.model.checkpoint import Checkpoint
from draftlab.runs.provenance import read_record
from draftlab.shell import typed


def located(draft: str | None, command: str) -> Path:
    """Return the directory of the draft that a command names.

    command: The command, such as "draftlab check", for the error message.

    Raises:
        UserError: The draft is missing, or is a head of a plug-in's kind.
    """
    assert draft is not None  # resolved() names the newest draft
    refuse_own_head(draft, command)
    return hub.locate(draft)


def refuse_own_head(draft: str, where: str) -> None:
    """Raise UserError if distill wrote a head of a plug-in's kind to a directory, which only --drafter can name.

    where: What refuses the head, such as "draftlab check".
    """
    kind = _own_head(Path(draft))
    if kind is not None:
        measure = typed("draftlab", "score", "--drafter", f"{kind}:heads={draft}")
        raise UserError(f"{draft} is a head of kind {kind}, which {where} does not know; measure it with {measure}")


def _own_head(directory: Path) -> str | None:
    """Return the kind of head that distill wrote to a directory, or None if hub.head_kind knows it or it is no head."""
    with contextlib.suppress(UserError):  # another version wrote the record, or the kind has no drafter with heads
        record = read_record(directory)
        if record is None or record.command != "distill":
            return None
        kind = str(record.config.get("student")).partition(":")[0]
        if kind not in hub.HEADS:
            head_kind(kind)
            return kind
    return None


def opened_target(name: str, *, weights: bool) -> Checkpoint:
    """Return the target. weights: Whether it needs weight files, which are checked then.

    Raises:
        UserError: The target is missing, or its weights are damaged.
    """
    with about("--target"):
        target = Checkpoint(hub.locate_model(name, weights))
        if weights:
            target.check()
        return target


def located_target(name: str, *, weights: bool, tokenizer_only: bool = False) -> Path:
    """Return the directory of the target.

    weights: See opened_target. tokenizer_only: Whether a directory that has only a tokenizer is accepted, which is
    enough for the target of a server.

    Raises:
        UserError: As in opened_target.
    """
    if tokenizer_only:
        with about("--target"):
            return hub.locate_tokenizer(name)
    return opened_target(name, weights=weights).directory
