"""Errors that a user can fix."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can fix. The message says what is wrong, with the value, and what would be right."""


class UsageError(UserError):
    """A command line that lacks something."""


class OtherArchitecture(UserError):
    """A checkpoint that is not LLaMA-like."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A closing '; did you mean X?' for the nearest known name, or the list of known names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}"
