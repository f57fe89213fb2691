"""Train a student and write it: log records, save checkpoints, and resume a killed run."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import tracking
from pydantic import TypeAdapter
from transformers import PreTrainedModel

from draftlab.console import note, progress
from draftlab.errors import UserError
from draftlab.output import Output
from draftlab.reading import reading
from draftlab.runs.atomic import append_line, check_space, remove_state, write_atomic
from draftlab.runs.provenance import LOG_FILE
from draftlab.training.checkpointer import process_state, select_device
from draftlab.training.loop import Hardware, Loop
from draftlab.training.students.base import StudentSpec
from draftlab.training.trainer import Constraint, EvalRecord, StepRecord, TrainingSetup, train

if TYPE_CHECKING:
    from draftlab.servers.client import Server
    from draftlab.training.answers import PromptFile
    from draftlab.training.evaluate import LengthComparison
    from draftlab.training.texts import TrainingText


@contextlib.contextmanager
def tracked(names: Sequence[str], output: Output) -> Iterator[Callable[[StepRecord | EvalRecord], None]]:
    """Yield a function that logs a record to the named trackers of accelerate, such as tensorboard.

    Numbers of a training step are logged as train/NAME, and numbers of an evaluation as heldout/NAME. A tracker that
    writes files puts them next to the output, in a folder with the tracker's name.
    """
    trackers = [_start(name, output) for name in names]

    def log(record: StepRecord | EvalRecord) -> None:
        values = {n: v for n, v in asdict(record).items() if isinstance(v, float)}
        part = "heldout" if "cross_entropy" in values else "train"
        for tracker in trackers:
            tracker.log({f"{part}/{n}": v for n, v in values.items()}, step=record.step)

    yield log
    for tracker in trackers:
        tracker.finish()


def check_trackers(names: Sequence[str]) -> None:
    """Check that accelerate knows the trackers, and that their packages are installed.

    Raises:
        UserError: A tracker is unknown, or its package is not installed.
    """
    installed = [str(name) for name in tracking.get_available_trackers()]
    for name in names:
        if name not in installed:
            raise UserError(
                f"--report-to {name}: accelerate has no such tracker, or its package is not installed; installed are: "
                f"{', '.join(installed) or 'none'}"
            )


def _start(name: str, output: Output) -> tracking.GeneralTracker:
    kind = tracking.LOGGER_TYPE_TO_CLASS[name]
    out = output.out
    values = output.config.settings()
    tracker = kind(out.name, out.parent / name) if kind.requires_logging_directory else kind("draftlab")
    tracker.start()
    tracker.store_init_configuration({n: v if isinstance(v, int | float | str) else str(v) for n, v in values.items()})
    return tracker


RECORD: TypeAdapter[StepRecord | EvalRecord] = TypeAdapter(StepRecord | EvalRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The measurements of a finished training run.

    Attributes:
        before: The evaluation before the first step.
        after: The evaluation whose weights are written: the best, or the last if pruning masks are trained.
        tokens: Number of predictions in all steps.
        seconds: Time of all steps. Steps before a resume count, too.
        bits_per_byte: Cross-entropy of `after` in bits per byte of held-out text.
        skipped_steps: Number of steps that were skipped, because their loss or gradient norm was not finite.
        lr_from_step: First step with the learning rate of the settings. It is above 1 if the run was resumed with a
            smaller rate.
        lengths: Tokens per target pass for every K. Empty if they were not measured.
        notes: Facts that the student adds to draftlab.json.
    """

    before: EvalRecord
    after: EvalRecord
    tokens: int
    seconds: float
    bits_per_byte: float
    skipped_steps: int = 0
    lr_from_step: int = 1
    lengths: "list[LengthComparison]" = field(default_factory=list)
    notes: dict[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """Return the measurements and the notes in one dict."""
        facts = asdict(self)
        return facts.pop("notes") | facts


def claimed_state(output: Output, paths: Sequence[Path]) -> Path:
    """Make the state directory, where checkpoints are written, or check that it belongs to this run. Return its path.

    A run may be resumed with a smaller learning rate.

    Raises:
        UserError: The directory belongs to another run and --force is not set, or it cannot be written.
    """
    with process_state().main_process_first():
        output.claim_state(paths, may_fall=("lr",))
    return output.state


def fit(
    student: PreTrainedModel,
    setup: TrainingSetup,
    loop: Loop,
    *,
    state: Path,
    what: str,
    constraint: Constraint | None = None,
    log: Callable[[StepRecord | EvalRecord], None] | None = None,
) -> TrainingResult:
    """Train the student in place, and return measurements.

    Args:
        state: Directory for checkpoints, log and best weights. The caller removes it.
        what: Label of the progress bar.
        constraint: Module that is trained together with the student, such as pruning masks.
        log: Function that is called with every record.

    Raises:
        UserError: `state` cannot be written, the disk is too small for checkpoints, or training fails.
    """
    processes = process_state()
    count = processes.num_processes
    note(f"{what}: training in {count} process{'es' * (count > 1)}")
    check_space(state, _checkpoint_bytes(student, loop), "checkpoints")
    with progress(f"{what}: training", loop.steps) as advance:
        for record in train(student, setup, loop, state, constraint):
            if processes.is_main_process:
                append_line(state / LOG_FILE, json.dumps(asdict(record)))
            if log is not None:
                log(record)
            if isinstance(record, StepRecord):
                loss = "not finite" if record.loss is None else f"{record.loss:.3f}"
                text = f"{record.tokens / record.seconds:,.0f} tokens/s, loss {loss}"
            else:
                text = f"held out: {setup.heldout.bits_per_byte(record.cross_entropy):.3f} bits per byte"
            alpha = "" if record.acceptance is None else f", acceptance {record.acceptance:.3f}"
            advance(record.step, text + alpha)
    processes.wait_for_everyone()
    records = read_log(state / LOG_FILE)
    if processes.is_main_process:  # the log has each step once, as if the run was never killed
        lines = [json.dumps(asdict(record)) + "\n" for record in records]
        write_atomic(state / LOG_FILE, "".join(lines))
    steps = [r for r in records if isinstance(r, StepRecord)]
    evals = [r for r in records if isinstance(r, EvalRecord)]
    # max returns the first of equal evaluations, as Best does
    best = max(evals, key=lambda r: r.selection_metric)
    after = best if constraint is None else evals[-1]
    skipped = sum(r.skipped for r in steps)
    if skipped:
        note(f"{skipped} of {loop.steps} steps were skipped, because their loss or gradient norm was not finite")
    earlier = [r.step for r in steps if r.lr != loop.rate(r.step - 1) * loop.lr]
    return TrainingResult(
        before=evals[0],
        after=after,
        tokens=sum(r.tokens for r in steps),
        seconds=sum(r.seconds for r in steps),
        bits_per_byte=setup.heldout.bits_per_byte(after.cross_entropy),
        skipped_steps=skipped,
        lr_from_step=max(earlier, default=0) + 1,
        lengths=[] if setup.length is None else setup.length.compare(evals[0].step, after.step),
    )


def _checkpoint_bytes(student: PreTrainedModel, loop: Loop) -> int:
    """Return the bytes on disk that training needs for the best weights and for checkpoints.

    A checkpoint has the trained weights and two optimizer moments, all in fp32.
    """
    trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
    # the newest checkpoint, and the next checkpoint while it is written
    count = min(2, loop.steps // loop.save_steps)
    return 4 * trained * (1 + 3 * count)


def read_log(path: Path) -> list[StepRecord | EvalRecord]:
    """Return the records of a log. If a resumed run logged a step again, only the last record of the step counts.

    Raises:
        UserError: A line is damaged, or the evaluation before the first step is missing.
    """
    with reading(f"{path} is damaged (remove {path.parent} to start again)"):
        records = [RECORD.validate_json(line) for line in path.read_bytes().splitlines()]
        latest = {(record.step, isinstance(record, EvalRecord)): record for record in records}
        if (0, True) not in latest:
            raise ValueError("the evaluation before the first step is missing")
        return [latest[key] for key in sorted(latest)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStudent:
    """A student in memory, with its teacher and text.

    Attributes:
        module: The module to train: a PreTrainedModel, or a module with the same methods.
        write: Function write(work, state) that writes a checkpoint with the best weights to the directory `work`, and
            returns notes for draftlab.json. The directory `state` has the best weights.
    """

    module: Any
    setup: TrainingSetup
    write: Callable[[Path, Path], dict[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """The distillation of a target into a student.

    Args:
        name: Default name of the output directory.
        student: Kind of student, with its options.
        draft: Checkpoint to train. None trains a new student that is made for the target.
        target: Checkpoint of the target. None if the run does not load the target.
        temperature: Temperature of both distributions in the loss.
        vocab: Number of token ids that the student can predict. None takes the default of the kind of student.
        outputs: Directory of stored target outputs to learn from, in place of `text`.
        answers: Prompts that the target answers first. The stored answers become `outputs`.
        server: Server that runs the target.
        top_logprobs: Number of most probable tokens that the server lists for each position.
        report_to: Names of accelerate's trackers.
    """

    name: str
    student: StudentSpec
    draft: Path | None
    target: Path | None
    text: "TrainingText"
    loop: Loop
    loss: str = "fkl"
    temperature: float = 1.0
    vocab: int | None = None
    outputs: Path | None = None
    answers: "PromptFile | None" = None
    server: "Server | None" = None
    top_logprobs: int = 20
    hardware: Hardware = field(default_factory=Hardware)
    gradient_checkpointing: bool = False
    report_to: Sequence[str] = ()

    def facts(self) -> Mapping[str, object]:
        """Return the facts that a dry run shows."""
        return self.student.facts(self)

    def run(self, output: Output) -> TrainingResult:
        """Train the student, and write the weights of its best evaluation.

        Raises:
            UserError: Checkpoints, text or stored outputs cannot be used, or training fails.
            Interrupted: SIGTERM or Ctrl-C, after a checkpoint was saved.
        """
        job = self
        if self.answers is not None:
            job = replace(self, outputs=self.answers.store(), answers=None)
        reweighing = job.text.reweighing
        reference = reweighing.reference if reweighing is not None else None
        paths = [p for p in (job.draft, job.target, job.outputs, reference) if isinstance(p, Path)]
        select_device(job.hardware.device)
        state = claimed_state(output, paths)
        opened = job.student.open(job, state)
        with tracked(job.report_to, output) as log:
            result = fit(opened.module, opened.setup, job.loop, state=state, what=output.command, log=log)
        if result.after.step < job.loop.steps:
            best = f"after step {result.after.step}" if result.after.step else "before the first step"
            metric = result.after.criterion[0]
            note(f"the best evaluation by {metric} was {best}, so the output has the weights of that step")
        if process_state().is_main_process:
            with output.directory() as work:
                result = replace(result, notes=opened.write(work, state))
                shutil.copyfile(state / LOG_FILE, work / LOG_FILE)
                output.record(work, **result.as_dict())
            remove_state(state)
        process_state().wait_for_everyone()
        return result
