"""Safety with untrusted files and servers: whether their code may run, and safe printing of their names. No torch."""

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from urllib.parse import urlsplit

from draftlab.errors import UserError

_REMOTE_CODE = ContextVar("trust_remote_code", default=False)  # setting of the running command
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
    """Return whether checkpoints may run their own code: the trust_remote_code of transformers."""
    return _REMOTE_CODE.get()


def printable(text: str, keep: str = "") -> str:
    """Return a text with escapes in place of control characters, line breaks and text-direction marks.

    keep: Characters that are not escaped.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def checked_name(text: str, label: str) -> str:
    """Check that a name or version from a file or a server is safe to print, and return it.

    label: What the text names, for the error.

    Raises:
        UserError: The text is empty, too long or not printable.
    """
    if not isinstance(text, str) or not 0 < len(text) <= LONGEST_NAME or not text.isprintable():
        raise UserError(f"{label} must be printable text, but is {printable(repr(text)[:80])}")
    return text


def folder_name(text: str, label: str) -> str:
    """Return the part of a name after the last slash, for use as the name of a folder.

    label: What the text names, for the error.

    Raises:
        UserError: The part is empty, "." or "..", or the text is not printable.
    """
    name = checked_name(text, label).replace("\\", "/").rstrip("/").rpartition("/")[2]
    if name in ("", ".", ".."):
        raise UserError(f"{label} cannot be used as the name of a folder: {text!r}")
    return name


def check_own(file: Path, folder: Path) -> None:
    """Check that a file of a folder is no link to another place, because an output would hold a copy of that file.

    A folder in the hub's cache has links to the blobs of its repository.

    Raises:
        UserError: The file leads neither to its folder nor to these blobs.
    """
    home = folder.resolve()
    blobs = (each.parent / "blobs" for each in home.parents if each.name == "snapshots")
    if not any(file.resolve().is_relative_to(place) for place in (home, *blobs)):
        raise UserError(
            f"{file} is a link to a file in another folder; name that file itself, or replace the link by the file"
        )


def check_address(url: str) -> None:
    """Check that a text is the address of a server.

    Raises:
        UserError: The text is not an address. The message shows no part of a password.
    """
    try:
        parts = urlsplit(url)
        good = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and url.isprintable()
            and url == url.strip()
        )
        # an @ after the host means that a password has an unescaped / ? or #
        good = good and "@" not in parts.path + parts.query + parts.fragment
    except ValueError:
        good = False
    if not good:
        host = url.rpartition("@")[2]
        escape = "; in a password, write / ? # @ as %2F %3F %23 %40" if host != url else ""
        raise UserError(f"server {host!r} is not an address; write http://HOST:PORT{escape}")


def without_secrets(text: str) -> str:
    """Return an address without user, password, query and fragment, whatever its scheme is and how it is written.

    Text that is no address is returned unchanged.
    """
    # as urlsplit and httpx, which strip what is not printed and ignore the case of the scheme
    scheme = re.match(r"[\x00-\x20]*(?:(https?):[/\\]*|([a-z][a-z0-9+.-]+)://)", text, re.I)
    if scheme is None:
        return text
    address = text[scheme.end() :].rpartition("@")[2]
    return f"{(scheme[1] or scheme[2]).lower()}://{re.split('[?#]', address)[0]}"
