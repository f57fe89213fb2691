"""A command: settings, a function, and the outcome that it shows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftlab.config.base import Config, OutputConfig
from draftlab.config.shared import CheckpointSettings
from draftlab.errors import EXTRAS, MissingExtra
from draftlab.output import Output
from draftlab.trust import remote_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a command.

    path: what it wrote. show: what a person reads, strings and rich tables. data: what a program reads. missed: bars
    that the user set and the result does not reach.
    """

    path: Path | None
    show: Sequence[object]
    data: dict[str, object]
    missed: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of the command line, of recipes and of tests: all build its config, then run it.

    function(config), or function(config, output) where the config has an output. dry_run: it can show its plan.
    resumes: it continues in its own output directory, which nothing replaces.
    """

    name: str
    config: type[Config]
    function: Callable[..., Outcome]
    dry_run: bool
    resumes: bool

    def __call__(self, *, force: bool = False, dry_run: bool = False, **settings: Any) -> Outcome:
        return self.run(self.config.build(settings), force=force, dry_run=dry_run)

    def run(self, config: Config, *, force: bool = False, dry_run: bool = False) -> Outcome:
        """Run with a finished config.

        Raises:
            UserError: the output directory is not free, and what the command raises.
        """
        try:
            with remote_code(isinstance(config, CheckpointSettings) and config.trust_remote_code):
                return self._run(config.resolved(), force=force, dry_run=dry_run)
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
            raise MissingExtra(error.name) from error

    def _run(self, config: Config, *, force: bool, dry_run: bool) -> Outcome:
        config.check(weights=not dry_run)
        if not isinstance(config, OutputConfig):
            return self.function(config)
        out = config.output_directory()
        output = Output(command=self.name, config=config, out=out, force=force, dry_run=dry_run)
        if dry_run:
            return self.function(config, output)
        if not self.resumes:
            output.check_free()
        with output.locked(resumes=self.resumes):
            if not self.resumes:
                output.check_free()  # again: another process may have finished since
            return self.function(config, output)

    @property
    def has_force(self) -> bool:
        return issubclass(self.config, OutputConfig) and not self.resumes


def command(
    config: type[Config], *, name: str = "", dry_run: bool = False, resumes: bool = False
) -> Callable[[Callable[..., Outcome]], Command]:
    """Return a decorator that makes a command of a function; its docstring is the command's help."""

    def decorate(function: Callable[..., Outcome]) -> Command:
        known_as = name or function.__name__.replace("_", "-")
        return Command(name=known_as, config=config, function=function, dry_run=dry_run, resumes=resumes)

    return decorate


def plan(output: Output, facts: Mapping[str, object]) -> Outcome:
    """Return what --dry-run shows: the facts, and the directory that would be written."""
    lines = [f"{name}: {value}" for name, value in facts.items()]
    return Outcome(path=None, show=[*lines, f"would write {output.out}"], data={"out": str(output.out), **facts})
