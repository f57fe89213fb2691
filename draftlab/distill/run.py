"""One training run on disk: train, log, checkpoint, write the model; go on where a killed run stopped."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from draftlab import checkpoint
from draftlab.console import progress
from draftlab.data import HeldOut
from draftlab.distill.loop import Batches, EvalRecord, Settings, StepRecord, train

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What a finished run measured. seconds count every step once, also those before a resume."""

    before: EvalRecord
    after: EvalRecord
    tokens: int
    seconds: float
    bits_per_byte: float


def fit(
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    batches: Batches,
    heldout: HeldOut,
    settings: Settings,
    *,
    state: Path,
    what: str,
) -> Fitted:
    """Train student in place; state keeps checkpoints and log.jsonl until the caller has written the model."""
    log = state / "log.jsonl"
    with progress(what, settings.steps) as advance:
        for record in train(student, teacher, batches, heldout.batches, settings, state):
            _append(log, record)
            if isinstance(record, StepRecord):
                word = f"{record.tokens / record.seconds:,.0f} tokens/s, loss {record.loss:.3f}"
                advance(record.step, word + _alpha_text(record.acceptance))
            else:
                bits = heldout.bits_per_byte(record.cross_entropy)
                advance(record.step, f"held out: {bits:.3f} bits per byte" + _alpha_text(record.acceptance))
    records = read_log(log)
    steps = [r for r in records if isinstance(r, StepRecord)]
    evals = [r for r in records if isinstance(r, EvalRecord)]
    return Fitted(
        before=evals[0],
        after=evals[-1],
        tokens=sum(r.tokens for r in steps),
        seconds=sum(r.seconds for r in steps),
        bits_per_byte=heldout.bits_per_byte(evals[-1].cross_entropy),
    )


def write_trained(
    student: PreTrainedModel, work: Path, *, like: Path, dtype: torch.dtype, config: dict[str, object], state: Path
) -> None:
    """The trained weights as a Hugging Face directory, with the tokenizer of like and the run's log."""
    checkpoint.write_checkpoint(work, config, checkpoint.model_weights(student, dtype), like)
    shutil.copyfile(state / "log.jsonl", work / "log.jsonl")


def read_log(path: Path) -> list[StepRecord | EvalRecord]:
    """Records of a log, each step once: what a killed run wrote after its last checkpoint is replaced."""
    latest: dict[tuple[bool, int], StepRecord | EvalRecord] = {}
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        record = StepRecord(**fields) if "grad_norm" in fields else EvalRecord(**fields)
        latest[isinstance(record, EvalRecord), record.step] = record
    return sorted(latest.values(), key=lambda r: (r.step, isinstance(r, EvalRecord)))


def _append(log: Path, record: StepRecord | EvalRecord) -> None:
    with log.open("a") as stream:
        stream.write(json.dumps(asdict(record)) + "\n")


def _alpha_text(alpha: float) -> str:
    return "" if alpha != alpha else f", acceptance {alpha:.3f}"
