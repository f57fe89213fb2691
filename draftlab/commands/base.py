"""The parts of a command: settings, a function that checks them and returns a job, and an outcome to show."""

import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console

from draftlab.config.base import Config, OutputConfig
from draftlab.config.shared import CheckpointSettings
from draftlab.dates import fixed_date
from draftlab.errors import EXTRAS, MissingExtra, UserError, about
from draftlab.model import hub
from draftlab.output import Output
from draftlab.quantities import format_duration
from draftlab.runs import workspace
from draftlab.trust import remote_code

Value = TypeVar("Value")
Result = TypeVar("Result", covariant=True)
LARGE_WEIGHTS = 1 << 27  # number of weights with which a dry run measures memory bandwidth
# ratio of a model's time to the time of its matrix products, as dry runs assume
MODEL_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Outcome:
    """The result of a command. Most commands return a subclass with typed values.

    Attributes:
        path: File or directory that the command wrote.
        show: Strings and rich tables, which the command line prints.
        data: Values for programs, which --json prints.
        missed: Messages about thresholds that the result misses. If there are any, the exit code is 3.
        next: Command line that the user may run next.
    """

    path: Path | None
    show: Sequence[object]
    data: dict[str, object]
    missed: list[str] = field(default_factory=list)
    next: str | None = None

    def __str__(self) -> str:
        console = Console(width=120, record=True, file=io.StringIO())
        for item in self.show:
            console.print(item, soft_wrap=True, markup=False, highlight=False)
        return console.export_text().rstrip()

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class Job(Generic[Result]):
    """The work of a command, with checked settings. The prepare function of the command returns it.

    Attributes:
        run: Function that does the work. If the command writes a directory, its argument is the Output.
        name: Default name of the output directory, which is under the workspace's runs.
        facts: Function that returns the facts that a dry run shows. The dry run converts the facts "flops"
            (floating-point operations) and "bytes" (memory to read) to minutes.
    """

    run: Callable[..., Result]
    name: str = ""
    facts: Callable[[], Mapping[str, object]] = dict


def fill(kind: Callable[..., Value], config: Config, /, **others: Any) -> Value:
    """Call a library function or class, and return its result. Each parameter gets the setting of the same name.

    others: Arguments that are passed in place of the settings of the same name, or in addition to the settings.
    """
    same = inspect.signature(kind).parameters.keys() & type(config).model_fields.keys() - others.keys()
    return kind(**{name: getattr(config, name) for name in same}, **others)


def check_data(data: str, weights: bool) -> None:
    """Check that the text of --data exists. weights: Whether data sets on the hub are checked as well.

    Raises:
        UserError: The text is missing.
    """
    with about("--data"):
        hub.check_data(data) if weights else hub.check_local_data(data)


def check_plots() -> None:
    """Check that matplotlib is installed, before work that ends in a picture. Raises ModuleNotFoundError: it is not."""
    import_module("draftlab.results.plots")


def check_program(path: Path | None) -> None:
    """Check that the program of --verify-with exists. Raises UserError: it is missing."""
    if path is not None and not path.is_file():
        raise UserError(f"--verify-with {path}: there is no such program; write the path of vllm or llama-server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command. The command line, recipes and tests build its config, then run it.

    Attributes:
        function: Function that makes the outcome from the result of the job. If the command writes a directory, its
            second argument is the Output. The docstring of the function is the command's help.
        prepare: Function that resolves and checks the settings, and returns the Job. Its second argument is whether
            weight files must be present. If it is not given, nothing is checked here, and `function` receives the
            config.
        example: Command line for --help, without "draftlab".
        dry_run: Whether the command has --dry-run, which shows its plan.
        resumes: Whether the command keeps unfinished work in its output directory and resumes there. Such a command
            has no --force.
    """

    name: str
    config: type[Config]
    function: Callable[..., Outcome]
    example: str = ""
    dry_run: bool = False
    resumes: bool = False
    prepare: Callable[[Any, bool], Job[Any]] = lambda config, weights: Job(lambda: config)

    def __call__(self, *, force: bool = False, dry_run: bool = False, **settings: Any) -> Outcome:
        return self.run(self.config.build(settings), force=force, dry_run=dry_run)

    def run(self, config: Config, *, force: bool = False, dry_run: bool = False) -> Outcome:
        """Run the command with a config, and return the outcome. dry_run: Whether to return only the plan.

        Raises:
            UserError: The output exists and force is off, or the command fails.
        """
        try:
            with remote_code(isinstance(config, CheckpointSettings) and config.trust_remote_code):
                return self._run(config.resolved(), force=force, dry_run=dry_run)
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
            raise MissingExtra(error.name) from error

    def _run(self, config: Config, *, force: bool, dry_run: bool) -> Outcome:
        if not isinstance(config, OutputConfig):
            return self.function(self.job(config, not dry_run).run())

        def output_in(out: Path) -> Output:
            return Output(command=self.name, config=config, out=out, force=force, dry_run=dry_run)

        if config.out is not None and not (dry_run or self.resumes):
            # checked first, because the check of the settings may take minutes
            output_in(config.out).check_free()
        with fixed_date():
            job = self.job(config, not dry_run)
            output = output_in(config.out or workspace.load().runs / job.name)
            if dry_run:
                return plan(output, job.facts())
            with output.locked(resumes=self.resumes):
                if not self.resumes:
                    output.check_free()
                output.inputs()  # hashed before they are read, because a file may change meanwhile
                return self.function(job.run(output), output)

    def job(self, config: Config, weights: bool) -> Job[Any]:
        """Check the text of --data, which takes no time, then all other settings. weights: Same as in `prepare`."""
        if config.text_source is not None:
            check_data(config.text_source, weights)
        return self.prepare(config, weights)

    @property
    def has_force(self) -> bool:
        return issubclass(self.config, OutputConfig) and not self.resumes


def command(config: type[Config], *, name: str = "", **details: Any) -> Callable[[Callable[..., Outcome]], Command]:
    """Return a decorator that turns a function into a Command. details: Further fields of the Command."""
    return lambda function: Command(
        name=name or function.__name__.replace("_", "-"),
        config=config,
        function=function,
        **details,
    )


def plan(output: Output, facts: Mapping[str, Any]) -> Outcome:
    """Return the outcome of a dry run: the facts, the estimated time, and the directory that would be written."""
    shown, minutes = dict(facts), {}
    flops, read_bytes = shown.pop("flops", 0), shown.pop("bytes", 0)
    if flops or read_bytes:
        import torch

        from draftlab.engine.timing import bandwidth_gbs, matmul_tflops
        from draftlab.model.devices import resolve_device

        device, seconds = resolve_device(getattr(output.config, "device", "auto")), 0.0
        if flops:
            seconds += MODEL_SECONDS * flops / (1e12 * matmul_tflops(torch.float32, device))
        if read_bytes:
            bandwidth = bandwidth_gbs(LARGE_WEIGHTS, torch.float32, device)
            seconds += read_bytes / (1e9 * bandwidth)
        minutes = {"minutes": seconds / 60}
        kind = device.type.upper().replace("CUDA", "GPU")
        shown["time"] = f"about {format_duration(seconds)} on this {kind}"
    lines = [f"{name}: {value}" for name, value in shown.items()]
    data = {"out": str(output.out), **shown, **minutes}
    return Outcome(path=None, show=[*lines, f"would write {output.out}"], data=data, next=output.command_line)
