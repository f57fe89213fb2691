"""Checks that several commands make before they load a model."""

import socket
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

from draftlab.errors import UserError, about
from draftlab.model import hub
from draftlab.trust import check_address, without_secrets

PORTS = {"http": 80, "https": 443}
CONTACT_SECONDS = 3.0


def check_data(data: str, weights: bool) -> None:
    """Check that the text of --data exists. weights: Whether data sets on the hub are checked as well.

    Raises:
        UserError: The text is missing.
    """
    with about("--data"):
        hub.check_data(data) if weights else hub.check_local_data(data)


def check_listens(option: str, url: str) -> None:
    """Check that a server accepts connections. Nothing is sent.

    A server that is silent for CONTACT_SECONDS may be slow, and a server behind a proxy cannot be seen from here, so
    neither is an error yet.

    Raises:
        UserError: The text is no address, its host is unknown, or the host refuses the connection.
    """
    from draftlab.servers.client import proxy_of  # imports numpy

    with about(option):
        check_address(url)
        if proxy_of(url) is not None:
            return
        parts = urlsplit(url)
        address = parts.hostname or "", parts.port or PORTS[parts.scheme]
        try:
            socket.create_connection(address, timeout=CONTACT_SECONDS).close()
        except TimeoutError:
            return
        except OSError as error:
            raise UserError(
                f"no answer from {without_secrets(url)}: {error}; check that the server runs at this address"
            ) from None


def check_file(option: str, path: Path) -> None:
    """Check that the file of an option exists. Raises UserError: it is missing."""
    if not path.exists():
        raise UserError(f"{option}: {path}: No such file or directory")


def check_plots() -> None:
    """Check that matplotlib is installed, before work that ends in a picture. Raises ModuleNotFoundError: it is not."""
    import_module("draftlab.results.plots")


def check_program(path: Path | None) -> None:
    """Check that the program of --verify-with exists. Raises UserError: it is missing."""
    if path is not None and not path.is_file():
        raise UserError(f"--verify-with {path}: there is no such program; write the path of vllm or llama-server")
