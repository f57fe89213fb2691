"""Errors that a user can fix."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class UserError(Exception):
    """Something the user can fix. The message says what is wrong, with the value, and what would be right."""


class UsageError(UserError):
    """A command line that lacks something."""


class OtherArchitecture(UserError):
    """A checkpoint that is not LLaMA-like."""


@contextlib.contextmanager
def about(option: str) -> Iterator[None]:
    """Let errors inside the block begin with the option that they are about."""
    try:
        yield
    except UserError as error:
        if not str(error).startswith("--"):
            error.args = (f"{option}: {error}",)
        raise


EXTRAS = {
    "google.protobuf": "gguf",
    "gguf": "gguf",
    "matplotlib": "report",
    "sentencepiece": "gguf",
}  # packages that only some commands need, and the extra of pyproject.toml that installs them


class MissingExtra(UserError):
    """A package that a command needs and that `pip install draftlab` leaves out."""

    def __init__(self, package: str) -> None:
        super().__init__(f"the package {package} is missing; pip install 'draftlab[{EXTRAS[package]}]'")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. The message says what is saved, and where the same command goes on."""


class Quantised(UserError):
    """A checkpoint whose weights are rounded to few bits."""


def one_line(message: object, most: int = 300) -> str:
    """Return a message as one line that a terminal shows as it is: whatever a file or a server put into it."""
    text = "".join(
        c if c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in str(message)[: 4 * most]
    )
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 4] + " ..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A closing '; did you mean X?' for the nearest known name, or the list of known names."""
    names = sorted(known)
    near = [n for n in difflib.get_close_matches(name, names, n=3, cutoff=0.65) if _same_numbers(name, n)]
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}"


def _same_numbers(name: str, other: str) -> bool:
    """Return whether a name may be a typing error of another: 8b is none of 70b, but 66b is one of 65b."""
    a, b = ("".join(c for c in text if c.isdigit()) for text in (name, other))
    one_wrong = len(a) == len(b) and sum(x != y for x, y in zip(a, b, strict=True)) <= 1
    return one_wrong or sorted(a) == sorted(b) or a.startswith(b) or b.startswith(a)
