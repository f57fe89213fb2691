"""The command line: options made from configs, --config and --json, and exit codes. Errors are printed only here."""

import errno
import inspect
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich.console import Console
from typer import Argument, BadParameter, Option
from typer.core import TyperCommand, TyperGroup

from draftlab import __version__
from draftlab.commands import PANELS
from draftlab.commands.base import Command, Outcome
from draftlab.config.base import Config, bound, extra
from draftlab.console import is_main_process, never_silent, note, print_words, processes
from draftlab.errors import UsageError, UserError, one_line, plain_words
from draftlab.help import command_help, group_help
from draftlab.model.cgroups import limit_threads
from draftlab.recipe import RUN
from draftlab.streams import Unprintable, guard_streams
from draftlab.trust import printable

EXIT_USER_ERROR = 1
EXIT_USAGE = 2
EXIT_MISSED = 3
LONGEST_ERROR = 2000  # characters
LAUNCHED = ("distill", "prune")  # commands that a launcher may run in several processes
# settings that decide the size of tensors, the most effective first
SIZES = ("micro_batch_tokens", "batch_size", "batch", "seq_len", "context")
GROUPS = {  # name -> help, panel
    "outputs": (
        "Store a target's answers and log-probabilities, to distil drafts from them and to replay drafts on them.",
        "Make a draft",
    )
}

SWITCHES = {  # options that are no settings -> help
    "--config PATH": "YAML file of settings, or the output directory of an earlier run, to repeat its settings.",
    "--force": "Replace an existing output.",
    "--dry-run": "Show the plan and do nothing.",
    "--json": "Print the result as JSON.",
}
START = ("draftlab init --preset tiny", "draftlab prune --layers 3 --width 128")


class HelpContext(Protocol):
    """The part of click's context that --help reads. typer >= 0.27 has a copy of click with another class."""

    @property
    def parent(self) -> object: ...

    @property
    def info_name(self) -> str | None: ...

    @property
    def command_path(self) -> str: ...


class CommandGroup(TyperGroup):
    """The group of all commands, or of those whose names have two words."""

    def get_help(self, ctx: HelpContext) -> str:
        print(self.help_of(ctx))  # click's echo hides that stdout cannot be written
        return ""

    def help_of(self, ctx: HelpContext) -> str:
        group = "" if ctx.parent is None else f"{ctx.info_name} "
        panels = {
            panel: {
                each.name.removeprefix(group): each.help
                for each in commands
                if each.name.startswith(group) and (group or " " not in each.name)
            }
            for panel, commands in ALL.items()
        }
        if group:
            text = GROUPS[group.strip()][0]
            shown = {panel: commands for panel, commands in panels.items() if commands}
            return group_help(f"draftlab {group.strip()}", text, (), shown)
        for name, (text, panel) in GROUPS.items():
            panels[panel][name] = text
        panels["Options"] = {
            "--version": "Print the version.",
            "--install-completion": "Complete commands and options in the current shell.",
        }
        return group_help("draftlab", ABOUT, START, panels)


ABOUT = "Design, prune, distil and score draft models for speculative decoding."
app = typer.Typer(
    name="draftlab",
    cls=CommandGroup,
    help=ABOUT,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def typer_function(command: Command) -> Callable[..., None]:
    """Return a function that Typer turns into a command, with one parameter per setting."""

    def call(ctx: typer.Context, **values: Any) -> None:
        fields = command.config.model_fields
        # sources are compared by name, because typer >= 0.27 has a copy of click with another enum
        sources = {name: ctx.get_parameter_source(name) for name in fields}
        typed = {
            name: values[name]
            for name, source in sources.items()
            if source is not None and source.name == "COMMANDLINE"
        }
        wiring = {name: value for name, value in values.items() if name not in fields}
        _exit_with(partial(_run, command, typed, wiring), wiring["json_output"], command.config)

    parameters = [inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    parameters += [_parameter(command.config, name, field) for name, field in command.config.model_fields.items()]
    parameters += _wiring(command)
    call.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__doc__ = command.help
    return call


def _run(command: Command, typed: dict[str, Any], wiring: dict[str, Any]) -> Outcome:
    file = wiring.get("config_file")
    settings = command.config.of_file(file, command.name, typed) if file else typed
    try:
        config = command.config.build(settings, f"--config {file}: " if file else "")
    except UsageError as error:
        own = command in chain.from_iterable(ALL.values())  # a plug-in has programs of its own
        raise UsageError(f"{error}; see {f'draftlab {command.name} ' if own else ''}--help") from None
    if processes() > 1 and command.name not in LAUNCHED:
        raise UserError(
            f"draftlab {command.name} runs in one process only, but WORLD_SIZE is {processes()}: start it without "
            f"accelerate or torchrun (only {' and '.join(LAUNCHED)} can run in several processes)"
        )
    switches = {name: wiring[name] for name in ("force", "dry_run") if name in wiring}
    with never_silent(command.name):
        return command.run(config, **switches)


def _exit_with(outcome_of: Callable[[], Outcome], as_json: bool, config: type[Config]) -> None:
    """Print a command's outcome on stdout, or its error as one line on stderr. Every process prints its errors.

    After an error or a missed threshold, exit with a code that is not 0.
    """
    try:
        outcome = outcome_of()
    except UserError as error:
        text = printable(str(error))
        shown = text if len(text) <= LONGEST_ERROR else text[:LONGEST_ERROR] + " ..."
        print(f"error: {shown}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_USER_ERROR) from None
    except KeyboardInterrupt as stop:
        if is_main_process():
            print(str(stop) or "interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = one_line(str(error.filename), 60)
        print(f"error: {name} is too long for the name of a file", file=sys.stderr)
        raise typer.Exit(EXIT_USER_ERROR) from None
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # of torch, which may not be imported
            raise
        print(f"error: {one_line(str(error).partition(' GPU ')[0])} {_cures(config)}", file=sys.stderr)
        raise typer.Exit(EXIT_USER_ERROR) from None
    if not is_main_process():
        return
    try:
        _print(outcome, as_json)
        sys.stdout.flush()
    except Unprintable as error:
        written = f"; {outcome.path} is complete" if outcome.path else ""
        raise Unprintable(f"{error}{written}") from None
    for text in outcome.missed:
        print(f"missed: {text}", file=sys.stderr)
    if outcome.missed:
        raise typer.Exit(EXIT_MISSED)


def _cures(config: type[Config]) -> str:
    """Return advice on which settings of a command to change so that it needs less device memory.

    The most effective setting comes first.
    """
    has = config.model_fields
    cures = [f"lower {config.flag(name)}" for name in SIZES if name in has][:2]
    cures += ["spread the target with --device-map auto"] if "device_map" in has else []
    cures += ["use --device cpu"] if "device" in has else []
    text = ", or ".join(cures or ["use smaller models, or fewer texts at once"])
    return text[0].upper() + text[1:]


def _parameter(config: type[Config], name: str, field: FieldInfo) -> inspect.Parameter:
    """Return a setting as a Typer parameter. Bounds of values appear in --help, and the config checks them."""
    details = extra(field)
    kind: Any = details["typed"] or field.annotation
    default = None if field.default is PydanticUndefined else field.default
    bounds = {"min": bound(field, "ge"), "max": bound(field, "le")}
    common: dict[str, Any] = {
        "help": field.description,
        **{key: value for key, value in bounds.items() if value is not None},
    }
    flags = [] if default is True else [config.flag(name)]
    info = Argument(**common) if details["argument"] else Option(*flags, **common)
    optional = kind if default is not None else kind | None
    annotation = Annotated[optional, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _wiring(command: Command) -> list[inspect.Parameter]:
    """Return the options that are not settings as Typer parameters."""
    kinds: dict[str, tuple[str, Any]] = {
        "--config": ("config_file", Path | None),
        "--force": ("force", bool),
        "--dry-run": ("dry_run", bool),
        "--json": ("json_output", bool),
    }
    parameters = []
    for words, text in _switches(command).items():
        flag = words.split()[0]  # without the value that --help shows
        name, kind = kinds[flag]
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if kind is bool else None,
                annotation=Annotated[kind, Option(flag, help=text)],
            )
        )
    return [*parameters, _HELP_ALL]


def _switches(command: Command) -> dict[str, str]:
    """Return the options of a command that are not settings, as in --help, with their help."""
    lacks = {
        "--config PATH": not command.config.model_fields,
        "--force": not command.has_force,
        "--dry-run": not command.dry_run,
    }
    return {flag: text for flag, text in SWITCHES.items() if not lacks.get(flag)}


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        print(ctx.command.help_of(ctx, everything=True))  # pyright: ignore[reportAttributeAccessIssue]
        raise typer.Exit()


_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, Option("--help-all", help="Show all options.", is_eager=True, callback=_show_all)],
)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, Option("--version", help="Print the version.")] = False,
) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if version:
        print(__version__)
        raise typer.Exit()


def _class_of(command: Command) -> type[TyperCommand]:
    """Return the class of a Typer command that reports wrong values and shows help in draftlab's wording."""

    class PlainCommand(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            try:
                return super().parse_args(ctx, args)
            except BadParameter as error:
                error.message = plain_words(error.message)
                raise

        def get_help(self, ctx: HelpContext) -> str:
            print(self.help_of(ctx, everything=False))  # as in CommandGroup
            return ""

        def help_of(self, ctx: HelpContext, *, everything: bool) -> str:
            program = ctx.command_path if ctx.parent is None else f"draftlab {command.name}"
            return command_help(command, program, _switches(command), everything=everything)

    return PlainCommand


def _add_commands() -> None:
    groups = {"": app} | {
        name: typer.Typer(cls=CommandGroup, help=text, no_args_is_help=True) for name, (text, _) in GROUPS.items()
    }
    for commands in ALL.values():
        for command in commands:
            group, _, leaf = command.name.rpartition(" ")
            groups[group].command(leaf, cls=_class_of(command))(typer_function(command))
    for name in GROUPS:
        app.add_typer(groups[name], name=name)


ALL = {**PANELS, "Run saved commands": (RUN,)}
_add_commands()


def main() -> None:
    _run_app(app)


def _run_app(app: typer.Typer) -> None:
    # transformers, datasets and the hub client read these at import; draftlab shows its own progress
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_NO_ADVISORY_WARNINGS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    limit_threads()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup the signal stays ignored
            signal.signal(number, _interrupt)
    guard_streams()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:  # before the command began
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Unprintable as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def run_alone(command: Command) -> None:
    """Run the command of a plug-in as a program of its own."""
    alone = typer.Typer(pretty_exceptions_enable=False)
    alone.command(cls=_class_of(command))(typer_function(command))
    _run_app(alone)


def _interrupt(number: int, _: object) -> None:
    """Stop as Ctrl-C does, so that unfinished work is removed or saved."""
    raise KeyboardInterrupt


def _print(outcome: Outcome, as_json: bool) -> None:
    if as_json:
        print(json.dumps(outcome.data | {"next": outcome.next}, default=str, indent=2))
        return
    console = Console(soft_wrap=True)
    for item in outcome.show:
        if isinstance(item, str):
            for line in item.split("\n"):
                print_words(console, line)
        else:
            # rich wraps captions between words in a terminal; a file keeps the lines
            console.print(item, soft_wrap=not console.is_terminal)
    if outcome.next:
        note(f"next: {outcome.next}")
