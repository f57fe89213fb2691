"""Commands that are not yet written on configs. Goes when none is left."""

import inspect
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from pydantic import create_model
from typer.models import ArgumentInfo, ParameterInfo

from draftlab.commands.base import Command, Outcome
from draftlab.config.base import Config, option


def legacy(name: str, function: Callable[..., Outcome]) -> Command:
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for key, parameter in inspect.signature(function).parameters.items():
        kind, *extras = get_args(hints[key])
        info = next(e for e in extras if isinstance(e, ParameterInfo))
        flags = [f for f in (getattr(info, "param_decls", None) or ()) if f.startswith("--")]
        fields[key] = (
            kind,
            option(
                *([] if parameter.default is inspect.Parameter.empty else [parameter.default]),
                help=info.help or "", ge=info.min, le=info.max, flag=flags[0] if flags else None,
                panel=info.rich_help_panel, argument=isinstance(info, ArgumentInfo),
            ),
        )  # fmt: skip
    config = create_model(name, __base__=Config, **fields)

    def call(settings: Config) -> Outcome:
        return function(**{key: getattr(settings, key) for key in fields})

    call.__doc__ = function.__doc__
    return Command(name=name, config=config, function=call, dry_run=False, resumes=False)
