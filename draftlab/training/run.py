"""One training run on disk: train, log and save checkpoints; resume a killed run."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter
from transformers import PreTrainedModel

from draftlab.atomic import append_line, check_space, write_atomic
from draftlab.console import progress
from draftlab.errors import UserError
from draftlab.output import Output
from draftlab.provenance import LOG_FILE
from draftlab.reading import parse_json
from draftlab.training import checkpointer
from draftlab.training.loop import Loop
from draftlab.training.trainer import (
    Constraint,
    EvalRecord,
    LengthComparison,
    StepRecord,
    TrainingSetup,
    train,
)

STEPS, EVALUATIONS = TypeAdapter(StepRecord), TypeAdapter(EvalRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """Measurements of a finished run. seconds count every step once, also those before a resume.

    after: the best evaluation, whose weights are written. lengths: tokens per target pass for every K, empty where no
    target could write text. notes: The student's notes on its output.
    """

    before: EvalRecord
    after: EvalRecord
    tokens: int
    seconds: float
    bits_per_byte: float
    lengths: list[LengthComparison] = field(default_factory=list)
    notes: dict[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """Return the measurements and the notes of the student side by side."""
        facts = asdict(self)
        return facts.pop("notes") | facts


def claimed_state(output: Output, inputs: Sequence[Path]) -> Path:
    """Return the state directory of a run, claimed for it, in every process.

    Raises:
        UserError: it belongs to another run and force is off, cannot be written, or has a checkpoint with pickles.
    """
    with checkpointer.process_state().main_process_first():
        output.claim_state(inputs)
    checkpointer.check_resumable(output.state)
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
    """Train student in place. state: keeps checkpoints, the log and the best weights until the caller removes it.

    Raises:
        UserError: state cannot be written, the disk is too small for it, or training fails.
    """
    check_space(state, _checkpoint_bytes(student, loop), "checkpoints")
    with progress(what, loop.steps) as advance:
        for record in train(student, setup, loop, state, constraint):
            _append(state / LOG_FILE, record)
            if log is not None:
                log(record)
            if isinstance(record, StepRecord):
                text = f"{record.tokens / record.seconds:,.0f} tokens/s, loss {record.loss:.3f}"
            else:
                text = f"held out: {setup.heldout.bits_per_byte(record.cross_entropy):.3f} bits per byte"
            alpha = "" if record.acceptance is None else f", acceptance {record.acceptance:.3f}"
            advance(record.step, text + alpha)
    checkpointer.process_state().wait_for_everyone()
    records = read_log(state / LOG_FILE)
    if (
        checkpointer.process_state().is_main_process
    ):  # each step once, as a run has it that was not killed
        write_atomic(
            state / LOG_FILE, "".join(json.dumps(asdict(record)) + "\n" for record in records)
        )
    steps = [r for r in records if isinstance(r, StepRecord)]
    evals = [r for r in records if isinstance(r, EvalRecord)]
    best = max(evals, key=lambda r: r.selection_metric)  # the first of equals, as Best
    after = best if constraint is None else evals[-1]
    return TrainingResult(
        before=evals[0],
        after=after,
        tokens=sum(r.tokens for r in steps),
        seconds=sum(r.seconds for r in steps),
        bits_per_byte=setup.heldout.bits_per_byte(after.cross_entropy),
    )


def _checkpoint_bytes(student: PreTrainedModel, loop: Loop) -> int:
    """Return the bytes of the best weights and of checkpoints, with two moments of an optimizer, all in fp32."""
    trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
    count = min(2, loop.steps // loop.save_steps)  # the newest, and one more while it is written
    return 4 * trained * (1 + 3 * count)


def read_log(path: Path) -> list[StepRecord | EvalRecord]:
    """Return the records of a log, each step once: those that a killed run wrote after its checkpoint are replaced.

    The half of a line that a kill may leave at the end is skipped.

    Raises:
        UserError: another line is damaged, or the evaluation before the first step is missing.
    """
    latest: dict[tuple[bool, int], StepRecord | EvalRecord] = {}
    for number, line in enumerate(path.read_text(errors="replace").split("\n")[:-1], 1):
        try:
            record = (STEPS if '"grad_norm"' in line else EVALUATIONS).validate_python(
                parse_json(line)
            )
        except ValueError:
            raise UserError(
                f"{path}:{number} is damaged; --force starts again, or remove {path.parent}"
            ) from None
        latest[isinstance(record, EvalRecord), record.step] = record
    if (True, 0) not in latest:
        raise UserError(
            f"{path} lacks its first lines; --force starts again, or remove {path.parent}"
        )
    return sorted(latest.values(), key=lambda r: (r.step, isinstance(r, EvalRecord)))


def _append(log: Path, record: StepRecord | EvalRecord) -> None:
    if not checkpointer.process_state().is_main_process:
        return
    append_line(log, json.dumps(asdict(record)))
