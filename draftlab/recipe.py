"""A recipe is a saved sequence of commands: a YAML list, read and checked as a whole, then run from top to bottom."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from typer.models import ParameterInfo

from draftlab.commands import COMMANDS, Outcome
from draftlab.console import note
from draftlab.errors import UserError, did_you_mean
from draftlab.model.shape import validation_text


@dataclass(frozen=True, slots=True)
class Step:
    """One command with all its arguments, defaults filled in."""

    command: str
    arguments: dict[str, Any]

    @property
    def out(self) -> Path | None:
        return self.arguments.get("out")


def read_recipe(path: Path) -> list[Step]:
    """Every step checked against its command's signature before anything runs.

    Raises:
        UserError: names the step and the key.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"recipe {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise UserError(f"recipe {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or set(content) != {"steps"} or not isinstance(content["steps"], list):
        raise UserError(f"recipe {path}: want one key, steps, with a list of commands")
    return [_read_step(step, f"{path}: step {number}") for number, step in enumerate(content["steps"], 1)]


def run_recipe(steps: list[Step], *, dry_run: bool) -> Outcome:
    """Run the steps; one whose output was made by the same command, arguments and inputs is not run again.

    The outcome shows what the last step showed.
    """
    if dry_run:
        plan = {f"{step.command} {step.out or ''}".rstrip(): "done" if is_done(step) else "to do" for step in steps}
        return Outcome(path=None, show=[f"{name}: {state}" for name, state in plan.items()], data={"steps": plan})
    last = Outcome(path=None, show=[], data={})
    for number, step in enumerate(steps, 1):
        title = f"[{number}/{len(steps)}] {step.command} {step.out or ''}".rstrip()
        if is_done(step):
            note(f"{title}: done already")
            last = Outcome(path=step.out, show=[str(step.out)], data={"path": str(step.out)})
            continue
        note(title)
        last = COMMANDS[step.command](**step.arguments)
        if last.missed:
            break
    return last


def is_done(step: Step) -> bool:
    """The step's output records this very command, and its inputs have not changed since."""
    from draftlab import provenance

    record = provenance.read_record(step.out) if step.out is not None else None
    if record is None:
        return False
    arguments = {k: v for k, v in step.arguments.items() if k not in ("force", "dry_run")}
    same = record.command == step.command and record.arguments == provenance.plain(arguments)
    return same and all(
        Path(path).exists() and provenance.fingerprint(Path(path)) == digest for path, digest in record.inputs.items()
    )


def _read_step(step: object, where: str) -> Step:
    if not isinstance(step, dict) or len(step) != 1:
        raise UserError(f"{where}: want one command with its arguments, got {step!r}")
    command, arguments = next(iter(step.items()))
    if command not in COMMANDS:
        raise UserError(f"{where}: no command {command!r}{did_you_mean(str(command), COMMANDS)}")
    model = _arguments_model(command)
    unknown = sorted(set(arguments or {}) - set(model.model_fields))
    if unknown:
        raise UserError(
            f"{where} ({command}): unknown key {unknown[0]!r}{did_you_mean(unknown[0], model.model_fields)}"
        )
    try:
        read = model.model_validate(arguments or {})
    except ValidationError as error:
        raise UserError(f"{where} ({command}): {validation_text(error)}") from None
    return Step(command, {name: getattr(read, name) for name in model.model_fields})


def _arguments_model(command: str) -> type[BaseModel]:
    """A pydantic model of a command's parameters, with the bounds that Typer checks on the command line."""
    function = COMMANDS[command]
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind, *extras = get_args(hints[name])
        info = next(e for e in extras if isinstance(e, ParameterInfo))
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[name] = (kind, Field(default, ge=info.min, le=info.max))
    return create_model(command, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)
