"""Checks that several commands make before they load a model."""

from importlib import import_module
from pathlib import Path

from draftlab.errors import UserError, about
from draftlab.model import hub


def check_data(data: str, weights: bool) -> None:
    """Check that the text of --data exists. weights: Whether data sets on the hub are checked as well.

    Raises:
        UserError: The text is missing.
    """
    with about("--data"):
        hub.check_data(data) if weights else hub.check_local_data(data)


def check_plots() -> None:
    """Check that matplotlib is installed, before work that ends in a picture. Raises ModuleNotFoundError: it is not."""
    import_module("draftlab.results.plots")


def check_program(path: Path | None) -> None:
    """Check that the program of --verify-with exists. Raises UserError: it is missing."""
    if path is not None and not path.is_file():
        raise UserError(f"--verify-with {path}: there is no such program; write the path of vllm or llama-server")
