"""The commands as Python functions, with their options as keyword arguments. No torch."""

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from draftlab.commands import COMMANDS
from draftlab.commands.base import Command, Outcome
from draftlab.config.base import extra

SWITCHES = {"force": "Replace an existing output.", "dry_run": "Return the plan and do nothing."}


class Unset:
    """A placeholder in signatures for a default that is computed at the call.

    source: Text about the source of the default, such as "the workspace's".
    """

    def __init__(self, source: str) -> None:
        self.source = source

    def __repr__(self) -> str:
        return f"<{self.source}>"


def library_function(name: str) -> Callable[..., Outcome]:
    """Return a Python function that runs a command. Its signature and docstring list every option of the command.

    name: Name of the command with _ in place of spaces, such as outputs_build.
    """
    command = COMMANDS[name.replace("_", " ")]
    fields = command.config.model_fields

    def call(**settings: Any) -> Outcome:
        options: dict[str, Any] = {name: _as_option(fields.get(name), value) for name, value in settings.items()}
        return command(**options)

    call.__name__ = call.__qualname__ = name
    call.__module__ = "draftlab"
    call.__doc__ = _documentation(command)
    call.__signature__ = _signature(command)  # pyright: ignore[reportFunctionMemberAccess]
    return call


def _as_option(field: FieldInfo | None, value: object) -> object:
    """Return an argument in the type of its option: a path becomes text, and a single value becomes a list."""
    if field is None:
        return value
    takes_list = get_origin(field.annotation) is list and extra(field)["typed"] is not str
    if takes_list and isinstance(value, str | Path):
        value = [value]
    if isinstance(value, list):
        return [str(item) if isinstance(item, Path) else item for item in value]
    return str(value) if isinstance(value, Path) else value


def _signature(command: Command) -> inspect.Signature:
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword, default=_default(field), annotation=field.annotation)
        for name, field in command.config.model_fields.items()
    ]
    parameters += [inspect.Parameter(name, keyword, default=False, annotation=bool) for name in _switches(command)]
    return inspect.Signature(parameters, return_annotation=Outcome)


def _default(field: FieldInfo) -> object:
    if field.default_factory is not None:
        return Unset(extra(field)["shown_default"] or "computed at the call")
    return inspect.Parameter.empty if field.default is PydanticUndefined else field.default


def _switches(command: Command) -> list[str]:
    return [name for name, takes in (("force", command.has_force), ("dry_run", command.dry_run)) if takes]


def _documentation(command: Command) -> str:
    """Return the docstring of a command: its help, then every option with its help."""
    options = {name: field.description or "" for name, field in command.config.model_fields.items()}
    options |= {name: SWITCHES[name] for name in _switches(command)}
    lines = [textwrap.fill(f"{name}: {text}", 116, subsequent_indent="    ") for name, text in options.items()]
    return f"{command.help}\n\nArgs:\n{textwrap.indent(chr(10).join(lines), '    ')}\n"
