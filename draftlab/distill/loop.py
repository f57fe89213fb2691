"""The one training loop: cross-entropy on text, or a divergence from a teacher, on accelerate.

B rows, T predicted tokens per row, V vocabulary. A step is a pure function of (weights, optimiser state, step index),
so a run that was killed goes on bit for bit.
"""

import contextlib
import math
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftlab.data import Batch, DynamicBatches
from draftlab.distill.fused import Teacher, fused_loss
from draftlab.distill.losses import Loss, parse_loss
from draftlab.distill.teacher import CachedTeacher, LocalTeacher, PlainHead
from draftlab.distill.text import Batches
from draftlab.errors import UserError

OptimizerName = Literal["adamw", "muon"]
Teaching = LocalTeacher | CachedTeacher
GivenTeacher = PreTrainedModel | Literal["cached"] | None


class Constraint(Protocol):
    """What a student is trained under besides its loss, such as masks; a module with parameters of its own."""

    progress: float  # share of the run that is done

    def draw(self) -> None:
        """Called before every forward pass."""
        ...

    def penalty(self) -> Tensor: ...

    def optimizers(self) -> list[torch.optim.Optimizer]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides a run's numbers. tokens per step = rows x seq_len of the batches, over all processes."""

    loss: str
    steps: int
    lr: float
    temperature: float = 1.0
    warmup_share: float = 0.03
    optimizer: OptimizerName = "adamw"
    weight_decay: float = 0.1
    clip: float = 1.0
    micro_rows: int = 0  # rows per forward; 0: all at once
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    compile: bool = False
    eval_every: int = 100
    save_every: int = 200
    seed: int = 0

    @classmethod
    def of(cls, arguments: dict[str, Any], **others: Any) -> "Settings":
        """The settings among a command's arguments, which have the same names, and others."""
        names = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in arguments.items() if name in names} | others)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimiser step. loss in nats per token; acceptance is sum min(p, q), None without a teacher."""

    step: int
    loss: float
    acceptance: float | None
    grad_norm: float
    lr: float
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """Held-out means over tokens, teacher-forced. agreement: share where both top tokens are the same.

    acceptance and agreement are None without a teacher. slack: what acceptance may be more, where a cache lists only
    the most probable tokens.
    """

    step: int
    tokens: int
    loss: float
    cross_entropy: float
    acceptance: float | None
    agreement: float | None
    slack: float = 0.0


class DistillStep(nn.Module):
    """Student and objective in one forward, so that DDP and FSDP hooks see the whole of it."""

    def __init__(
        self, student: PreTrainedModel, loss: Loss, temperature: float, constraint: Constraint | None = None
    ) -> None:
        super().__init__()
        self.student = student
        self.loss = loss
        self.temperature = temperature
        self.constraint = constraint
        self.head = PlainHead.of(student)
        self.progress = 0.0

    def begin(self, progress: float) -> None:
        """Tell what depends on it how much of the run is done."""
        self.progress = progress
        if self.constraint is not None:
            self.constraint.progress = progress

    def forward(self, ids: Tensor, mask: Tensor, teacher: Teacher) -> Tensor:
        """Sums over tokens, [6]: objective, cross-entropy, acceptance, its slack, agreement, and what to descend on.

        ids: [B, T + 1]. mask: [B, T], weights of the next tokens. teacher: of the N tokens whose weight is not zero.
        """
        if self.constraint is not None:
            self.constraint.draw()
        counted = mask.flatten().nonzero().squeeze(1)
        hidden, head = self.head.hidden_and_weight(self.student, ids[:, :-1], counted)
        labels, weights = ids[:, 1:].flatten()[counted], mask.flatten()[counted]
        loss = self.loss.at(self.progress)
        found = fused_loss(hidden, head, labels, weights, teacher, loss, self.temperature)
        total = found.objective
        if self.constraint is not None:  # on every token, as the objective is a sum over tokens
            total = total + self.constraint.penalty() * weights.sum()
        watched = [found.objective, found.cross_entropy, found.acceptance, found.slack, found.agreement]
        return torch.stack([*(w.detach() for w in watched), total])


def train(
    student: PreTrainedModel,
    teacher: GivenTeacher,
    batches: Batches,
    heldout: list[Batch],
    settings: Settings,
    state: Path,
    constraint: Constraint | None = None,
) -> Iterator[StepRecord | EvalRecord]:
    """Train student in place; yields a record per optimiser step and per held-out evaluation (before, during, after).

    teacher: a model, or "cached" where the batches carry what a target thought of them.
    state: where checkpoints go while training; a checkpoint found there is gone on from. constraint: trained along;
    a student whose weights are frozen is trained through it alone.

    Raises:
        UserError: the loss needs a teacher and there is none, the loss is not finite, or state cannot be written.
    """
    loss = parse_loss(settings.loss)
    if loss.needs_teacher and teacher is None:
        raise UserError(f"loss {settings.loss!r} compares with a target; give one, or train with ce")
    torch.manual_seed(settings.seed)
    AcceleratorState._reset_state()  # a recipe may train in one dtype and then in another
    accelerator = Accelerator(mixed_precision="bf16" if settings.dtype == "bfloat16" else "no")
    student.train()
    step_module = DistillStep(student, loss, settings.temperature, constraint)
    optimizers = _optimizers(student, settings) + (constraint.optimizers() if constraint else [])
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["peak_lr"] = group["lr"]
    step_module, *optimizers = accelerator.prepare(step_module, *optimizers)
    if settings.compile:
        student.get_decoder().compile()
    taught = _teaching(teacher, accelerator.device, settings.compile)
    if isinstance(batches, DynamicBatches):
        accelerator.register_for_checkpointing(batches)
    began_at = _restore(accelerator, state)
    if began_at == 0:
        yield evaluate(accelerator, step_module, taught, heldout, 0)
    with _sigterm_noted() as stopping:
        for step in range(began_at, settings.steps):
            yield _step(accelerator, step_module, optimizers, taught, batches, settings, step)
            done = step + 1
            if done % settings.eval_every == 0 or done == settings.steps:
                yield evaluate(accelerator, step_module, taught, heldout, done)
            if isinstance(batches, DynamicBatches) and done % batches.every == 0:
                sources = batches.heldout.items()
                losses = {n: evaluate(accelerator, step_module, None, rows, done).cross_entropy for n, rows in sources}
                batches.reweigh(done, losses)
            if (done % settings.save_every == 0 or stopping) and done < settings.steps:
                _save(accelerator, state, done)
            if stopping:
                raise KeyboardInterrupt
    accelerator.free_memory()


@contextlib.contextmanager
def _sigterm_noted() -> Iterator[list[int]]:
    """Inside, SIGTERM is only noted: schedulers send it before they kill, and a checkpoint fits in between."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGTERM, before)


def _teaching(teacher: GivenTeacher, device: torch.device, compiled: bool) -> Teaching | None:
    if teacher is None:
        return None
    if isinstance(teacher, str):
        return CachedTeacher(device)
    return LocalTeacher(cast(nn.Module, teacher).to(device).eval(), compiled)  # type: ignore[arg-type]


def evaluate(
    accelerator: Accelerator,
    step_module: nn.Module,
    teacher: Teaching | None,
    heldout: list[Batch],
    step: int,
) -> EvalRecord:
    step_module.eval()
    totals, tokens = torch.zeros(6, dtype=torch.float64), 0
    with torch.no_grad():
        for batch in heldout:  # split by rows: under FSDP every process takes part in every forward
            share = batch.part(accelerator.process_index, accelerator.num_processes)
            totals += _sums(accelerator, step_module, teacher, share).double().cpu()
            tokens += int(share.mask.sum())
    step_module.train()
    totals = _total(accelerator, totals)
    tokens = int(_total(accelerator, torch.tensor(tokens)))
    loss, cross_entropy, alpha, slack, agreement, _ = (totals / tokens).tolist()
    return EvalRecord(
        step=step,
        tokens=tokens,
        loss=loss,
        cross_entropy=cross_entropy,
        acceptance=None if teacher is None else alpha,
        agreement=None if teacher is None else agreement,
        slack=slack,
    )


def schedule(step: int, settings: Settings) -> float:
    """Share of the peak rate: linear warm-up, then linear to zero (Bergsma et al. 2025, "Straight to zero")."""
    warmup = max(1, round(settings.warmup_share * settings.steps))
    return min((step + 1) / warmup, (settings.steps - step) / max(1, settings.steps - warmup), 1.0)


def _step(
    accelerator: Accelerator,
    step_module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    teacher: Teaching | None,
    batches: Batches,
    settings: Settings,
    step: int,
) -> StepRecord:
    began = time.perf_counter()
    rows = batches.batch(step).part(accelerator.process_index, accelerator.num_processes)
    tokens = int(_total(accelerator, torch.tensor(int(rows.mask.sum()))))
    totals = torch.zeros(6, dtype=torch.float64)
    accelerator.unwrap_model(step_module).begin(step / settings.steps)
    for micro in rows.split(settings.micro_rows or len(rows.ids)):
        sums = _sums(accelerator, step_module, teacher, micro)
        # DDP averages over processes; the token count is that of the whole step, so scale back
        accelerator.backward(sums[5] * accelerator.num_processes / max(1, tokens))
        totals += sums.detach().double().cpu()
    norm = accelerator.clip_grad_norm_(step_module.parameters(), settings.clip)
    share = schedule(step, settings)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = share * group["peak_lr"]
        optimizer.step()
        optimizer.zero_grad()
    objective, _, alpha, *_ = (_total(accelerator, totals) / max(1, tokens)).tolist()
    if not math.isfinite(objective):
        raise UserError(f"loss is {objective} at step {step}: lower the learning rate ({settings.lr:g})")
    return StepRecord(
        step=step + 1,
        loss=objective,
        acceptance=None if teacher is None else alpha,
        grad_norm=math.nan if norm is None else float(norm),
        lr=share * settings.lr,
        tokens=tokens,
        seconds=time.perf_counter() - began,
    )


def _total(accelerator: Accelerator, values: Tensor) -> Tensor:
    """Sum over all processes."""
    return cast(Tensor, accelerator.reduce(values.to(accelerator.device)))


def _sums(accelerator: Accelerator, step_module: nn.Module, teacher: Teaching | None, batch: Batch) -> Tensor:
    ids = torch.from_numpy(batch.ids).to(accelerator.device)
    mask = torch.from_numpy(batch.mask).to(accelerator.device)
    return step_module(ids, mask, None if teacher is None else teacher.look(batch))


def _optimizers(student: PreTrainedModel, settings: Settings) -> list[torch.optim.Optimizer]:
    """AdamW on all; or Muon (Jordan et al. 2024) on the blocks' matrices and AdamW on the rest.

    Muon's update is scaled to AdamW's size (Liu et al. 2025), so that one learning rate serves both.
    """
    named = [(name, p) for name, p in student.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if p.ndim == 2 and ".layers." in name]
    ends = [p for name, p in named if p.ndim == 2 and ".layers." not in name]
    vectors = [p for _, p in named if p.ndim < 2]
    decay = settings.weight_decay

    def adamw(decayed: list[nn.Parameter], kept: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": decayed, "weight_decay": decay}, {"params": kept, "weight_decay": 0.0}]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=(0.9, 0.95))

    if not named:
        return []
    if settings.optimizer == "adamw":
        return [adamw(matrices + ends, vectors)]
    muon = torch.optim.Muon(matrices, lr=settings.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw([], ends + vectors)]


def _save(accelerator: Accelerator, state: Path, step: int) -> None:
    """Write step-N under a temporary name, then rename and drop the older one: always one whole checkpoint."""
    work = state / "writing"
    try:
        accelerator.save_state(str(work))
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors say a full disk their own way
        shutil.rmtree(work, ignore_errors=True)
        raise UserError(f"cannot write a checkpoint to {state}: {' '.join(str(error).split())[:200]}") from error
    if accelerator.is_main_process:
        older = _checkpoints(state)
        work.rename(state / f"step-{step:08d}")
        for checkpoint in older:
            shutil.rmtree(checkpoint)
    accelerator.wait_for_everyone()


def _restore(accelerator: Accelerator, state: Path) -> int:
    """Load the newest checkpoint into what was prepared; the step to go on from, 0 when there is none."""
    shutil.rmtree(state / "writing", ignore_errors=True)
    found = _checkpoints(state)
    if not found:
        return 0
    accelerator.load_state(str(found[-1]))
    return int(found[-1].name.removeprefix("step-"))


def _checkpoints(state: Path) -> list[Path]:
    return sorted(state.glob("step-*"))
