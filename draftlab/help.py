"""The text of --help: what commands do, an example of each, and their options. Lines break between words only."""

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from draftlab.commands.base import Command
from draftlab.config.base import OUTPUT, SERVER, bound, extra
from draftlab.config.shared import SAMPLING

WIDEST = 100  # longest line in columns; a narrower terminal has shorter lines
NOUNS = {"str": "text", "Path": "path", "bool": "true, false", "int": "integer", "float": "number"}
REQUIRED = "Required"


def command_help(command: Command, program: str, switches: Mapping[str, str], *, everything: bool) -> str:
    """Return the help of a command.

    Args:
        program: What the user types to run the command, such as "draftlab prune".
        switches: Options that are no settings, with their help.
        everything: Whether to show advanced options.
    """
    config = command.config
    panels = dict[str, list[str]]()
    needed = list[str]()
    hidden = 0
    for name, field in config.model_fields.items():
        details = extra(field)
        if details["advanced"] and not everything:
            hidden += 1
            continue
        panel = details["panel"] or "Options"
        flag = config.flag(name)
        shown = noun(field)
        if field.default is True:
            flag += " / --no-" + name.replace("_", "-")
        elif get_origin(details["typed"] or field.annotation) is list and details["argument"]:
            flag += " ..."
        elif shown != "true, false" and not details["argument"]:
            flag += f" {shown.upper() if not choices(field) else '|'.join(choices(field))}"
        if field.is_required():
            panel = REQUIRED
            needed.append(flag)
        elif details["argument"]:
            needed.append(f"[{flag}]")
        panels.setdefault(panel, []).append(_entry(flag, field.description or "", _facts(field)))
    required = panels.pop(REQUIRED, None)
    output = panels.pop(OUTPUT, [])
    output += [_entry(flag, text, "") for flag, text in switches.items()]
    parts = [_wrapped(" ".join(["Usage:", program, *needed, "[OPTIONS]"]), "       ")]
    parts.append(_wrapped(command.help))
    if command.example:
        lines = _lines(f"draftlab {command.example}", _columns() - 4)
        parts.append("Example:\n  " + " \\\n    ".join(lines))
    if required is not None:
        parts.append(_section(REQUIRED, required))
    ordered = sorted(panels, key=lambda name: name in (SERVER, SAMPLING))
    parts += [_section(name, panels[name]) for name in ordered]
    parts.append(_section(OUTPUT, output))
    if hidden:
        parts.append(f"{program} --help-all shows {hidden} more options.")
    return "\n\n".join(parts)


def group_help(program: str, about: str, start: Sequence[str], panels: Mapping[str, Mapping[str, str]]) -> str:
    """Return the help of a group of commands.

    Args:
        program: What the user types to run the group, such as "draftlab".
        start: Command lines to begin with.
        panels: For each heading, the names of commands with their summaries.
    """
    widest = max(len(name) for commands in panels.values() for name in commands)
    parts = [f"Usage: {program} COMMAND [OPTIONS]", _wrapped(about)]
    if start:
        parts.append("\n".join(["Start with:", *(f"  {line}" for line in start)]))
    for name, commands in panels.items():
        rows = [_wrapped(f"  {command:{widest}}  {text}", " " * (widest + 4)) for command, text in commands.items()]
        parts.append("\n".join([f"{name}:", *rows]))
    parts.append(f"{program} COMMAND --help shows the options of a command.")
    return "\n\n".join(parts)


def choices(field: FieldInfo) -> tuple[str, ...]:
    """Return the values that a setting can have, or () if its values are not listed."""
    kind = extra(field)["typed"] or field.annotation
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    literal = next((option for option in options if get_origin(option) is Literal), None)
    return get_args(literal)


def noun(field: FieldInfo) -> str:
    """Return the kind of values of a setting: text, path, integer, number, or "true, false"."""
    kind = extra(field)["typed"] or field.annotation
    inner: Any = next((part for part in get_args(kind) if part is not type(None)), kind)
    return NOUNS.get(getattr(inner, "__name__", ""), "text")


def limits(field: FieldInfo) -> list[str]:
    """Return the bounds of a number, such as ">= 1"."""
    signs: dict[Literal["ge", "gt", "le"], str] = {"ge": ">=", "gt": ">", "le": "<="}
    bounds = ((sign, bound(field, kind)) for kind, sign in signs.items())
    return [f"{sign} {limit:.12g}" for sign, limit in bounds if limit is not None]


def default(field: FieldInfo) -> str:
    """Return the default of a setting as text, or "" if it has none or its help describes it."""
    if shown := extra(field)["shown_default"]:
        return shown
    if field.is_required() or field.default_factory is not None or field.default is None:
        return ""
    value = field.default
    return str(value).lower() if isinstance(value, bool) else str(value)


def _facts(field: FieldInfo) -> str:
    shown = "" if field.default in (False, True, []) else default(field)
    bounds = [limit.replace(" ", "") for limit in limits(field)]
    facts = [*bounds, *([f"default: {shown}"] if shown else [])]
    return f"[{'; '.join(facts)}]" if facts else ""


def _entry(flag: str, text: str, facts: str) -> str:
    body = " ".join(part for part in (text, facts) if part)
    return "\n".join([f"  {flag}", *([_wrapped("      " + body, "      ")] if body else [])])


def _section(name: str, entries: Iterable[str]) -> str:
    return "\n".join([f"{name}:", *entries])


def _wrapped(text: str, indent: str = "") -> str:
    return "\n".join(_lines(text, _columns(), indent))


def _lines(text: str, columns: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _columns() -> int:
    return min(WIDEST, shutil.get_terminal_size().columns)
