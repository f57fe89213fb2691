"""The date that chat templates print. A run fixes it at its start, and uses it again when it resumes."""

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import datetime

CALL = re.compile(r"""\bstrftime_now\(\s*(?P<quote>["'])(?P<format>.*?)(?P=quote)\s*\)""")
_DATE: ContextVar[datetime | None] = ContextVar("_DATE", default=None)


@contextlib.contextmanager
def fixed_date() -> Iterator[None]:
    """Fix the date during the block. A block inside another block has the date of the outer block."""
    token = _DATE.set(_now())
    try:
        yield
    finally:
        _DATE.reset(token)


def resume_date(date: str) -> None:
    """Use the date of an earlier start, in ISO format, until the block of fixed_date ends."""
    _DATE.set(datetime.fromisoformat(date))


def run_date() -> str:
    """Return the date and time of the run's start, in ISO format."""
    return _now().isoformat()


def asks_for_date(template: object) -> bool:
    """Return whether a chat template prints the date, as Llama 3's does."""
    return CALL.search(str(template)) is not None


def with_date(template: str) -> str:
    """Return a chat template that prints the date of the run: a text in place of every call of strftime_now.

    transformers gives templates the function strftime_now, which reads the clock. It passes no other function to them.
    """
    return CALL.sub(lambda call: repr(_now().strftime(call["format"])), template)


def _now() -> datetime:
    return _DATE.get() or datetime.now().replace(microsecond=0)
