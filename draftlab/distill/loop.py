"""The one training loop: cross-entropy on text, or a divergence from a teacher, on accelerate.

B rows, T predicted tokens per row, V vocabulary. A step is a pure function of (weights, optimiser state, step index),
so a run that was killed goes on bit for bit.
"""

import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftlab.distill.losses import Loss, acceptance, log_probs, parse_loss
from draftlab.errors import UserError

OptimizerName = Literal["adamw", "muon"]


class Batches(Protocol):
    """Token ids [B, T + 1] of each step, and how many leading predictions are prompt and not trained on."""

    def batch(self, step: int) -> np.ndarray: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides a run's numbers. tokens per step = rows x seq_len of the batches, over all processes."""

    loss: str
    steps: int
    lr: float
    temperature: float = 1.0
    prompt: int = 0  # leading predictions left out of the loss (the prompt of target-generated text)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimiser step. loss in nats per token; acceptance is sum min(p, q), nan without a teacher."""

    step: int
    loss: float
    acceptance: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """Held-out means over tokens, teacher-forced. agreement: share where both top tokens are the same."""

    step: int
    tokens: int
    cross_entropy: float
    divergence: float
    acceptance: float
    agreement: float


class DistillStep(nn.Module):
    """Student and objective in one forward, so that DDP and FSDP hooks see the whole of it."""

    def __init__(self, student: PreTrainedModel, loss: Loss, temperature: float) -> None:
        super().__init__()
        self.student = student
        self.loss = loss
        self.temperature = temperature

    def forward(self, ids: Tensor, teacher_logits: Tensor | None, prompt: int) -> Tensor:
        """Sums over the predicted tokens after the prompt: objective, cross-entropy, acceptance, agreement: [4].

        ids: [B, T + 1]. teacher_logits: [B, T, V] or None.
        """
        logits = self.student(input_ids=ids[:, :-1], use_cache=False).logits[:, prompt:].float()  # [B, T', V]
        ce = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, prompt + 1 :].flatten(), reduction="sum")
        if teacher_logits is None or self.loss.divergence is None:
            missing = torch.full_like(ce, math.nan)
            return torch.stack([ce, ce.detach(), missing, missing])
        log_p = log_probs(teacher_logits[:, prompt:], self.temperature)
        log_q = log_probs(logits, self.temperature)
        agree = (log_p.argmax(-1) == log_q.argmax(-1)).sum().float()
        objective = self.loss.divergence(log_p, log_q).sum()
        return torch.stack([objective, ce.detach(), acceptance(log_p, log_q.detach()).sum(), agree])


def train(
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    batches: Batches,
    heldout: list[np.ndarray],
    settings: Settings,
    state: Path,
) -> Iterator[StepRecord | EvalRecord]:
    """Train student in place; yields a record per optimiser step and per held-out evaluation (before, during, after).

    state: where checkpoints go while training; a checkpoint found there is gone on from.
    heldout: batches of token ids [B, T + 1].

    Raises:
        UserError: the loss needs a teacher and there is none, the loss is not finite, or state is another run's.
    """
    loss = parse_loss(settings.loss)
    if loss.divergence is not None and teacher is None:
        raise UserError(f"loss {settings.loss!r} compares with a target; give one, or train with ce")
    torch.manual_seed(settings.seed)
    accelerator = Accelerator(mixed_precision="bf16" if settings.dtype == "bfloat16" else "no")
    student.train()
    step_module, optimizers = DistillStep(student, loss, settings.temperature), _optimizers(student, settings)
    step_module, *optimizers = accelerator.prepare(step_module, *optimizers)
    if teacher is not None:
        teacher = teacher.to(accelerator.device).eval().requires_grad_(False)
    if settings.compile:
        accelerator.unwrap_model(step_module).compile()
        if teacher is not None:
            teacher.compile()
    began_at = _restore(accelerator, state, settings)
    if began_at == 0:
        yield evaluate(accelerator, step_module, teacher, heldout, settings, 0)
    for step in range(began_at, settings.steps):
        yield _step(accelerator, step_module, optimizers, teacher, batches, settings, step)
        done = step + 1
        if done % settings.eval_every == 0 or done == settings.steps:
            yield evaluate(accelerator, step_module, teacher, heldout, settings, done)
        if done % settings.save_every == 0 and done < settings.steps:
            _save(accelerator, state, settings, done)
    accelerator.free_memory()


def evaluate(
    accelerator: Accelerator,
    step_module: nn.Module,
    teacher: PreTrainedModel | None,
    heldout: list[np.ndarray],
    settings: Settings,
    step: int,
) -> EvalRecord:
    step_module.eval()
    totals, tokens = torch.zeros(4, dtype=torch.float64), 0
    with torch.no_grad():
        for rows in heldout[accelerator.process_index :: accelerator.num_processes]:
            ids = torch.from_numpy(rows).to(accelerator.device)
            totals += step_module(ids, _teacher_logits(teacher, ids), settings.prompt).double().cpu()
            tokens += _predicted(rows, settings.prompt)
    step_module.train()
    totals = accelerator.reduce(totals.to(accelerator.device))
    tokens = int(accelerator.reduce(torch.tensor(tokens, device=accelerator.device)))
    divergence, cross_entropy, alpha, agreement = (totals / tokens).tolist()
    return EvalRecord(
        step=step,
        tokens=tokens,
        cross_entropy=cross_entropy,
        divergence=divergence,
        acceptance=alpha,
        agreement=agreement,
    )


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up, then linear to zero at the last step (Bergsma et al. 2025, "Straight to zero")."""
    warmup = max(1, round(settings.warmup_share * settings.steps))
    return settings.lr * min((step + 1) / warmup, (settings.steps - step) / max(1, settings.steps - warmup), 1.0)


def _step(
    accelerator: Accelerator,
    step_module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    teacher: PreTrainedModel | None,
    batches: Batches,
    settings: Settings,
    step: int,
) -> StepRecord:
    began = time.perf_counter()
    rows = batches.batch(step)[accelerator.process_index :: accelerator.num_processes]
    tokens = int(accelerator.reduce(torch.tensor(_predicted(rows, settings.prompt), device=accelerator.device)))
    totals = torch.zeros(4, dtype=torch.float64)
    for start in range(0, len(rows), settings.micro_rows or len(rows)):
        ids = torch.from_numpy(rows[start : start + (settings.micro_rows or len(rows))]).to(accelerator.device)
        sums = step_module(ids, _teacher_logits(teacher, ids), settings.prompt)
        # DDP averages over processes; the token count is that of the whole step, so scale back
        accelerator.backward(sums[0] * accelerator.num_processes / tokens)
        totals += sums.detach().double().cpu()
    norm = accelerator.clip_grad_norm_(step_module.parameters(), settings.clip)
    lr = learning_rate(step, settings)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    objective, _, alpha, _ = (accelerator.reduce(totals.to(accelerator.device)) / tokens).tolist()
    if not math.isfinite(objective):
        raise UserError(f"loss is {objective} at step {step}: lower the learning rate ({settings.lr:g})")
    return StepRecord(
        step=step + 1,
        loss=objective,
        acceptance=alpha,
        grad_norm=float(norm),
        lr=lr,
        tokens=tokens,
        seconds=time.perf_counter() - began,
    )


def _teacher_logits(teacher: PreTrainedModel | None, ids: Tensor) -> Tensor | None:
    if teacher is None:
        return None
    with torch.no_grad():
        return teacher(input_ids=ids[:, :-1], use_cache=False).logits


def _predicted(rows: np.ndarray, prompt: int) -> int:
    return rows.shape[0] * (rows.shape[1] - 1 - prompt)


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

    if settings.optimizer == "adamw":
        return [adamw(matrices + ends, vectors)]
    muon = torch.optim.Muon(matrices, lr=settings.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw([], ends + vectors)]


def _save(accelerator: Accelerator, state: Path, settings: Settings, step: int) -> None:
    """Write step-N under a temporary name, then rename and drop the older one: always one whole checkpoint."""
    work = state / "writing"
    accelerator.save_state(str(work))
    if accelerator.is_main_process:
        (work / "progress.json").write_text(json.dumps({"step": step, "settings": asdict(settings)}))
        older = _checkpoints(state)
        work.rename(state / f"step-{step:08d}")
        for checkpoint in older:
            shutil.rmtree(checkpoint)
    accelerator.wait_for_everyone()


def _restore(accelerator: Accelerator, state: Path, settings: Settings) -> int:
    """Load the newest checkpoint into what was prepared; the step to go on from, 0 when there is none."""
    state.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(state / "writing", ignore_errors=True)
    found = _checkpoints(state)
    if not found:
        return 0
    progress = json.loads((found[-1] / "progress.json").read_text())
    differing = [k for k, v in asdict(settings).items() if progress["settings"].get(k) != v]
    if differing:
        key = differing[0]
        raise UserError(
            f"{state} holds an unfinished run with {key} = {progress['settings'].get(key)!r}, this one has "
            f"{asdict(settings)[key]!r}; use the same settings to go on, or --force to start again"
        )
    accelerator.load_state(str(found[-1]))
    return progress["step"]


def _checkpoints(state: Path) -> list[Path]:
    return sorted(state.glob("step-*"))
