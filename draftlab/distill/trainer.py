"""The one training loop: cross-entropy on text, or a divergence from a teacher, on accelerate.

B rows, T predicted tokens per row, V vocabulary. A step is a pure function of (weights, optimiser state, step index),
so a run that was killed goes on bit for bit.
"""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftlab.console import note
from draftlab.data import Batch, DynamicBatches, HeldOut
from draftlab.distill import checkpointer, distributed
from draftlab.distill.evaluate import Length
from draftlab.distill.fused_loss import Dense, Teacher, TopK, fused_loss, per_token
from draftlab.distill.losses import Loss, parse_loss
from draftlab.distill.on_policy import Batches
from draftlab.distill.optimizers import OptimizerName, optimizers_for
from draftlab.distill.selection import Selection, furthest_behind
from draftlab.distill.teachers import Listing, LocalTeacher, PlainHead, logits_of, shard_by_layer
from draftlab.errors import UserError

Teaching = LocalTeacher | Listing
GivenTeacher = PreTrainedModel | Listing | None


Choose = Callable[[Batch, Teaching | None], Batch]


class Measure(Protocol):
    """Tokens per target pass at K = 4 of a student after so many steps; and later, for every K, of two of those."""

    def __call__(self, student: PreTrainedModel, step: int) -> float: ...

    def compared(self, before: int, after: int) -> list[Length]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """What a student learns from, and how it is measured on the way.

    teacher: None where the text alone is learnt. selection: which tokens of a batch count.
    """

    teacher: GivenTeacher
    batches: Batches
    heldout: HeldOut
    length: Measure | None = None
    selection: Selection | None = None


class Constraint(Protocol):
    """What a student is trained under besides its loss, such as masks; a module with parameters of its own."""

    progress: float  # share of the run that is done

    def draw(self) -> None:
        """Called before every forward pass."""
        ...

    def penalty(self) -> Tensor: ...

    def groups(self) -> list[dict[str, Any]]:
        """Its parameters as an AdamW takes them, with their rates."""
        ...


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
    micro_tokens: int = 0  # per forward, padding counted; 0: all at once
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    compile: bool = False
    eval_every: int = 100
    save_every: int = 200
    keep_last: int = 1  # checkpoints
    patience: int = 0  # evaluations without a better one before the run ends; 0: it runs to its end
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
    the most probable tokens. mean_acceptance_length: tokens per target pass at K = 4, where it was measured.
    """

    step: int
    tokens: int
    loss: float
    cross_entropy: float
    acceptance: float | None
    agreement: float | None
    slack: float = 0.0
    mean_acceptance_length: float | None = None

    @property
    def merit(self) -> float:
        """What the best evaluation has most of: tokens per target pass, or else acceptance, or else likelihood."""
        if self.mean_acceptance_length is not None:
            return self.mean_acceptance_length
        return -self.cross_entropy if self.acceptance is None else self.acceptance


class DistillStep(nn.Module):
    """Student and objective in one forward, so that DDP and FSDP hooks see the whole of it."""

    def __init__(
        self,
        student: PreTrainedModel,
        loss: Loss,
        temperature: float,
        vocab: int | None = None,  # logits that count: fewer where one of both heads is padded
        constraint: Constraint | None = None,
    ) -> None:
        super().__init__()
        self.student = student
        self.loss = loss
        self.temperature = temperature
        self.constraint = constraint
        self.head = PlainHead.of(student, vocab or logits_of(student))
        self.progress = 0.0

    def begin(self, progress: float) -> None:
        """Tell what depends on it how much of the run is done."""
        self.progress = progress
        if self.constraint is not None:
            self.constraint.progress = progress

    def forward(self, ids: Tensor, mask: Tensor, teacher: Teacher, each: bool = False) -> Tensor:
        """Sums over tokens, [6]: objective, cross-entropy, acceptance, its slack, agreement, and what to descend on.

        ids: [B, T + 1]. mask: [B, T], weights of the next tokens. teacher: of the N tokens whose weight is not zero.
        each: the loss of every such token instead, [N], without gradient.
        """
        if self.constraint is not None:
            self.constraint.draw()
        counted = mask.flatten().nonzero().squeeze(1)
        hidden, head = self.head.hidden_and_weight(self.student, ids[:, :-1], counted)
        labels, weights = ids[:, 1:].flatten()[counted], mask.flatten()[counted]
        loss = self.loss.at(self.progress)
        if each:
            return per_token(hidden, head, labels, teacher, loss, self.temperature)
        found = fused_loss(hidden, head, labels, weights, teacher, loss, self.temperature)
        total = found.objective
        if self.constraint is not None:  # on every token, as the objective is a sum over tokens
            total = total + self.constraint.penalty() * weights.sum()
        watched = [found.objective, found.cross_entropy, found.acceptance, found.slack, found.agreement]
        return torch.stack([*(w.detach() for w in watched), total])


def train(
    student: PreTrainedModel,
    setup: TrainingSetup,
    settings: Settings,
    state: Path,
    constraint: Constraint | None = None,
) -> Iterator[StepRecord | EvalRecord]:
    """Train student in place; yields a record per optimiser step and per held-out evaluation (before, during, after).

    state: where checkpoints go while training, and the weights of the best evaluation, which checkpointer.best_weights
    reads; a checkpoint found there is gone on from. constraint: trained along; a student whose weights are frozen is
    trained through it alone, and the last evaluation counts as the best.

    Raises:
        UserError: the loss needs a teacher and there is none, the loss is not finite, or state cannot be written.
    """
    loss = parse_loss(settings.loss)
    batches, heldout, length = setup.batches, setup.heldout.batches, setup.length
    if loss.needs_teacher and setup.teacher is None:
        raise UserError(f"loss {settings.loss!r} compares with a target; give one, or train with ce")
    torch.manual_seed(settings.seed)
    AcceleratorState._reset_state()  # a recipe may train in one dtype and then in another
    checkpointer.process_state()
    accelerator = distributed.new_accelerator(settings.dtype, settings.clip)
    student.train()
    vocab = _shared_vocab(student, setup.teacher)
    step_module = DistillStep(student, loss, settings.temperature, vocab, constraint)
    others = constraint.groups() if constraint else []
    optimizers = optimizers_for(student, settings.optimizer, settings.lr, settings.weight_decay, others)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["peak_lr"] = group["lr"]
    step_module, *optimizers = accelerator.prepare(step_module, *optimizers)
    if settings.compile:
        student.get_decoder().compile()
    choose = _chooser(accelerator, setup.selection, step_module, loss, settings.temperature, vocab)
    taught, best = _teaching(setup.teacher, vocab, accelerator, settings.compile), checkpointer.Best()
    accelerator.register_for_checkpointing(best)
    if isinstance(batches, DynamicBatches):
        accelerator.register_for_checkpointing(batches)

    def evaluated(done: int) -> EvalRecord:
        record = evaluate(accelerator, step_module, taught, heldout, done)
        if length is not None:
            record = replace(record, mean_acceptance_length=length(student, done))
        merit = record.merit if constraint is None else done
        best.offer(merit, done, accelerator, step_module, state)
        return record

    began_at = checkpointer.restore(accelerator, state)
    if began_at == 0:
        yield evaluated(0)
    else:
        note(f"resuming from step {began_at} of {settings.steps}")
    with _signals_noted() as noted:
        for step in range(began_at, settings.steps):
            yield _step(accelerator, step_module, optimizers, taught, batches, choose, settings, step)
            done = step + 1
            if done % settings.eval_every == 0 or done == settings.steps:
                yield evaluated(done)
            if settings.patience and best.since >= settings.patience:
                break
            if isinstance(batches, DynamicBatches) and done % batches.every == 0:
                sources = batches.heldout.items()
                losses = {n: evaluate(accelerator, step_module, None, rows, done).cross_entropy for n, rows in sources}
                batches.reweigh(done, losses)
            if done == settings.steps:
                break
            stopping = _any(accelerator, bool(noted))
            if done % settings.save_every == 0 or stopping:
                checkpointer.save(accelerator, state, done, settings.keep_last)
            if stopping:
                raise KeyboardInterrupt
    accelerator.free_memory()


@contextlib.contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Inside, SIGTERM and the first Ctrl-C are only noted, so that a checkpoint fits in before the end."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def handler(number: int, _: object) -> None:
        if number == signal.SIGINT and noted:
            raise KeyboardInterrupt
        noted.append(number)
        if number == signal.SIGINT:
            note("stopping after this step and its checkpoint; Ctrl-C again stops at once")

    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield noted
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _any(accelerator: Accelerator, mine: bool) -> bool:
    """Whether it is so in one of the processes, which must save and stop together."""
    return mine if accelerator.num_processes == 1 else bool(_total(accelerator, torch.tensor(int(mine))))


def _shared_vocab(student: PreTrainedModel, teacher: GivenTeacher) -> int:
    """Logits that both have: what is beyond them pads one of the heads."""
    ours = logits_of(student)
    if teacher is None:
        return ours
    return min(ours, logits_of(teacher) if isinstance(teacher, PreTrainedModel) else teacher.vocab)


def _teaching(teacher: GivenTeacher, vocab: int, accelerator: Accelerator, compiled: bool) -> Teaching | None:
    if not isinstance(teacher, PreTrainedModel):
        return teacher
    model = teacher.eval()
    if accelerator.is_fsdp2:
        shard_by_layer(model)
    elif getattr(model, "hf_device_map", None) is None:  # accelerate has not spread it over devices already
        model.to(accelerator.device)  # type: ignore[arg-type]
    if compiled:
        model.get_decoder().compile()
    return LocalTeacher(model, vocab, accelerator.device)


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
            share = batch.shard(accelerator.process_index, accelerator.num_processes)
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
    choose: Choose,
    settings: Settings,
    step: int,
) -> StepRecord:
    began = time.perf_counter()
    totals = torch.zeros(6, dtype=torch.float64)
    accelerator.unwrap_model(step_module).begin(step / settings.steps)
    # parts are made before they are shared out, so that every process takes part in as many passes
    parts = batches.batch(step).packed(settings.micro_tokens * accelerator.num_processes)
    shares = [choose(p.shard(accelerator.process_index, accelerator.num_processes), teacher) for p in parts]
    tokens = int(_total(accelerator, torch.tensor(sum(int(share.mask.sum()) for share in shares))))
    rate = schedule(step, settings)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = rate * group["peak_lr"]
    for number, share in enumerate(shares, 1):
        accelerator.sync_gradients = number == len(shares)  # DeepSpeed clips and steps in that backward pass
        waiting = contextlib.nullcontext() if accelerator.sync_gradients else accelerator.no_sync(step_module)
        with waiting:
            sums = _sums(accelerator, step_module, teacher, share)
            # DDP averages over processes; the token count is that of the whole step, so scale back
            accelerator.backward(sums[5] * accelerator.num_processes / max(1, tokens))
        totals += sums.detach().double().cpu()
    norm = accelerator.clip_grad_norm_(step_module.parameters(), settings.clip)
    for optimizer in optimizers:
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
        lr=rate * settings.lr,
        tokens=tokens,
        seconds=time.perf_counter() - began,
    )


def _total(accelerator: Accelerator, values: Tensor) -> Tensor:
    """Sum over all processes."""
    return cast(Tensor, accelerator.reduce(values.to(accelerator.device)))


def _sums(
    accelerator: Accelerator, step_module: nn.Module, teacher: Teaching | None, batch: Batch, each: bool = False
) -> Tensor:
    """What step_module says of a batch: sums, or the loss of each token."""
    ids = torch.from_numpy(batch.ids).to(accelerator.device)
    mask = torch.from_numpy(batch.mask).to(accelerator.device)
    return step_module(ids, mask, None if teacher is None else _on(teacher.look(batch), accelerator.device), each)


def _chooser(
    accelerator: Accelerator,
    selection: Selection | None,
    step_module: nn.Module,
    loss: Loss,
    temperature: float,
    vocab: int,
) -> Choose:
    """What keeps the tokens that count, by the losses of student and reference on them."""
    if selection is None:
        return lambda batch, teacher: batch
    kept, device = selection, cast(Any, accelerator.device)
    reference = DistillStep(kept.reference.to(device), loss, temperature, vocab).eval()

    @torch.no_grad()
    def choose(batch: Batch, teacher: Teaching | None) -> Batch:
        reference.begin(accelerator.unwrap_model(step_module).progress)
        draft, other = (_sums(accelerator, module, teacher, batch, each=True) for module in (step_module, reference))
        return furthest_behind(batch, draft, other, kept.keep)

    return choose


def _on(teacher: Dense | TopK, device: torch.device) -> Dense | TopK:
    if isinstance(teacher, Dense):
        return teacher  # a local teacher knows where its student is
    return TopK(teacher.ids.to(device), teacher.log_p.to(device), teacher.tail.to(device))
