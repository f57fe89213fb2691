"""The date that chat templates print. A run fixes it at its start, and uses it again when it resumes."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import Any

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
    """Return whether a chat template prints the date. transformers gives every template a function strftime_now."""
    return "strftime_now" in str(template)


def template_date(template: object) -> dict[str, Any]:
    """Return the argument by which a chat template that asks for the date, as Llama 3's, gets the date of the run.

    An argument of the name strftime_now replaces the function of transformers. Templates that do not ask get no
    argument, because some tokenizers refuse unknown arguments.
    """
    return {"strftime_now": _now().strftime} if asks_for_date(template) else {}


def _now() -> datetime:
    return _DATE.get() or datetime.now().replace(microsecond=0)
