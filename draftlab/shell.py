"""Command lines that a user can copy into a shell, whatever the names in them are. No torch."""

import shlex
from pathlib import Path


def typed(*words: object) -> str:
    """Return the words of a command as a line for a shell.

    Words with spaces or special characters are quoted. A path that starts with a dash gets ./ before it, so that no
    program reads it as an option.
    """
    return shlex.join(
        f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word) for word in words
    )
