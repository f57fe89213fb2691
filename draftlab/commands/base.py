"""The parts of a command: settings, a module that prepares its job and shows the result, and the outcome."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from rich.console import Console

from draftlab.commands.checks import check_data, check_file, check_listens
from draftlab.config.base import Config, OutputConfig
from draftlab.config.shared import CheckpointSettings
from draftlab.console import note_if_slow
from draftlab.dates import fixed_date
from draftlab.errors import EXTRAS, MissingExtra
from draftlab.output import Output
from draftlab.runs import workspace
from draftlab.trust import remote_code


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Outcome:
    """The outcome of a command.

    Attributes:
        path: File or directory that the command wrote.
        show: Strings and rich tables, which the command line prints.
        data: Values for programs, which --json prints.
        missed: Messages about thresholds that the result misses. If there are any, the exit code is 3.
        next: Command line that the user may run next.
        result: The result of the job, which the library returned. None for a dry run.
    """

    path: Path | None
    show: Sequence[object]
    data: dict[str, object]
    missed: list[str] = field(default_factory=list)
    next: str | None = None
    result: Any = None

    def __str__(self) -> str:
        console = Console(width=120, record=True, file=io.StringIO())
        for item in self.show:
            console.print(item, soft_wrap=True, markup=False, highlight=False)
        return console.export_text().rstrip()

    __repr__ = __str__


class Job(Protocol):
    """The work of a command, with checked values: a frozen dataclass in the room of the library that does the work."""

    @property
    def run(self) -> Callable[..., object]:
        """Return the method that does the work. If the command writes a directory, its argument is the Output."""
        ...


class PlannedJob(Job, Protocol):
    """The job of a command that writes a directory."""

    @property
    def name(self) -> str:
        """Return the default name of the output directory, which is under the workspace's runs."""
        ...

    def facts(self) -> Mapping[str, object]:
        """Return the facts that a dry run shows.

        The dry run converts the facts "flops" (floating-point operations) and "bytes" (memory to read) to minutes.
        """
        ...


class CommandModule(Protocol):
    """The module of a command. It may import torch, because it is imported when the command runs.

    Attributes:
        prepare: Function that resolves and checks the settings, and returns the job. Its second argument is whether
            weight files must be present.
        show: Function that makes the outcome from the result of the job and the settings. If the command writes a
            directory, the third argument is its path.
    """

    prepare: Callable[[Any, bool], Job]
    show: Callable[..., Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command. The command line, recipes and tests build its config, then run it.

    Attributes:
        module: Name of the CommandModule.
        help: What the command does.
        example: Command line for --help, without "draftlab".
        dry_run: Whether the command has --dry-run, which shows its plan.
        resumes: Whether the command keeps unfinished work in its output directory and resumes there. Such a command
            has no --force.
    """

    name: str
    config: type[Config]
    module: str
    help: str
    example: str = ""
    dry_run: bool = False
    resumes: bool = False

    def __call__(self, *, force: bool = False, dry_run: bool = False, **settings: Any) -> Outcome:
        return self.run(self.config.build(settings), force=force, dry_run=dry_run)

    def run(self, config: Config, *, force: bool = False, dry_run: bool = False) -> Outcome:
        """Run the command with a config, and return the outcome. dry_run: Whether to return only the plan.

        Raises:
            UserError: The output exists and force is off, or the command fails.
        """
        config.note_unused()
        try:
            with remote_code(isinstance(config, CheckpointSettings) and config.trust_remote_code):
                return self._run(config.resolved(), force=force, dry_run=dry_run)
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
            raise MissingExtra(error.name) from error

    def _run(self, config: Config, *, force: bool, dry_run: bool) -> Outcome:
        if not isinstance(config, OutputConfig):
            result = self.job(config, not dry_run).run()
            return replace(self.loaded().show(result, config), result=result)

        def output_in(out: Path) -> Output:
            return Output(command=self.name, config=config, out=out, force=force, dry_run=dry_run)

        if config.out is not None and not (dry_run or self.resumes):
            # checked first, because the check of the settings may take minutes
            output_in(config.out).check_free()
        with fixed_date():
            job = self.planned(config, not dry_run)
            output = output_in(config.out or workspace.load().runs / job.name)
            if dry_run:
                from draftlab.commands.plan import plan

                return plan(output, job.facts())
            with output.locked(resumes=self.resumes):
                if not self.resumes:
                    output.check_free()
                output.inputs()  # hashed before they are read, because a file may change meanwhile
                result = job.run(output)
                return replace(self.loaded().show(result, config, output.out), result=result)

    def loaded(self) -> CommandModule:
        """Import the module of the command."""
        with note_if_slow(f"{self.name}: loading torch and transformers"):
            return cast(CommandModule, import_module(self.module))

    def job(self, config: Config, weights: bool) -> Job:
        """Check text, prompts and servers, which is quick, then all other settings. weights: Same as in `prepare`."""
        if config.text_source is not None:
            check_data(config.text_source, weights)
        for option, url in config.addresses.items():
            if weights and url is not None:
                check_listens(option, url)
        prompts = getattr(config, "prompt_file", None)
        if weights and prompts is not None:
            check_file(config.flag("prompt_file"), prompts)
        return self.loaded().prepare(config, weights)

    def planned(self, config: OutputConfig, weights: bool) -> PlannedJob:
        """Return the job of a command that writes a directory. Arguments: As in `job`."""
        return cast(PlannedJob, self.job(config, weights))

    @property
    def has_force(self) -> bool:
        return issubclass(self.config, OutputConfig) and not self.resumes
