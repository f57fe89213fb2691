"""Trust in others: whether their code runs, and how their names, texts and addresses are written. No torch."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from urllib.parse import urlsplit

from draftlab.errors import UserError

_REMOTE_CODE = ContextVar("trust_remote_code", default=False)  # of the command that runs
LONGEST_NAME = 200


@contextlib.contextmanager
def remote_code(trusted: bool) -> Iterator[None]:
    """Let checkpoints run code of their own inside the block, or not."""
    token = _REMOTE_CODE.set(trusted)
    try:
        yield
    finally:
        _REMOTE_CODE.reset(token)


def trusts_remote_code() -> bool:
    """Return the trust_remote_code to give to transformers."""
    return _REMOTE_CODE.get()


def printable(text: str) -> str:
    """Return a text in which control characters, line breaks and marks of direction are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def is_name(text: object) -> bool:
    """Return whether it is a text of at most LONGEST_NAME characters that paths, scripts and terminals read alike."""
    return isinstance(text, str) and 0 < len(text) <= LONGEST_NAME and text.isprintable()


def checked_name(text: str, label: str) -> str:
    """Return a name or version that a file or server gives. label: what it is, for the error.

    Raises:
        UserError: it is no name.
    """
    if not is_name(text):
        raise UserError(f"{label} is no name: {printable(repr(text)[:80])}")
    return text


def folder_name(text: str, label: str) -> str:
    """Return a name as that of a folder: its last part.

    Raises:
        UserError: it would lead out of the folder.
    """
    name = checked_name(text, label).replace("\\", "/").rstrip("/").rpartition("/")[2]
    if name in ("", ".", ".."):
        raise UserError(f"{label} cannot name a folder: {text!r}")
    return name


def check_address(url: str | None) -> None:
    """Raises UserError: what is given is no address of a server."""
    if url is not None and not (url.startswith(("http://", "https://")) and url.isprintable()):
        raise UserError(f"server {url.rpartition('@')[2]!r} is not an address; want http://HOST:PORT")


def without_secrets(address: str) -> str:
    """Return an address of the web without user, password, query and fragment; other texts as they are."""
    if not address.startswith(("http://", "https://")):
        return address
    try:
        parts = urlsplit(address)
    except ValueError:
        return f"{address.partition('://')[0]}://..."
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
