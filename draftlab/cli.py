"""Typer wiring: commands, --json, exit codes. The only place that catches UserError."""

import functools
import inspect
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from typer import Argument, Option

from draftlab import __version__
from draftlab.commands import COMMANDS, DryRun, Outcome
from draftlab.console import is_main_process, processes
from draftlab.errors import UserError

EXIT_USER_ERROR, EXIT_MISSED = 1, 3
LAUNCHED = ("train", "distill", "prune")  # commands that a launcher may run in several processes

app = typer.Typer(
    name="draftlab",
    help="Design, prune, distil and score draft models for speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run(
    recipe: Annotated[Path, Argument(help="Recipe file: a YAML list of commands.")], dry_run: DryRun = False
) -> Outcome:
    """Run a recipe; steps that are done already are skipped."""
    from draftlab.recipe import read_recipe, run_recipe

    return run_recipe(read_recipe(recipe), dry_run=dry_run)


def present(command: Callable[..., Outcome]) -> Callable[..., None]:
    """command with --json, its outcome printed on stdout and its errors as one line on stderr."""

    @functools.wraps(command)
    def shown(json_output: bool, **arguments: Any) -> None:
        try:
            if processes() > 1 and command.__name__ not in LAUNCHED:
                raise UserError(f"{command.__name__} runs in one process; launch {', '.join(LAUNCHED)} in several")
            outcome = command(**arguments)
        except UserError as error:
            if is_main_process():
                print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(EXIT_USER_ERROR) from None
        except KeyboardInterrupt:
            print("interrupted; repeat the command to go on where it stopped", file=sys.stderr)
            raise typer.Exit(130) from None
        if not is_main_process():
            return
        _print(outcome, json_output)
        if outcome.missed:
            for text in outcome.missed:
                print(f"missed: {text}", file=sys.stderr)
            raise typer.Exit(EXIT_MISSED)

    flag = Annotated[bool, Option("--json", help="Print the result as JSON.")]
    parameter = inspect.Parameter("json_output", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=flag)
    signature = inspect.signature(command)
    shown.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), parameter], return_annotation=None
    )
    shown.__annotations__ = get_type_hints(command, include_extras=True) | {"json_output": flag, "return": None}
    return shown


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, Option("--version", help="Print the version.")] = False) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if version:
        print(__version__)
        raise typer.Exit()


GROUPS = {
    "cache": "A target's distributions on disk, to distil from without the target.",
    "trace": "A target's own output, to measure drafts on without the target.",
}
_apps = {"": app} | {name: typer.Typer(help=text, no_args_is_help=True) for name, text in GROUPS.items()}
for _group in GROUPS:
    app.add_typer(_apps[_group], name=_group)
for _name, _command in {**COMMANDS, "run": run}.items():
    _group, _, _leaf = _name.rpartition(" ")
    _apps[_group].command(_leaf)(present(_command))


def main() -> None:
    # read by transformers, datasets and the hub client when they are imported: our own progress is enough
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_NO_ADVISORY_WARNINGS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    app()


def _print(outcome: Outcome, json_output: bool) -> None:
    if json_output:
        print(json.dumps(outcome.data, default=str, indent=2))
        return
    console = Console(soft_wrap=True)
    for item in outcome.show:
        console.print(item, markup=False, highlight=False)
