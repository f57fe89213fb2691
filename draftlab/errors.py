"""Errors that a user can fix."""

import contextlib
import difflib
import re
import sys
from collections.abc import Iterable, Iterator


class UserError(Exception):
    """An error that the user can fix. The message says what is wrong, with the value, and what to type instead."""


class UsageError(UserError):
    """The error for a command line that lacks an argument or an option."""


class OtherArchitecture(UserError):
    """The error for a checkpoint whose architecture is not LLaMA-like."""


@contextlib.contextmanager
def about(option: str) -> Iterator[None]:
    """Put the name of an option, such as "--draft", before the message of any UserError from the block.

    A message that starts with "--" stays as it is.
    """
    try:
        yield
    except UserError as error:
        if not str(error).startswith("--"):
            error.args = (f"{option}: {error}",)
        raise


# package that only some commands need -> the extra in pyproject.toml that installs it
EXTRAS = {
    "google.protobuf": "gguf",
    "gguf": "gguf",
    "matplotlib": "report",
    "sentencepiece": "gguf",
}


# pattern at the start of pydantic's message -> draftlab's wording
COMPLAINTS = {
    r"Input should be a valid integer": "must be a whole number",
    r"Input should be a valid boolean": "must be true or false",
    r"Input should be a valid (\w+)": r"must be a \1",
    r"Value error, (.+)": r"\1",
    r"Field required": "is missing",
    r"Extra inputs are not permitted": "is not a known key",
    r"Input should be greater than or equal to (.+)": r"must be at least \1",
    r"Input should be greater than (.+)": r"must be more than \1",
    r"Input should be less than or equal to (.+)": r"must be at most \1",
    r"Input should be less than (.+)": r"must be less than \1",
    r"Input should be (.+)": r"must be \1",
}


class MissingExtra(UserError):
    """The error for a missing package of an extra (pip install draftlab[EXTRA]). The message names the extra."""

    def __init__(self, package: str) -> None:
        super().__init__(f"the package {package} is missing; run pip install 'draftlab[{EXTRAS[package]}]'")


class Interrupted(KeyboardInterrupt):
    """The error for a command that Ctrl-C or SIGTERM stopped. The message says whether a repeat continues the work."""


class Quantised(UserError):
    """The error for a checkpoint with quantised weights."""


def one_line(message: object, most: int = 300) -> str:
    """Return a message as one line of printable characters. A longer line is cut to at most `most` characters."""
    words = " ".join(str(message)[: 4 * most].split())
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)
    return text if len(text) <= most else text[: most - 4] + " ..."


def plain_words(message: str) -> str:
    """Return pydantic's message about a value in draftlab's wording, such as "must be a whole number"."""
    for pattern, words in COMPLAINTS.items():
        if match := re.match(pattern, message):
            return match.expand(words)
    return message


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return an ending for a message about an unknown name.

    The ending is '; did you mean X?' with the nearest known name, or '; known: X, Y' if no known name is near.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.65)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}"


def check_platform() -> None:
    """Check that this system has what draftlab imports: POSIX signals, locks and resource limits.

    Raises:
        UserError: The system is Windows.
    """
    if sys.platform == "win32":
        raise UserError(
            "draftlab runs on Linux and macOS; on Windows, install and run it in WSL, the Windows Subsystem for Linux"
        )
