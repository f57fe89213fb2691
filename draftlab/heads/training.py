"""What the training of heads shares: options, the target as teacher, text, and the costs for a dry run.

In each step the frozen target computes the hidden states that the head reads, and the distributions to learn from.

B rows, T positions, N tokens, L steps of a chain, D hidden, E hidden of the target, A layers of the target that the
head reads, V vocab, W draft vocab.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import torch
from pydantic import NonNegativeInt
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftlab.config.kinds import split_at
from draftlab.console import progress
from draftlab.data import Batch, HeldOut
from draftlab.errors import UserError
from draftlab.heads.base import TargetSizes
from draftlab.model import checkpoint
from draftlab.model.hf_decoder import keep_states
from draftlab.model.shape import format_count
from draftlab.model.size import read_size
from draftlab.model.trimmed_head import TrimmedHead, output_head
from draftlab.quantities import format_bytes
from draftlab.target_outputs.batches import stored_temperature
from draftlab.target_outputs.outputs import TargetOutput, heldout_numbers, padded
from draftlab.target_outputs.store import check_tokenizer, heldout_part, read_texts
from draftlab.training.checkpointer import best_weights, select_device
from draftlab.training.fused_loss import Dense
from draftlab.training.loop import Batches, Loop
from draftlab.training.losses import Loss, parse_loss, wide
from draftlab.training.objectives import Objective
from draftlab.training.optimizers import training_dtype
from draftlab.training.run import Distillation
from draftlab.training.students.base import StudentSpec
from draftlab.training.teachers import LocalTeacher, logits_of
from draftlab.training.texts import HELDOUT_ROWS, Author, continued, in_turns, target_text
from draftlab.training.trainer import TrainingSetup, rounded_to

HELDOUT_SHARE = 0.05  # share of the stored texts that is held out if a store has no held-out part
BYTES = 16  # bytes per trained weight: the fp32 weight, its gradient and two optimizer moments
ROWS = 256  # number of positions whose logits over the whole vocabulary are in memory at a time
FITTED_TOKENS = 16_384  # tokens of text for the least squares that give a head's initial weights
# states whose norm is above this multiple of the median are left out; first tokens often have such states
LARGE = 8.0

Layers = Annotated[list[NonNegativeInt] | None, split_at("+")]


class HeadStudent(StudentSpec):
    """The base class of heads, which read the target's hidden states.

    free: Options that do not decide the shape of the head, so that they can be set next to --draft.
    """

    free: ClassVar[frozenset[str]]
    unused = frozenset(
        {
            "server",
            "api_key_file",
            "served_model_name",
            "top_logprobs",
            "gradient_checkpointing",
            "reweigh_steps",
        }
    )

    def layers_of(self, job: Distillation) -> Sequence[int]:
        """Return the ids of the target's layers whose states the head reads, ascending.

        A student that does not define this is checked only by open_teacher.

        Raises:
            UserError: The head does not fit the target.
        """
        return ()

    def check(self, job: Distillation) -> None:
        if "draft" in job.text.shares:
            raise UserError(
                "--text: a head cannot train on text of a draft; use --text data, --text target, or a mixture of both"
            )
        fixed = sorted(self.model_fields_set - {"text"} - self.free)
        if job.draft is not None and fixed:
            raise UserError(
                f"--draft {job.draft} already decides the shape of the head; leave these options of --student out: "
                f"{', '.join(fixed)}"
            )
        check_layers(job, self.layers_of(job))


def check_layers(job: Distillation, layer_ids: Sequence[int]) -> None:
    """Check the ids of the layers that a head reads. No weights are read.

    Raises:
        UserError: The target lacks a layer, or the ids do not ascend. HeadTeacher joins states in ascending order.
    """
    assert job.target is not None  # a head reads the target's states
    name = f"--student {job.student.text}"
    TargetSizes.of(job.target).check_layers(name, layer_ids)
    if list(layer_ids) != sorted(set(layer_ids)):
        raise UserError(
            f"{name} reads the target's layers {', '.join(map(str, layer_ids))}; list each id once, in ascending order"
        )


class StatesStudent(nn.Module):
    """A head in training. Its first layer, `fc`, reads the target's hidden states.

    scale: Root mean square of each feature of the states of size E of A layers, [A E]. In training, fc reads the states
    divided by `scale`, because some features are a thousand times larger than others.
    """

    fc: nn.Linear
    scale: Tensor

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def get_decoder(self) -> nn.Module:
        return self

    def weights(self) -> dict[str, Tensor]:
        """Return the weights to store. fc.weight is divided by `scale`, so the stored head reads undivided states."""
        tensors = self.state_dict()
        return tensors | {"fc.weight": tensors["fc.weight"] / self.scale}

    def rounded(self, target: Path) -> Callable[[str, Tensor], Tensor] | None:
        """Return TrainingSetup.rounded for weights that are stored in the dtype of the target (see `weights`)."""
        rounded = rounded_to(checkpoint.stored_dtype(target))
        if rounded is None:
            return None

        def value(name: str, weight: Tensor) -> Tensor:
            if name == "fc.weight":
                return rounded(name, weight / self.scale) * self.scale
            return rounded(name, weight)

        return value

    def best_weights(self, state: Path, target: Path) -> dict[str, Tensor]:
        """Load the weights of the best evaluation, and return the weights to store, in the dtype of the target.

        state: Directory with the checkpoints of the training run.
        """
        self.load_state_dict(best_weights(state, "student"))
        dtype = checkpoint.stored_dtype(target)
        return {name: weight.to(dtype) for name, weight in self.weights().items()}


class ChainStudent(StatesStudent):
    """A head in training that drafts chains. lm_head: Its output layer."""

    lm_head: nn.Linear

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, ids: Tensor, states: Tensor, steps: int, positions: Tensor | None = None) -> list[Tensor]:
        """Return the input of lm_head in each of L steps, [B, T, D] each.

        In step l, counted from 0, position i predicts token i + 2 + l. The last 1 + l positions of each sequence are
        invalid, because their next tokens are unknown.

        Args:
            ids: Token ids, [B, T].
            states: The target's states of size E after the A layers that the head reads, joined, [B, T, A E].
            positions: Position of each token in its sequence, [B, T], if rows hold several sequences.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TargetPass:
    """The outputs of the target that a head learns from.

    Attributes:
        distributions: Distributions over the draft ids, at the positions whose mask is not 0.
        states: Hidden states of size E after each of the A layers that the head reads, joined, [B, T, A E].
    """

    distributions: Dense
    states: Tensor


class HeadTeacher:
    """The frozen target of a head. transformers runs it, with hooks on the layers that the head reads.

    accelerate may spread the target over devices and disk. Returned tensors are on `device`, the student's device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layer_ids: tuple[int, ...],
        ids: Tensor | None,
        temperature: float,
        device: torch.device,
    ) -> None:
        """Freeze the model, and add the hooks.

        Args:
            layer_ids: Layers that the head reads.
            ids: The target's token id for each draft id, [W]. None if the head predicts all token ids.
            temperature: Temperature of the loss.

        Raises:
            UserError: The model's layers are not found.
        """
        self.model = model.eval().requires_grad_(False)
        self.temperature = temperature
        self.device = device
        self.whole = LocalTeacher(model, logits_of(model), device)
        self.takes_packed = self.whole.takes_packed
        self.all_ids = ids is None
        self.ids = (torch.arange(self.whole.vocab) if ids is None else ids).to(device)
        self.vocab = len(self.ids)
        draft_rows = self.whole.head.plain and not self.all_ids
        self.draft_head = self.head_rows() if draft_rows else None
        embedding = cast(nn.Module, model.get_input_embeddings()).get_parameter("weight")
        self.embedding = embedding.detach().to(device)
        self.states: dict[int, Tensor] = {}
        keep_states(model, layer_ids, self.states)

    def head_rows(self) -> Tensor:
        """Return the rows of the target's lm_head that belong to the W draft ids, [W, E]."""
        weight = output_head(self.model).get_parameter("weight").detach()
        return weight[self.ids.to(weight.device)].to(self.device)

    def at(self, temperature: float) -> "HeadTeacher":
        """Return this teacher for measurements at another temperature. Both share the model."""
        other = copy.copy(self)
        other.temperature = temperature
        return other

    @torch.no_grad()
    def distributions(self, batch: Batch) -> TargetPass:
        """Return the target's distributions at the positions whose mask is not 0, and its states at all positions."""
        whole = self.whole.distributions(batch)
        if self.all_ids:
            return TargetPass(whole, self._joined())
        hidden = whole.hidden[:, self.ids] if whole.head is None else whole.hidden
        totals: list[Tensor] = []
        for part in whole.hidden.split(ROWS):
            logits = wide(Dense(part, whole.head).logits(slice(None)))
            totals.append(torch.logsumexp(logits / self.temperature, -1))
        draft = Dense(hidden, self.draft_head, log_total=torch.cat(totals))
        return TargetPass(draft, self._joined())

    @torch.no_grad()
    def states_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Run the target on token ids, [B, T]. Return the states that the head reads, [B, T, A E], and the last states.

        The last states are the input of the target's lm_head, [B, T, E].
        """
        decoder = cast(Any, self.model.get_decoder())
        ids = ids.to(self.model.device)
        read = decoder(input_ids=ids, use_cache=False).last_hidden_state
        return self._joined(), read.to(self.device)

    def _joined(self) -> Tensor:
        """Return the states of the target's last pass, joined over the A layers that the head reads, [B, T, A E]."""
        return torch.cat([self.states[i].to(self.device) for i in sorted(self.states)], -1)


class ChainObjective(Objective):
    """Training of a head that drafts chains: a token is predicted in each of L steps, as drafted token 1, 2, ..., L.

    The loss is the mean over all steps. All steps predict the same tokens of the text.
    """

    takes_packed = True
    # lm_head starts with weights of the target, and has little to learn
    rates = MappingProxyType({"lm_head.weight": 0.25})

    def __init__(
        self, student: ChainStudent, trimmed: TrimmedHead | None, loss: Loss, temperature: float, steps: int
    ) -> None:
        """Create the objective. trimmed: The ids that the head predicts. steps: Number of steps, L."""
        super().__init__(student, loss, temperature)
        self.steps = steps
        self.trimmed = trimmed

    def forward(
        self,
        ids: Tensor,
        mask: Tensor,
        teacher: TargetPass,
        positions: Tensor | None = None,
        depths: None = None,
    ) -> Tensor:
        """Return the six sums that DistillStep.forward describes, as means over the L steps, [1, 6].

        Without gradients, as in evaluation, return the six sums of each step, [L, 6].

        Args:
            ids: Token ids, [B, T + 1].
            mask: Weight of each next token in the loss, [B, T]. The first L positions of a sequence must be 0, because
                no chain of L steps ends there.
            positions: Position of each token in its sequence, [B, T], if rows hold several sequences.
            depths: Unused, because only parallel drafts have depths.
        """
        counted = mask.flatten().nonzero().squeeze(1)
        labels = ids[:, 1:].flatten()[counted]
        weights = mask.flatten()[counted]
        outputs = self.student(ids[:, :-1], teacher.states, self.steps, positions)
        # the input of lm_head at the counted positions in each step, L tensors [N, D]
        read = [out.flatten(0, 1)[counted - 1 - step] for step, out in enumerate(outputs)]
        target = teacher.distributions
        head = self.student.lm_head.weight
        if not torch.is_grad_enabled():
            return torch.stack([self.sums(out, head, labels, weights, target, self.trimmed) for out in read])
        # one call for all steps, so that the target's lm_head is applied once per token
        rows = torch.arange(len(counted), device=ids.device).repeat_interleave(self.steps)
        target = replace(target, rows=rows)
        hidden = torch.stack(read, 1).flatten(0, 1)
        weights = weights[rows] / self.steps
        return self.sums(hidden, head, labels[rows], weights, target, self.trimmed).unsqueeze(0)


def chain_setup(
    job: Distillation,
    student: ChainStudent,
    teacher: HeadTeacher,
    batches: Batches,
    heldout: HeldOut,
    steps: int,
) -> TrainingSetup:
    """Return how a head that drafts chains of `steps` tokens is trained. For batches and heldout, see texts_of."""
    assert job.target is not None  # a head reads the target's states
    loss = parse_loss(job.loss)
    served = served_temperature(job)
    judged = [within_chains(batch, steps) for batch in heldout.batches]
    trimmed = TrimmedHead.of(teacher.ids, TargetSizes.of(job.target).vocab)
    return TrainingSetup(
        teacher=teacher,
        batches=ChainBatches(batches, steps),
        heldout=replace(heldout, batches=judged),
        loss=loss,
        served=served,
        judge=teacher.at(served or 1.0),
        rounded=student.rounded(job.target),
        objective=ChainObjective(student, trimmed, loss, job.temperature, steps),
    )


@dataclass(frozen=True, slots=True)
class ChainBatches:
    """Batches in which the mask of the first `steps` positions of each row is 0.

    Training predicts each token by chains of up to `steps` drafted tokens, which begin at earlier positions of the row.
    """

    batches: Batches
    steps: int

    def batch(self, step: int) -> Batch:
        return within_chains(self.batches.batch(step), self.steps)


def within_chains(batch: Batch, steps: int) -> Batch:
    mask = batch.mask.copy()
    mask[:, :steps] = 0
    return replace(batch, mask=mask)


def open_teacher(job: Distillation, layer_ids: tuple[int, ...], ids: Tensor | None) -> HeadTeacher:
    """Load the target, frozen, in the dtype to train in. For layer_ids and ids, see HeadTeacher.

    Raises:
        UserError: See check_layers.
    """
    check_layers(job, layer_ids)
    assert job.target is not None  # a head reads the target's states
    device = select_device(job.hardware.device)
    dtype = training_dtype(job.loop.dtype)
    model = checkpoint.load_model(job.target, dtype, device, job.hardware.device_map)
    return HeadTeacher(model, layer_ids, ids, job.temperature, device)


def served_temperature(job: Distillation) -> float:
    """Return the temperature at which the head will run: that of the target's text, and otherwise 1."""
    return job.text.served if job.outputs is None else stored_temperature(job.outputs)


def costs(
    job: Distillation, described: str, layer_ids: Sequence[int], weights: int, passes: float
) -> Mapping[str, object]:
    """Return facts on the text, a head and the cost of its training, for a dry run.

    Args:
        described: Further facts on the head, in words.
        layer_ids: Layers of the target that the head reads.
        weights: Number of the head's parameters.
        passes: Number of tokens that the head reads for each token of the text.
    """
    assert job.target is not None  # a head reads the target's states
    dtype = training_dtype(job.loop.dtype)
    size = read_size(job.target)
    rows = job.loop.batch_size
    seq_len = job.text.seq_len
    tokens = job.loop.steps * rows * seq_len
    per_token = size.flops_per_token(seq_len // 2) + 6 * weights * passes
    states = rows * seq_len * size.hidden * (len(layer_ids) + size.layers)
    memory = size.weight_bytes(dtype.itemsize) + BYTES * weights + states * dtype.itemsize
    text = {} if job.answers is None else {"text": job.answers.describe()}
    return text | {
        "head": f"reads layers {', '.join(map(str, layer_ids))} of {size.describe()}; {described}, "
        f"{format_count(weights)} parameters",
        "tokens": f"{tokens:,}",
        "flops": tokens * per_token,
        "memory": f"about {format_bytes(memory, 2)}, plus activations",
        "disk": f"{format_bytes(2 * weights)}, and up to {format_bytes(12 * weights)} more during the run; no "
        "states are stored",
    }


def texts_of(job: Distillation, target: Path, state: Path) -> tuple[Batches, HeldOut]:
    """Return the text to train a head on, and held-out text.

    The text is stored outputs of the target, data, or data that the target continues.

    Raises:
        UserError: The text cannot be used.
    """
    text = job.text
    loop = job.loop
    if job.outputs is not None:
        return open_texts(job.outputs, target, text.seq_len, loop)
    data, heldout = text.open(target, loop)
    if not text.generated:
        return data, heldout
    author = Author.of(target, job.hardware, loop)
    written = target_text(text, data, author, state)
    prompts = heldout.ids[:, : text.prompt_tokens]
    judged = continued(prompts, text, author, state, "heldout_text.pt", "evaluate on")
    count = math.ceil(len(prompts) / loop.batch_size)
    heldout = replace(heldout, batches=[judged.batch(i) for i in range(count)])
    return in_turns(text, {"data": data, "target": written}, loop), heldout


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Batches of stored sequences, in a new random order each epoch. A batch depends only on seed and step.

    rows: Number of sequences per batch.
    """

    outputs: list[TargetOutput]
    rows: int
    seq_len: int
    seed: int

    def batch(self, step: int) -> Batch:
        places = (divmod(step * self.rows + i, len(self.outputs)) for i in range(self.rows))
        return padded([self.outputs[self._order(epoch)[place]] for epoch, place in places], self.seq_len)

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.outputs))


def open_texts(directory: Path, target: Path, seq_len: int, loop: Loop) -> tuple[StoredRows, HeldOut]:
    """Return batches to train on, and held-out text, from stored target outputs. Log-probabilities are not read.

    Raises:
        UserError: The stored outputs have another tokenizer than the target or are unfinished, or fewer than two
            answers begin within seq_len tokens.
    """
    check_tokenizer(directory, target)
    outputs = _sequences(directory, seq_len)
    if (part := heldout_part(directory)) is not None:
        heldout = _sequences(part, seq_len)
    elif len(outputs) < 2:
        heldout = []
    else:
        apart = set(heldout_numbers(outputs, HELDOUT_SHARE))
        heldout = [outputs[i] for i in apart]
        outputs = [output for i, output in enumerate(outputs) if i not in apart]
    if not outputs or not heldout:
        raise UserError(
            f"--seq-len {seq_len}: fewer than two answers in {directory} follow prompts shorter than {seq_len} tokens; "
            "use a larger --seq-len"
        )
    batches = padded(heldout[:HELDOUT_ROWS], seq_len).split(loop.batch_size)
    return StoredRows(outputs, loop.batch_size, seq_len, loop.seed), HeldOut(batches, 1.0)


def _sequences(directory: Path, seq_len: int) -> list[TargetOutput]:
    return [output for output in read_texts(directory) if len(output.prompt) < seq_len]


@dataclass(frozen=True, slots=True)
class Sample:
    """Data for the least squares: N pairs of neighbouring positions i and i + 1.

    Attributes:
        states: The target's states at i, after each of the A layers that the head reads, joined, [N, A E].
        embedded: Embeddings of the tokens at i + 1, [N, E], where E is the target's hidden size.
        now, after: Inputs of the target's lm_head at i and at i + 1, [N, E].
    """

    states: Tensor
    embedded: Tensor
    now: Tensor
    after: Tensor


@torch.no_grad()
def sample(teacher: HeadTeacher, batches: Batches, loop: Loop, seq_len: int, what: str) -> Sample:
    """Run the target on the first batches, and return its states at pairs of neighbouring positions.

    A pair is left out if the states at its first position are unusually large.

    what: Label of the progress bar.
    """
    count = min(loop.steps, math.ceil(FITTED_TOKENS / (loop.batch_size * seq_len)))
    parts: list[list[Tensor]] = []
    with progress(what, count) as advance:
        for number in range(count):
            advance(number, "batches")
            batch = batches.batch(number)
            ids = torch.from_numpy(batch.ids[:, : int(batch.lengths.max()) + 1]).to(teacher.device)
            states, read = teacher.states_of(ids)
            lengths = torch.from_numpy(batch.lengths).to(ids.device)
            inside = torch.arange(ids.shape[1] - 1, device=ids.device) + 1 < lengths.unsqueeze(1)
            size = states[:, :-1].float().norm(dim=-1)
            inside &= size < LARGE * size.median()
            embedded = teacher.embedding[ids[:, 1:]]
            whole = (states[:, :-1], embedded, read[:, :-1], read[:, 1:])
            parts.append([tensor[inside].float() for tensor in whole])
    return Sample(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
