"""Errors in tests: their type, and the options, files and values that their message names, never its sentences."""

import contextlib
from collections.abc import Iterator

import pytest

from draftlab.errors import UserError


@contextlib.contextmanager
def raises_option(*names: object, kind: type[UserError] = UserError) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect an error of the user that names an option, and perhaps a file, a field or a value that is wrong."""
    with pytest.raises(kind) as caught:
        yield caught
    for name in names:
        assert str(name) in str(caught.value)
