"""The standard streams of a program: a stream that cannot be written ends no work and hides no failure. No torch."""

import codecs
import os
import sys
from typing import Any, TextIO, cast

from draftlab.errors import UserError

# spellings of the characters of draftlab's own texts that an encoding such as ASCII lacks
SPELLED = {"–": "-", "±": "+-", "…": "..."}


class Unprintable(UserError):
    """The error for a result that cannot be written to stdout. Files that the command wrote stay."""


class Guarded:
    """A stream of Python whose failures to write are answered by _failed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Notes(Guarded):
    """stderr, where lines that cannot be written are dropped: a full disk or a closed pipe must not stop the work."""

    def _failed(self, error: OSError) -> None:
        """Drop what could not be written."""


class Results(Guarded):
    """stdout, which raises Unprintable where a stream of Python raises OSError."""

    def _failed(self, error: OSError) -> None:
        # Python flushes what is left at its end, which must not fail a second time
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), self._stream.fileno())
        reason = error.strerror or error
        raise Unprintable(f"the result cannot be written to stdout: {reason}") from error


def guard_streams() -> None:
    """Prepare stdin, stdout and stderr of this program for any locale, and for closed and full files behind them."""
    # A descriptor that the caller closed would go to the next file that is opened, such as a checkpoint, and libraries
    # would print into that file. A stream that is open for reading only fails as a closed stream does.
    while (number := os.open(os.devnull, os.O_RDONLY)) <= 2:
        os.set_inheritable(number, True)
        mode = "w" if number else "r"
        name = ("stdin", "stdout", "stderr")[number]
        setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    os.close(number)
    codecs.register_error("spelled", _spelled)
    for stream in (sys.stdout, sys.stderr):
        os.set_blocking(stream.fileno(), True)
        stream.reconfigure(errors="spelled")  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdout = cast("TextIO", Results(sys.stdout))
    sys.stderr = cast("TextIO", Notes(sys.stderr))


def _spelled(error: UnicodeError) -> tuple[str, int]:
    """Return the text that replaces characters which an encoding lacks: a spelling, or an escape such as \\xfc."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    escaped = (c.encode("ascii", "backslashreplace").decode() for c in lacking)
    return "".join(SPELLED.get(c, text) for c, text in zip(lacking, escaped, strict=True)), error.end
