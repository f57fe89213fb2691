"""How commands find the models that they name."""

from pathlib import Path

from draftlab.errors import about
from draftlab.model import hub
from draftlab.model.checkpoint import Checkpoint


def located(draft: str | None) -> Path:
    """Return the directory of the draft that a command names. Raises UserError: it is missing."""
    assert draft is not None  # resolved() names the newest draft
    return hub.locate(draft)


def located_target(name: str, *, weights: bool, tokenizer_only: bool = False) -> Path:
    """Return the directory of the target.

    weights: Whether the target needs weight files. tokenizer_only: Whether a directory that has only a tokenizer is
    accepted, which is enough for the target of a server.

    Raises:
        UserError: The target is missing, or its weights are damaged.
    """
    with about("--target"):
        if tokenizer_only:
            return hub.locate_tokenizer(name)
        directory = hub.locate_model(name, weights)
        if weights:
            Checkpoint(directory).check()
        return directory
