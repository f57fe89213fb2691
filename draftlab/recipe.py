"""Recipes: saved sequences of commands, checked as a whole, then run from top to bottom."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftlab import provenance
from draftlab.commands import COMMANDS
from draftlab.commands.base import Command, Outcome, command
from draftlab.config.base import Config, OutputConfig, option
from draftlab.console import note
from draftlab.errors import UserError, did_you_mean, one_line
from draftlab.reading import read_yaml


class RunConfig(Config):
    recipe: Path = option(help="Recipe file: a YAML list of commands.", argument=True)
    plan_only: bool = option(False, "Show which steps are done and which are to do.", flag="--dry-run")


@dataclass(frozen=True, slots=True)
class Step:
    """One command with the settings that the recipe names."""

    command: Command
    settings: dict[str, Any]
    where: str

    @property
    def config(self) -> Config:
        return self.command.config.build(self.settings, self.where)

    @property
    def out(self) -> Path | None:
        config = self.config
        return self.command.output_directory(config) if isinstance(config, OutputConfig) else None

    def __str__(self) -> str:
        return f"{self.command.name} {self.out or ''}".rstrip()


def read_recipe(path: Path) -> list[Step]:
    """Read every step and check its settings, before anything runs.

    Raises:
        UserError: names the step and the setting.
    """
    content = read_yaml(path, f"recipe {path}")
    if not isinstance(content, dict) or set(content) != {"steps"} or not isinstance(content["steps"], list):
        raise UserError(f"recipe {path}: want one key, steps, with a list of commands")
    return [read_step(step, f"{path}: step {number}") for number, step in enumerate(content["steps"], 1)]


@command(RunConfig)
def run(config: RunConfig) -> Outcome:
    """Run a recipe; finished steps are skipped."""
    steps = read_recipe(config.recipe)
    if config.plan_only:
        plan = {str(step): "done" if is_done(step) else "to do" for step in steps}
        return Outcome(path=None, show=[f"{name}: {state}" for name, state in plan.items()], data={"steps": plan})
    outcome = Outcome(path=None, show=[], data={})
    for number, step in enumerate(steps, 1):
        outcome = run_step(step, f"[{number}/{len(steps)}] {step}")
        if outcome.missed:
            break
    return outcome


def run_step(step: Step, label: str) -> Outcome:
    """Run a step unless its output is there. label: what to print before it."""
    if is_done(step):
        note(f"{label}: already done")
        return Outcome(path=step.out, show=[str(step.out)], data={"path": str(step.out)})
    note(label)
    return step.command.run(step.config)


def is_done(step: Step) -> bool:
    """Return whether the step's output was made by the same command and settings from the same inputs.

    Settings that the record does not know, of an older version, count as their defaults.
    """
    record = provenance.read_record(step.out) if step.out is not None else None
    if record is None or record.command != step.command.name:
        return False
    try:
        recorded = step.command.config.build(record.config)
    except UserError:
        return False
    return recorded.settings() == step.config.resolved().settings() and all(
        Path(path).exists() and provenance.fingerprint(Path(path)) == digest for path, digest in record.inputs.items()
    )


def read_step(content: object, where: str) -> Step:
    """Return the step that one entry of a recipe is. Raises UserError: no such command or setting."""
    if not isinstance(content, dict) or len(content) != 1:
        raise UserError(f"{where}: want one command with its settings, got {one_line(content, 80)}")
    name, settings = next(iter(content.items()))
    if not isinstance(name, str) or name not in COMMANDS:
        raise UserError(f"{where}: no command {name!r}{did_you_mean(str(name), COMMANDS)}")
    if not isinstance(settings, dict | None) or not all(isinstance(key, str) for key in settings or ()):
        raise UserError(f"{where} ({name}): want NAME: VALUE for each setting, got {one_line(settings, 80)}")
    step = Step(COMMANDS[name], settings or {}, f"{where} ({name}): ")
    step.config.settings()  # raises for bad settings
    return step
