"""A command: settings, a function, and the outcome that it shows."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from draftlab import workspace
from draftlab.config.base import Config, OutputConfig
from draftlab.config.shared import CheckpointSettings
from draftlab.errors import EXTRAS, MissingExtra
from draftlab.output import Output
from draftlab.trust import remote_code


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Outcome:
    """The result of a command; commands that Python calls, too, return a subclass with what they found.

    path: what it wrote. show: what a person reads, strings and rich tables. data: what a program reads. missed: bars
    that the user set and the result does not reach.
    """

    path: Path | None
    show: Sequence[object]
    data: dict[str, object]
    missed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        console = Console(width=120, record=True, file=io.StringIO())
        for item in self.show:
            console.print(item, soft_wrap=True, markup=False, highlight=False)
        return console.export_text().rstrip()

    __repr__ = __str__


class Prepared(Protocol):
    """What prepare() returns for a command that writes an output."""

    @property
    def name(self) -> str:
        """The name of the output directory under the workspace's runs, unless --out names another."""
        ...


class Planned(Prepared, Protocol):
    """What prepare() returns for a command that can show its plan."""

    def facts(self) -> Mapping[str, object]:
        """Return what a dry run shows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of the command line, of recipes and of tests: all build its config, then run it.

    prepare(config, weights) resolves and checks the settings, and returns the values that the function calls the
    library with: a Prepared or Planned where that is said. Without weights, no weights have to be there.
    function(prepared), or function(prepared, output) where the config has an output; without prepare it gets the
    config. dry_run: it can show its plan. resumes: it continues in its own output directory, which nothing replaces.
    """

    name: str
    config: type[Config]
    function: Callable[..., Outcome]
    dry_run: bool
    resumes: bool
    prepare: Callable[[Any, bool], Any] | None = None

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
        prepared = self.prepare(config, not dry_run) if self.prepare else None
        values = config if prepared is None else prepared
        if not isinstance(config, OutputConfig):
            return self.function(values)
        out = config.output_directory() if prepared is None else _directory(config, prepared)
        output = Output(command=self.name, config=config, out=out, force=force, dry_run=dry_run)
        if dry_run:
            return self.function(values, output) if prepared is None else plan(output, prepared.facts())
        if not self.resumes:
            output.check_free()
        with output.locked(resumes=self.resumes):
            if not self.resumes:
                output.check_free()  # again: another process may have finished since
            return self.function(values, output)

    def output_directory(self, config: OutputConfig) -> Path:
        """Return where a run with these settings writes; weights are neither read nor fetched."""
        if self.prepare is None or config.out is not None:
            return config.output_directory()
        return _directory(config, self.prepare(config.resolved(), False))

    @property
    def has_force(self) -> bool:
        return issubclass(self.config, OutputConfig) and not self.resumes


def command(
    config: type[Config],
    *,
    prepare: Callable[[Any, bool], Any] | None = None,
    name: str = "",
    dry_run: bool = False,
    resumes: bool = False,
) -> Callable[[Callable[..., Outcome]], Command]:
    """Return a decorator that makes a command of a function; its docstring is the command's help."""

    def decorate(function: Callable[..., Outcome]) -> Command:
        known_as = name or function.__name__.replace("_", "-")
        return Command(
            name=known_as, config=config, function=function, dry_run=dry_run, resumes=resumes, prepare=prepare
        )

    return decorate


def _directory(config: OutputConfig, prepared: Prepared) -> Path:
    return config.out or workspace.load().runs / prepared.name


def plan(output: Output, facts: Mapping[str, object]) -> Outcome:
    """Return what --dry-run shows: the facts, and the directory that would be written."""
    lines = [f"{name}: {value}" for name, value in facts.items()]
    return Outcome(path=None, show=[*lines, f"would write {output.out}"], data={"out": str(output.out), **facts})
