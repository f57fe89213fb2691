"""One training run on disk: train, log, checkpoint, write the model; go on where a killed run stopped."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftlab import checkpoint, llama, provenance
from draftlab.console import progress
from draftlab.data import Batch, DynamicBatches, HeldOut, TokenBatches, open_heldout
from draftlab.distill import evaluate
from draftlab.distill.adapters import merged
from draftlab.distill.evaluate import Length
from draftlab.distill.loop import (
    Constraint,
    DistillStep,
    EvalRecord,
    GivenTeacher,
    Settings,
    StepRecord,
    train,
)
from draftlab.distill.losses import parse_loss
from draftlab.distill.text import Batches, GeneratedRows, Mixed, StudentText, generate_rows, kept
from draftlab.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a run is called and what it writes. like: the checkpoint whose dtype and tokenizer the result gets."""

    command: str
    arguments: dict[str, object]
    inputs: list[Path]
    out: Path
    like: Path
    config: dict[str, object]
    began: float
    force: bool

    @property
    def state(self) -> Path:
        return state_of(self.out)

    @cached_property
    def identity(self) -> dict[str, object]:
        """What makes this run this run."""
        inputs = [provenance.fingerprint(path) for path in self.inputs]
        return self.arguments | {"command": self.command, "inputs": inputs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How tokens per target pass are measured: what the target writes after the held-out windows' first tokens."""

    temperature: float
    texts: int
    prompt: int
    length: int
    eos_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What a finished run measured. seconds count every step once, also those before a resume.

    lengths: tokens per target pass for every K, empty where no target could write text.
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


def claim(job: Job) -> Path:
    """The folder of an unfinished run, made if there is none.

    Raises:
        UserError: it belongs to another run, or cannot be written.
    """
    _claim(job.state, job.identity)
    return job.state


def fit_and_write(
    job: Job,
    student: PreTrainedModel,
    teacher: GivenTeacher,
    batches: Batches,
    heldout: HeldOut,
    settings: Settings,
    replay: Replay | None = None,
) -> Fitted:
    """fit, then job.out: the trained model in the dtype of like (bf16 for a new one), log.jsonl and record."""
    state, identity = claim(job), job.identity
    measure = _replayed(student, teacher, heldout, replay, state, settings.seed)
    fitted = fit(student, teacher, batches, heldout, settings, state=state, identity=identity, what=job.command)
    fitted = replace(fitted, lengths=measure())
    bare = not (job.like / "config.json").is_file()  # a tokenizer alone
    dtype = torch.bfloat16 if bare else checkpoint.stored_dtype(job.like)
    with checkpoint.new_directory(job.out, force=job.force) as work:
        checkpoint.write_checkpoint(work, job.config, checkpoint.model_weights(merged(student), dtype), job.like)
        shutil.copyfile(state / "log.jsonl", work / "log.jsonl")
        provenance.write_record(work, job.command, job.arguments, job.inputs, job.began, **fitted.as_dict())
    shutil.rmtree(state)
    return fitted


def _replayed(
    student: PreTrainedModel,
    teacher: GivenTeacher,
    heldout: HeldOut,
    how: Replay | None,
    state: Path,
    seed: int,
) -> Callable[[], list[Length]]:
    """Measure the student now, and give a function that compares it with itself later."""
    if how is None or not isinstance(teacher, PreTrainedModel):
        return list
    windows = np.concatenate([batch.ids for batch in heldout.batches])[: how.texts, : how.prompt]
    written = evaluate.write(teacher, windows, how.length, how.temperature, how.eos_id, seed)

    def flat() -> dict[str, np.ndarray]:
        return {f"{i:04d}": row for i, row in enumerate(evaluate.chances(student, written))}

    before = kept(state / "before.safetensors", flat)
    return lambda: evaluate.lengths([before[name] for name in sorted(before)], evaluate.chances(student, written))


def state_of(out: Path) -> Path:
    """Where an unfinished run for out keeps its checkpoints and log."""
    return out.with_name(f".{out.name}.state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How target and draft write after prompts."""

    prompt: int
    temperature: float
    eos_id: int | None
    seed: int


def mixed(
    shares: dict[str, float],
    data: Batches,
    how: Writing,
    *,
    student: PreTrainedModel,
    target: Path | None,
    state: Path,
    steps: int,
    device: torch.device,
) -> Batches:
    """data, what the target writes after the starts of its rows, and what the draft writes, by their shares of steps.

    The target's text is made once and kept in state.
    """
    row = data.batch(0).ids
    if list(shares) != ["data"] and row.shape[1] <= how.prompt:
        raise UserError(
            f"--prompt-tokens {how.prompt} leaves nothing to write in sequences of {row.shape[1] - 1} tokens"
        )
    sources: dict[str, Batches] = {"data": data}
    if "target" in shares and target is not None:
        needed = math.ceil(steps * shares["target"]) + 1
        sources["target"] = target_text(data, target, state, how, steps=min(steps, needed), device=device)
    if "draft" in shares:
        sources["draft"] = StudentText(student, data, how.prompt, how.temperature, how.eos_id, how.seed)
    return sources[next(iter(shares))] if len(shares) == 1 else Mixed(sources, shares)


def target_text(
    data: Batches, target: Path, state: Path, how: Writing, *, steps: int, device: torch.device
) -> GeneratedRows:
    """Rows that begin as those of data do and go on as the target samples."""
    rows, width = data.batch(0).ids.shape

    def make() -> dict[str, np.ndarray]:
        model = llama.load(target, torch.float32, device)
        prompts = np.concatenate([data.batch(step).ids[:, : how.prompt] for step in range(steps)])
        with progress("target writes", len(prompts)) as advance:
            ids = generate_rows(
                model,
                prompts,
                length=width - how.prompt,
                temperature=how.temperature,
                seed=how.seed,
                rows=64,
                advance=lambda n: advance(n, ""),
            )
        return {"ids": ids}

    return GeneratedRows(kept(state / "target_text.safetensors", make)["ids"], how.prompt, how.eos_id, rows)


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
