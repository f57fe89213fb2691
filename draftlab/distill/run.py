"""One training run on disk: train, log, checkpoint, write the model; go on where a killed run stopped."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftlab import provenance
from draftlab.console import note, progress
from draftlab.distill import checkpointer, vocabulary
from draftlab.distill.evaluate import Length
from draftlab.distill.lora import merged_weights
from draftlab.distill.trackers import Trackers, tracked
from draftlab.distill.trainer import Constraint, EvalRecord, Settings, StepRecord, TrainingSetup, train
from draftlab.errors import UserError
from draftlab.files import claim_state, removed_if_unused, state_directory
from draftlab.model import checkpoint, saving


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a run is called and what it writes.

    like: the checkpoint whose dtype and tokenizer the result gets. lora: rank of the adapters on it, 0 for none.
    vocab: logits that the result must have, None for as many as config says. track: accelerate's names of who is told
    how the run goes.
    """

    command: str
    arguments: dict[str, object]
    inputs: list[Path]
    out: Path
    like: Path
    config: dict[str, object]
    began: float
    force: bool
    lora: int = 0
    vocab: int | None = None
    track: tuple[str, ...] = ()

    @property
    def state(self) -> Path:
        return state_directory(self.out)

    @cached_property
    def identity(self) -> dict[str, object]:
        """What makes this run this run."""
        inputs = [provenance.fingerprint(path) for path in self.inputs]
        return self.arguments | {"command": self.command, "inputs": inputs}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """What a finished run measured. seconds count every step once, also those before a resume.

    after: the best evaluation, whose weights are written. lengths: tokens per target pass for every K, empty where no
    target could write text.
    """

    before: EvalRecord
    after: EvalRecord
    tokens: int
    seconds: float
    bits_per_byte: float
    lengths: list[Length] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def fit(
    student: PreTrainedModel,
    setup: TrainingSetup,
    settings: Settings,
    *,
    state: Path,
    what: str,
    constraint: Constraint | None = None,
    trackers: Trackers | None = None,
) -> TrainingResult:
    """Train student in place; state keeps checkpoints, log.jsonl and the best weights until the caller removes it.

    Raises:
        UserError: state cannot be written, or training fails.
    """
    log = state / "log.jsonl"
    with progress(what, settings.steps) as advance:
        for record in train(student, setup, settings, state, constraint):
            _append(log, record)
            if trackers is not None:
                trackers.log(record)
            if isinstance(record, StepRecord):
                word = f"{record.tokens / record.seconds:,.0f} tokens/s, loss {record.loss:.3f}"
                advance(record.step, word + _alpha_text(record.acceptance))
            else:
                bits = setup.heldout.bits_per_byte(record.cross_entropy)
                advance(record.step, f"held out: {bits:.3f} bits per byte" + _alpha_text(record.acceptance))
    checkpointer.process_state().wait_for_everyone()
    records = read_log(log)
    steps = [r for r in records if isinstance(r, StepRecord)]
    evals = [r for r in records if isinstance(r, EvalRecord)]
    after = evals[-1] if constraint is not None else max(evals, key=lambda r: r.merit)  # the first of equals, as Best
    return TrainingResult(
        before=evals[0],
        after=after,
        tokens=sum(r.tokens for r in steps),
        seconds=sum(r.seconds for r in steps),
        bits_per_byte=setup.heldout.bits_per_byte(after.cross_entropy),
    )


@contextlib.contextmanager
def claimed(job: Job) -> Iterator[Path]:
    """The folder of an unfinished run, made if there is none, and gone again if nothing was made in it.

    Raises:
        UserError: it belongs to another run and force is off, or cannot be written.
    """
    with removed_if_unused(job.state):
        with checkpointer.process_state().main_process_first():
            claim_state(job.state, job.identity, force=job.force)
        yield job.state


def fit_and_write(
    job: Job, student: PreTrainedModel, setup: TrainingSetup, settings: Settings, **notes: object
) -> TrainingResult:
    """fit, then job.out: the best weights in the dtype of like (bf16 for a new one), log.jsonl, record with notes."""
    state = job.state
    with claimed(job), tracked(job.track, job.out, job.arguments) as trackers:
        fitted = fit(student, setup, settings, state=state, what=job.command, trackers=trackers)
    if setup.length is not None:
        fitted = replace(fitted, lengths=setup.length.compared(fitted.before.step, fitted.after.step))
    if fitted.after.step < settings.steps:
        best = f"after step {fitted.after.step}" if fitted.after.step else "before the first step"
        note(f"the best evaluation was {best}: those weights are written")
    if checkpointer.process_state().is_main_process:
        with checkpoint.new_directory(job.out, force=job.force) as work:
            saving.write_checkpoint(work, job.config, _weights(job), job.like)
            if job.vocab is not None:
                notes["vocab"] = vocabulary.resize(work, job.vocab)
            shutil.copyfile(state / "log.jsonl", work / "log.jsonl")
            notes |= fitted.as_dict()
            provenance.write_record(work, job.command, job.arguments, job.inputs, job.began, **notes)
        shutil.rmtree(state)
    checkpointer.process_state().wait_for_everyone()
    return fitted


def _weights(job: Job) -> Iterator[tuple[str, Tensor]]:
    trained = checkpointer.best_weights(job.state, "student")
    bare = not (job.like / "config.json").is_file()  # a tokenizer alone
    dtype = torch.bfloat16 if bare else checkpoint.stored_dtype(job.like)
    whole = merged_weights(job.like, job.lora, trained) if job.lora else trained
    return ((name, weight.to(dtype)) for name, weight in whole.items())


def read_log(path: Path) -> list[StepRecord | EvalRecord]:
    """Records of a log, each step once: what a killed run wrote after its last checkpoint is replaced."""
    latest: dict[tuple[bool, int], StepRecord | EvalRecord] = {}
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        record = StepRecord(**fields) if "grad_norm" in fields else EvalRecord(**fields)
        latest[isinstance(record, EvalRecord), record.step] = record
    return sorted(latest.values(), key=lambda r: (r.step, isinstance(r, EvalRecord)))


def _append(log: Path, record: StepRecord | EvalRecord) -> None:
    if not checkpointer.process_state().is_main_process:
        return
    try:
        with log.open("a") as stream:
            stream.write(json.dumps(asdict(record)) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {log}: {error.strerror}") from None


def _alpha_text(alpha: float | None) -> str:
    return "" if alpha is None else f", acceptance {alpha:.3f}"
