"""One training run on disk: train, log, checkpoint, write the model; go on where a killed run stopped."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftlab import checkpoint, llama, provenance
from draftlab.console import progress
from draftlab.data import Batch, DynamicBatches, HeldOut, TokenBatches, open_heldout
from draftlab.distill.loop import (
    Batches,
    Constraint,
    DistillStep,
    EvalRecord,
    GivenTeacher,
    Settings,
    StepRecord,
    train,
)
from draftlab.distill.losses import parse_loss
from draftlab.distill.teacher import GeneratedRows, cached_rows, generate_rows
from draftlab.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What a finished run measured. seconds count every step once, also those before a resume."""

    before: EvalRecord
    after: EvalRecord
    tokens: int
    seconds: float
    bits_per_byte: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def fit(
    student: PreTrainedModel,
    teacher: GivenTeacher,
    batches: Batches,
    heldout: HeldOut,
    settings: Settings,
    *,
    state: Path,
    identity: dict[str, object],
    what: str,
    constraint: Constraint | None = None,
) -> Fitted:
    """Train student in place; state keeps checkpoints and log.jsonl until the caller has written the model.

    identity: what makes this run this run; an unfinished one in state with another identity is refused.

    Raises:
        UserError: state is another run's or cannot be written, or training fails.
    """
    _claim(state, identity)
    log = state / "log.jsonl"
    with progress(what, settings.steps) as advance:
        for record in train(student, teacher, batches, heldout.batches, settings, state, constraint):
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


def fit_and_write(
    student: PreTrainedModel,
    teacher: GivenTeacher,
    batches: Batches,
    heldout: HeldOut,
    settings: Settings,
    *,
    out: Path,
    command: str,
    arguments: dict[str, object],
    inputs: list[Path],
    like: Path,
    config: dict[str, object],
    began: float,
    force: bool,
) -> Fitted:
    """fit, then out: the trained model with the weights' dtype of like (bf16 for a new one), log.jsonl and record."""
    state = state_of(out)
    identity = arguments | {"command": command, "inputs": [provenance.fingerprint(path) for path in inputs]}
    fitted = fit(student, teacher, batches, heldout, settings, state=state, identity=identity, what=command)
    dtype = checkpoint.stored_dtype(like) if (like / "config.json").is_file() else torch.bfloat16
    with checkpoint.new_directory(out, force=force) as work:
        checkpoint.write_checkpoint(work, config, checkpoint.model_weights(student, dtype), like)
        shutil.copyfile(state / "log.jsonl", work / "log.jsonl")
        provenance.write_record(work, command, arguments, inputs, began, **fitted.as_dict())
    shutil.rmtree(state)
    return fitted


def state_of(out: Path) -> Path:
    """Where an unfinished run for out keeps its checkpoints and log."""
    return out.with_name(f".{out.name}.state")


def target_text(
    batches: Batches,
    target: Path,
    state: Path,
    *,
    steps: int,
    prompt: int,
    temperature: float,
    seed: int,
    device: torch.device,
    eos_id: int | None,
) -> GeneratedRows:
    """Rows that begin as those of batches do and go on as the target samples; made once and kept in state."""
    first = batches.batch(0).ids
    rows, length = first.shape[0], first.shape[1] - prompt
    if length < 1:
        raise UserError(f"--prompt-tokens {prompt} leaves nothing to write in sequences of {first.shape[1] - 1} tokens")

    def make() -> np.ndarray:
        model = llama.load(target, torch.float32, device)
        prompts = np.concatenate([batches.batch(step).ids[:, :prompt] for step in range(steps)])
        with progress("target writes", len(prompts)) as advance:
            return generate_rows(
                model,
                prompts,
                length=length,
                temperature=temperature,
                seed=seed,
                rows=64,
                advance=lambda n: advance(n, ""),
            )

    state.mkdir(parents=True, exist_ok=True)
    return GeneratedRows(cached_rows(state / "target_text.safetensors", make), prompt, eos_id, rows)


def reweighing(
    batches: TokenBatches, reference: Path, tokenizer: PreTrainedTokenizerBase, device: torch.device, every: int
) -> DynamicBatches:
    """batches with weights that follow the student's held-out loss on each source, against a reference model's.

    Raises:
        UserError: a source without one held-out window.
    """
    most, rows = 16, min(8, batches.rows)
    heldout = {
        name: open_heldout(name, tokenizer, rows=rows, seq_len=batches.seq_len, most_rows=most).batches
        for name in batches.weights
    }
    model = checkpoint.load_model(reference, torch.bfloat16, device).eval()
    return DynamicBatches.of(batches, heldout, {name: _cross_entropy(model, b) for name, b in heldout.items()}, every)


@torch.inference_mode()
def _cross_entropy(model: PreTrainedModel, batches: list[Batch]) -> float:
    step = DistillStep(model, parse_loss("ce"), 1.0)
    sums = [
        step(torch.from_numpy(b.ids).to(model.device), torch.from_numpy(b.mask).to(model.device), None) for b in batches
    ]
    return float(sum(s[1] for s in sums) / sum(int(b.mask.sum()) for b in batches))


def read_log(path: Path) -> list[StepRecord | EvalRecord]:
    """Records of a log, each step once: what a killed run wrote after its last checkpoint is replaced."""
    latest: dict[tuple[bool, int], StepRecord | EvalRecord] = {}
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        record = StepRecord(**fields) if "grad_norm" in fields else EvalRecord(**fields)
        latest[isinstance(record, EvalRecord), record.step] = record
    return sorted(latest.values(), key=lambda r: (r.step, isinstance(r, EvalRecord)))


def _claim(state: Path, identity: dict[str, object]) -> None:
    wanted, file = provenance.plain(identity), state / "run.json"
    if file.exists():
        held = json.loads(file.read_text())
        differing = sorted(k for k in held.keys() | wanted.keys() if held.get(k) != wanted.get(k))
        if differing:
            key = differing[0]
            raise UserError(
                f"{state} holds an unfinished run with {key} = {held.get(key)!r}, this one has {wanted.get(key)!r}; "
                "repeat that command to go on with it, or remove the directory to start again"
            )
        return
    try:
        state.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(wanted, indent=2))
    except OSError as error:
        raise UserError(f"cannot write {state}: {error.strerror}") from None


def _append(log: Path, record: StepRecord | EvalRecord) -> None:
    try:
        with log.open("a") as stream:
            stream.write(json.dumps(asdict(record)) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {log}: {error.strerror}") from None


def _alpha_text(alpha: float | None) -> str:
    return "" if alpha is None else f", acceptance {alpha:.3f}"
