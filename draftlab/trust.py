"""Trust in files and servers: whether their code runs, and how their names and addresses are printed. No torch."""

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar
from urllib.parse import urlsplit

from draftlab.errors import UserError

_REMOTE_CODE = ContextVar("trust_remote_code", default=False)  # value for the running command
LONGEST_NAME = 200


@contextlib.contextmanager
def remote_code(trusted: bool) -> Iterator[None]:
    """Set whether checkpoints may run their own code inside the block."""
    token = _REMOTE_CODE.set(trusted)
    try:
        yield
    finally:
        _REMOTE_CODE.reset(token)


def trusts_remote_code() -> bool:
    """Return the value of trust_remote_code for transformers."""
    return _REMOTE_CODE.get()


def printable(text: str, keep: str = "") -> str:
    """Return a text with control characters, line breaks and marks of direction escaped, except those to keep."""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def is_name(text: object) -> bool:
    """Return whether a value is a printable text of 1 to LONGEST_NAME characters."""
    return isinstance(text, str) and 0 < len(text) <= LONGEST_NAME and text.isprintable()


def checked_name(text: str, label: str) -> str:
    """Return a name or version that a file or server gives. label: Noun for the error.

    Raises:
        UserError: The text is not a name.
    """
    if not is_name(text):
        raise UserError(f"{label} must be printable text, but is {printable(repr(text)[:80])}")
    return text


def folder_name(text: str, label: str) -> str:
    """Return the last part of a name, for use as the name of a folder.

    Raises:
        UserError: The part is empty, "." or "..".
    """
    name = checked_name(text, label).replace("\\", "/").rstrip("/").rpartition("/")[2]
    if name in ("", ".", ".."):
        raise UserError(f"{label} cannot be used as the name of a folder: {text!r}")
    return name


def check_address(url: str | None) -> None:
    """Raise UserError if the text is not the address of a server. The message has no part of a password."""
    if url is None:
        return
    try:
        parts = urlsplit(url)
        good = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and url.isprintable()
        )
        # an @ here means that a password contains / ? or #
        good = good and "@" not in parts.path + parts.query + parts.fragment
    except ValueError:
        good = False
    if not good:
        host = url.rpartition("@")[2]
        escape = (
            "; if it has a password, write / ? # @ in it as %2F %3F %23 %40" if host != url else ""
        )
        raise UserError(f"server {host!r} is not an address; write http://HOST:PORT{escape}")


def without_secrets(text: str) -> str:
    """Return a server's address without user, password, query and fragment. Other text is returned unchanged."""
    scheme, _, address = text.partition("://")
    if scheme not in ("http", "https"):
        return text
    return f"{scheme}://{re.split('[?#]', address.rpartition('@')[2])[0]}"
