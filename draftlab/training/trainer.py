"""The training loop on accelerate. The loss is cross-entropy on text, or a divergence from a teacher.

A step depends only on the weights, the optimizer state and the index of the step. A killed run therefore resumes bit
for bit.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from draftlab.console import note
from draftlab.data import Batch, DynamicBatches, HeldOut
from draftlab.errors import Interrupted, UserError
from draftlab.model.devices import exact
from draftlab.training import checkpointer
from draftlab.training.fused_loss import Dense, TopK
from draftlab.training.loop import Batches, Loop
from draftlab.training.losses import Loss
from draftlab.training.objectives import (
    Constraint,
    DistillStep,
    Objective,
    Offsets,
    StepSums,
    expected_tokens,
)
from draftlab.training.optimizers import optimizers_for, training_dtype
from draftlab.training.teachers import Distributions, LocalTeacher, logits_of, shard_by_layer

if TYPE_CHECKING:
    from draftlab.training.evaluate import TargetTextEvaluator

TeacherModel = PreTrainedModel | Distributions | None
MAX_GRAD_NORM = 1.0
MOST_SKIPPED = 3  # number of skipped steps in a row that ends a run
# most bytes of the teacher's distributions of held-out text that are kept from one evaluation to the next
KEPT_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """The teacher, text, loss and evaluation for the training of a student.

    Attributes:
        teacher: The target's model, or a source of its distributions. None trains on the text alone.
        temperature: Temperature of both distributions in the divergence.
        served: Temperature at which the draft will run. Evaluations compare the distributions at this temperature. With
            0 (greedy), a token is accepted if it has the highest probability in both.
        judge: Teacher of evaluations, if its distributions depend on the temperature. None takes `teacher`.
        rounded: Function that returns the value with which a parameter is written, for its name and value. Evaluations
            run with these values. None evaluates the weights as they are.
        length: Function that measures acceptance length in evaluations. None does not measure it.
        offsets: Offsets that a parallel draft learns. None for other students.
        objective: Module with the student and its loss. None makes a DistillStep, for students that are language
            models.
    """

    teacher: TeacherModel
    batches: Batches
    heldout: HeldOut
    loss: Loss
    temperature: float = 1.0
    served: float = 1.0
    judge: Distributions | None = None
    rounded: Callable[[str, Tensor], Tensor] | None = None
    length: "TargetTextEvaluator | None" = None
    offsets: Offsets | None = None
    objective: Objective | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The record of one optimizer step.

    Attributes:
        loss: Loss in nats per token. None if it is not finite.
        acceptance: Mean acceptance probability, sum min(p, q), over tokens. None without a teacher.
        grad_norm: Norm of all gradients before clipping. None if it is not finite, or if DeepSpeed does not report it.
        lr: Learning rate.
        tokens: Number of predictions, over all processes.
        skipped: Whether the weights did not change, because the loss or the gradient norm was not finite.
    """

    step: int
    loss: float | None
    acceptance: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    seconds: float
    skipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """The record of an evaluation on held-out text, with means over tokens. The student reads only tokens of the text.

    The weights are those that would be written, rounded to the dtype of the written draft.

    For a parallel draft, `loss` is the mean over all offsets. Its cross-entropy, acceptance, agreement and slack are
    those of offset 1.

    Attributes:
        temperature: Temperature of both distributions in the loss and the acceptance. With 0, the acceptance is the
            agreement, and the loss is at temperature 1.
        acceptance: Mean acceptance probability. None without a teacher.
        agreement: Share of tokens at which student and teacher have the same argmax. None without a teacher.
        slack: If the teacher lists only its most probable tokens, the true acceptance is at most acceptance + slack.
        mean_acceptance_length: Tokens per target pass at K = 4. None if it was not measured.
        offsets: Acceptance at each offset of a parallel draft. Empty for other students.
    """

    step: int
    tokens: int
    loss: float
    cross_entropy: float
    temperature: float = 1.0
    acceptance: float | None = None
    agreement: float | None = None
    slack: float = 0.0
    mean_acceptance_length: float | None = None
    offsets: tuple[float, ...] = ()

    @property
    def selection_metric(self) -> float:
        """Return the number by which the best evaluation is chosen. Higher is better."""
        return self.criterion[1]

    @property
    def criterion(self) -> tuple[str, float]:
        """Return the name of the number by which the best evaluation is chosen, and the number. Higher is better.

        It is the acceptance length if this was measured. Otherwise it is the acceptance, or for a parallel draft the
        expected tokens per target pass (see expected_tokens). Without a teacher it is the negative loss.
        """
        if self.mean_acceptance_length is not None:
            return "tokens per target pass", self.mean_acceptance_length
        if self.acceptance is None:
            return "loss", -self.loss
        if self.offsets:
            return "expected tokens per target pass", expected_tokens(self.offsets)
        return "acceptance", self.acceptance


def train(
    student: PreTrainedModel,
    setup: TrainingSetup,
    loop: Loop,
    state: Path,
    constraint: Constraint | None = None,
) -> Iterator[StepRecord | EvalRecord]:
    """Train the student in place, and yield a record of each step and of each held-out evaluation.

    Evaluations run before, during and after training. Training resumes from the newest checkpoint in `state`.

    Args:
        state: Directory of checkpoints, and of the weights of the best evaluation (see checkpointer.best_weights).
        constraint: Module that is trained together with the student. With a constraint, the last evaluation counts as
            the best.

    Raises:
        UserError: The loss needs a teacher and there is none, an evaluation or MOST_SKIPPED steps in a row are not
            finite, or `state` cannot be written.
        Interrupted: SIGTERM or Ctrl-C, after a checkpoint was saved.
    """
    if setup.loss.needs_teacher and setup.teacher is None:
        raise UserError(
            f"the loss {setup.loss.name!r} compares the draft with a target; add --target NAME, or use --loss ce"
        )
    trainer = Trainer(student, setup, loop, state, constraint)
    start = trainer.training.restore(state)
    trainer.started = start is not None
    trainer.saved = start or 0
    if start is None:
        yield trainer.evaluate(0)
    elif start == loop.steps:
        note(f"an earlier run already finished all {start} steps")
    else:
        note(f"resuming from step {start} of {loop.steps}")
    with checkpointer.deferred_signals() as received:
        for index in range(start or 0, loop.steps):
            yield trainer.step(index)
            done = index + 1
            ended = done == loop.steps
            if done % loop.eval_steps == 0 or ended:
                yield trainer.evaluate(done)
            if not ended:
                trainer.reweigh(done)
            stopping = trainer.in_any_process(len(received))
            due = done % loop.save_steps == 0 and not trainer.skipped.in_a_row
            if due or stopping or ended:
                trainer.save(done, ended=ended)
            if stopping:
                raise Interrupted(f"interrupted after step {done} of {loop.steps}; repeat the command to resume")
    trainer.accelerator.free_memory()


class Skipped:
    """The number of steps in a row, up to now, that were skipped. Checkpoints store it."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


class Trainer:
    """A student, its optimizers and its teacher under accelerate."""

    def __init__(
        self,
        student: PreTrainedModel,
        setup: TrainingSetup,
        loop: Loop,
        state: Path,
        constraint: Constraint | None,
    ) -> None:
        torch.manual_seed(loop.seed)
        AcceleratorState._reset_state()  # reset, because one recipe may train in different dtypes
        checkpointer.process_state()
        self.student = student
        self.setup = setup
        self.loop = loop
        self.state = state
        self.constraint = constraint
        self.accelerator = checkpointer.new_accelerator(training_dtype(loop.dtype), MAX_GRAD_NORM)
        student.train()
        disable_dropout(student)
        vocab = _shared_vocab(student, setup.teacher)
        module = setup.objective or DistillStep(
            student, setup.loss, setup.temperature, vocab, constraint, setup.offsets
        )
        optimizers = optimizers_for(student, loop, constraint.groups() if constraint else [], module.rates)
        # not in the groups, because a resumed run may have another rate than its checkpoint
        self.peaks = [group["lr"] for group in _groups(optimizers)]
        module.served = setup.served or 1.0
        self.module, *self.optimizers = self.accelerator.prepare(module, *optimizers)
        self.objective = self.accelerator.unwrap_model(self.module)
        register_fsdp_forward_method(self.module, "around")  # this has no effect without FSDP2
        if loop.torch_compile:
            student.get_decoder().compile()
        self.teacher = _prepare_teacher(setup.teacher, vocab, self.accelerator, loop.torch_compile)
        self.judge = setup.judge or self.teacher
        self.kept: dict[int, Dense | TopK] = {}  # see _kept_target
        self.packs = module.takes_packed and (self.teacher is None or self.teacher.takes_packed)
        self.best = checkpointer.Best()
        self.skipped = Skipped()
        self.started = False  # whether a step was taken
        self.saved = 0  # step of the newest checkpoint
        self.training = checkpointer.Training(
            accelerator=self.accelerator,
            module=self.module,
            optimizers=self.optimizers,
            counters=[
                self.best,
                self.skipped,
                *([setup.batches] if isinstance(setup.batches, DynamicBatches) else []),
            ],
        )

    def evaluate(self, done: int) -> EvalRecord:
        """Evaluate on held-out text. Save the weights if they are the best so far, or if there is a constraint.

        Raises:
            UserError: The weights or the measurements are not finite.
        """
        self._check_weights(done)
        with self._as_written():
            record = self._heldout(self.setup.heldout.batches, self.judge, done)
            if not math.isfinite(record.loss + record.cross_entropy):
                raise self._diverged(f"the held-out loss after step {done}")
            if (length := self.setup.length) is not None:
                accepted = self.objective.around(lambda: length(self.student, done))
                record = replace(record, mean_acceptance_length=accepted)
        metric = record.selection_metric if self.constraint is None else done
        self.best.offer(metric, done, self.accelerator, self.module, self.state)
        return record

    def step(self, index: int) -> StepRecord:
        """Take one optimizer step. Skip it if the loss or the gradient norm is not finite.

        Raises:
            UserError: MOST_SKIPPED steps in a row are not finite. With DeepSpeed: this step is not finite, because
                DeepSpeed changes the weights before the norm is known.
        """
        started_at = time.perf_counter()
        self.started, self.objective.progress = True, index / self.loop.steps
        parts = self._micro_batches(index)
        tokens = int(self._total(torch.tensor(sum(part.predictions for part in parts))))
        rate = self.loop.rate(index)
        for group, peak in zip(_groups(self.optimizers), self.peaks, strict=True):
            group["lr"] = rate * peak
        sums = self._accumulate_gradients(parts, tokens)
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), MAX_GRAD_NORM)
        means = StepSums.of((self._total(sums) / max(1, tokens)).cpu())
        objective = float(means.objective)
        grad_norm = None if norm is None else float(norm)
        finite = math.isfinite(objective) and math.isfinite(grad_norm or 0.0)
        skipped = self.in_any_process(not finite)
        for optimizer in self.optimizers:
            if not skipped:
                optimizer.step()
            optimizer.zero_grad()
        self.skipped.in_a_row = self.skipped.in_a_row + 1 if skipped else 0
        if skipped:
            quantity = "gradient norm" if math.isfinite(objective) else "loss"
            most = 1 if self.accelerator.distributed_type == DistributedType.DEEPSPEED else MOST_SKIPPED
            if self.skipped.in_a_row == most:
                raise self._diverged(f"the {quantity} at step {index + 1}")
            note(f"step {index + 1} is skipped, because its {quantity} is not finite")
        return StepRecord(
            step=index + 1,
            loss=_finite(objective),
            acceptance=None if self.teacher is None else _finite(float(means.acceptance)),
            tokens=tokens,
            grad_norm=None if grad_norm is None else _finite(grad_norm),
            lr=rate * self.loop.lr,
            seconds=time.perf_counter() - started_at,
            skipped=skipped,
        )

    def save(self, done: int, *, ended: bool) -> None:
        """Write a checkpoint (see checkpointer.Training.save). Raises UserError: the weights are not finite."""
        self._check_weights(done)
        self.training.save(self.state, done, ended=ended)
        self.saved = done

    def _check_weights(self, done: int) -> None:
        trained = [_local(p) for p in self.module.parameters() if p.requires_grad]
        finite = torch.stack([torch.isfinite(weight).all() for weight in trained]).all()
        if self.in_any_process(not finite):
            raise self._diverged(f"a weight after step {done}")

    def _diverged(self, quantity: str) -> UserError:
        """Return the error of a run that cannot go on. quantity: The number that is not finite."""
        if not self.started:
            return UserError(
                f"{quantity} is not finite before training; use another draft, target or text, or in distill "
                "--training-dtype float32"
            )
        if not any(p.requires_grad for p in self.student.parameters()):
            return UserError(f"{quantity} is not finite; use another --source or --data")
        resumes = f", which resumes from step {self.saved}" if self.saved else ""
        return UserError(
            f"{quantity} is not finite; repeat the command with a smaller --lr than {self.loop.lr:g}{resumes}, or add "
            "--force to start again"
        )

    @contextlib.contextmanager
    def _as_written(self) -> Iterator[None]:
        """Give the trained weights the values with which they are written, inside the `with` block.

        The copies of the weights need as much memory as the gradients, which do not exist during an evaluation.
        """
        kept: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for name, parameter in self.objective.student.named_parameters():
                if self.setup.rounded is not None and parameter.requires_grad:
                    weight = _local(parameter)
                    kept.append((weight, weight.clone()))
                    weight.copy_(self.setup.rounded(name, weight))
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, before in kept:
                    weight.copy_(before)

    def reweigh(self, done: int) -> None:
        """Update the weights of the data mixture from held-out losses, if an update is due after `done` steps."""
        batches = self.setup.batches
        if isinstance(batches, DynamicBatches) and done % batches.every == 0:
            losses = {n: self._heldout(rows, None, done).cross_entropy for n, rows in batches.heldout.items()}
            batches.reweigh(done, losses)

    def in_any_process(self, count: int) -> bool:
        """Return whether `count` is above 0 in any process, so that all processes decide alike."""
        return bool(self._total(torch.tensor(int(count))))

    def _micro_batches(self, index: int) -> list[Batch]:
        """Return the micro-batches of this process for a step.

        All processes get the same number of micro-batches, because FSDP needs every process in every pass.
        """
        processes = self.accelerator.num_processes
        batch = self.objective.around(lambda: self.setup.batches.batch(index))
        parts = self._packed(batch, index).parts(self.loop.micro_batch_tokens * processes)
        return [part.shard(self.accelerator.process_index, processes) for part in parts]

    def _packed(self, batch: Batch, draw: int) -> Batch:
        """Pack short sequences into shared rows, if student and teacher can separate the sequences of a row.

        For a student that predicts several tokens from a position, also draw the depths of the positions.

        draw: Number of the draw. Together with the seed it decides the depths.
        """
        batch = batch.packed() if self.packs else batch
        depths = self.objective.depths
        return batch if depths is None else depths.drawn(batch, draw)

    def _accumulate_gradients(self, parts: list[Batch], tokens: int) -> Tensor:
        """Run forward and backward passes over micro-batches. Return their sums, [6], see StepSums.

        parts: Micro-batches of this process. tokens: Number of predictions of the step, over all processes.
        """
        totals = torch.zeros(6, dtype=torch.float64)
        accelerator = self.accelerator
        for number, part in enumerate(parts, 1):
            # DeepSpeed clips gradients and takes the step in its last backward pass
            accelerator.sync_gradients = number == len(parts)
            unsynced = contextlib.nullcontext() if accelerator.sync_gradients else accelerator.no_sync(self.module)
            with unsynced:
                sums = self._sums(self._target(self.teacher, part), part)[0]
                # DDP averages over processes, but `tokens` counts all processes: scale back
                trained = StepSums.of(sums).trained
                accelerator.backward(trained * accelerator.num_processes / max(1, tokens))
            totals += exact(sums.detach()).cpu()
        return totals

    def _heldout(self, batches: list[Batch], teacher: Distributions | None, step: int) -> EvalRecord:
        self.module.eval()
        totals = torch.zeros(1, 6, dtype=torch.float64)
        tokens = torch.zeros(1, dtype=torch.long)
        with torch.no_grad():
            # processes share the rows of a batch, because FSDP needs every process in every pass
            for i, batch in enumerate(batches):
                part = self._packed(batch, -1 - i).shard(self.accelerator.process_index, self.accelerator.num_processes)
                sums = exact(self._sums(self._kept_target(teacher, part, i), part)).cpu()
                totals = totals + sums
                tokens = tokens + torch.from_numpy(part.predictions_by_offset(len(sums)))
        self.module.train()
        totals = self._total(totals)
        tokens = self._total(tokens)
        means = StepSums.of(totals / tokens.unsqueeze(1).clamp_min(1))  # of each offset, [K]
        record = EvalRecord(
            step=step,
            tokens=int(tokens.sum()),
            loss=float(StepSums.of(totals).objective.sum() / tokens.sum()),
            cross_entropy=float(means.cross_entropy[0]),
            temperature=self.setup.served,
        )
        if teacher is None:
            return record
        accepted = (means.acceptance if self.setup.served else means.agreement).tolist()
        return replace(
            record,
            acceptance=accepted[0],
            slack=float(means.slack[0]) if self.setup.served else 0.0,
            agreement=float(means.agreement[0]),
            offsets=tuple(accepted) if len(accepted) > 1 else (),
        )

    def _target(self, teacher: Distributions | None, batch: Batch) -> Any:
        """Return the teacher's distributions on the device of the student, or None without a teacher."""
        target = None if teacher is None else teacher.distributions(batch)
        # other distributions are on this device already
        return target.to(self.accelerator.device) if isinstance(target, TopK) else target

    def _kept_target(self, teacher: Distributions | None, batch: Batch, number: int) -> Any:
        """Return _target for a held-out batch. It is kept if it is small, because every evaluation reads the same text.

        With several processes nothing is kept, because each must take part in the passes of a sharded teacher.

        number: Number of the held-out batch.
        """
        if number in self.kept:
            return self.kept[number]
        target = self._target(teacher, batch)
        if not isinstance(target, Dense | TopK) or self.accelerator.num_processes > 1:
            return target
        if sum(each.nbytes for each in self.kept.values()) + target.nbytes <= KEPT_BYTES:
            self.kept[number] = target
        return target

    def _sums(self, target: object, batch: Batch) -> Tensor:
        device = self.accelerator.device
        ids, mask, positions, depths = (
            None if array is None else torch.from_numpy(array).to(device)
            for array in (batch.ids, batch.mask, batch.positions, batch.depths)
        )
        return self.module(ids, mask, target, positions, depths)

    def _total(self, values: Tensor) -> Tensor:
        """Return the sum of values over all processes.

        A single process returns the values on their own device, because Apple's GPUs have no float64.
        """
        if self.accelerator.num_processes == 1:
            return values
        return cast(Tensor, self.accelerator.reduce(values.to(self.accelerator.device)))


def rounded_to(dtype: torch.dtype) -> Callable[[str, Tensor], Tensor] | None:
    """Return TrainingSetup.rounded for weights that are written in `dtype`. None if the dtype has all bits of fp32."""
    return None if dtype.itemsize >= 4 else lambda _, weight: weight.to(dtype)


def disable_dropout(model: nn.Module) -> None:
    """Set all dropout rates of a model to 0, and the noise of routers. config.json on disk is not changed.

    Transformers reads the rates from modules, from attributes of modules and from the config.
    """
    owners: list[Any] = list(model.modules())
    if isinstance(model, PreTrainedModel):
        owners += [model.config, model.config.get_text_config()]
    for owner in owners:
        if isinstance(owner, nn.Dropout):
            owner.p = 0.0
        for name, value in list(vars(owner).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(owner, name, 0.0)


def _local(weight: Tensor) -> Tensor:
    """Return the part of a weight that this process has. FSDP2 shards the rows of weights."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _groups(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _shared_vocab(student: PreTrainedModel, teacher: TeacherModel) -> int:
    """Return the number of logits that both student and teacher have. Logits after them are padding."""
    own = logits_of(student)
    if teacher is None:
        return own
    return min(own, logits_of(teacher) if isinstance(teacher, PreTrainedModel) else teacher.vocab)


def _prepare_teacher(
    teacher: TeacherModel, vocab: int, accelerator: Accelerator, compiled: bool
) -> Distributions | None:
    if not isinstance(teacher, PreTrainedModel):
        return teacher
    model = teacher.eval()
    if accelerator.is_fsdp2:
        shard_by_layer(model)
    # accelerate has not spread the model over devices
    elif getattr(model, "hf_device_map", None) is None:
        model.to(cast(Any, accelerator.device))
    if compiled:
        model.get_decoder().compile()
    return LocalTeacher(model, vocab, accelerator.device)
