"""Train an EAGLE-3 head in the common training loop.

In each step the frozen target computes the hidden states that the head reads.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftlab.console import note
from draftlab.data import Batch, HeldOut
from draftlab.errors import UserError
from draftlab.model import checkpoint, eagle
from draftlab.model.eagle import Head, HeadShape
from draftlab.model.shape import format_count
from draftlab.model.size import read_size
from draftlab.model.trimmed_head import frequent_ids
from draftlab.quantities import format_bytes
from draftlab.target_outputs.batches import stored_temperature
from draftlab.target_outputs.outputs import TargetOutput, heldout_numbers, padded
from draftlab.target_outputs.store import check_tokenizer, heldout_part, read_texts
from draftlab.training.checkpointer import load_or_make, select_device
from draftlab.training.eagle_head import EagleHead, EagleObjective, EagleTeacher
from draftlab.training.eagle_start import sample, start_again, start_linear
from draftlab.training.loop import Batches, Loop
from draftlab.training.losses import parse_loss
from draftlab.training.optimizers import training_dtype
from draftlab.training.run import Distillation, OpenStudent
from draftlab.training.students.eagle import LARGEST_DEFAULT, EagleStudent
from draftlab.training.texts import HELDOUT_ROWS, Author, continued, in_turns, target_text
from draftlab.training.trainer import TrainingSetup
from draftlab.training.vocabulary import special_ids

HELDOUT_SHARE = 0.05  # share of the stored texts that is held out if a store has no held-out part


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


BYTES = 16  # bytes per trained weight: the fp32 weight, its gradient and two optimizer moments


def head_of(spec: EagleStudent, job: Distillation) -> HeadShape:
    """Return the shape of the head to train. Raises UserError: the head does not fit the target."""
    assert job.target is not None  # a head reads the target's states
    if job.draft is not None:
        return eagle.check(job.draft, job.target)
    vocab = checkpoint.vocab_size(job.target)
    size = job.vocab or min(LARGEST_DEFAULT, max(1, vocab // 4))
    layers = None if spec.layer_ids is None else tuple(spec.layer_ids)
    variant = spec.model_dump(exclude={"text", "ttt_steps", "layer_ids"})
    return eagle.head_config(job.target, layers, size, **variant)


def facts(spec: EagleStudent, job: Distillation) -> Mapping[str, object]:
    """Return facts on the head and the cost of its training, for a dry run, without reading weights."""
    head = head_of(spec, job)
    described = f"{head.draft_vocab:,} draft ids"
    return costs(job, described, head.layer_ids, head.params(), spec.ttt_steps)


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
    dtype, size = training_dtype(job.loop.dtype), read_size(job.target)
    rows, seq_len = job.loop.batch_size, job.text.seq_len
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


def open_head(spec: EagleStudent, job: Distillation, state: Path) -> OpenStudent:
    """Load the target and freeze it. Return the EAGLE-3 head with its teacher, loss and text.

    Raises:
        UserError: The target, the text or the head of --draft cannot be used.
    """
    target = job.target
    assert target is not None  # a head reads the target's states
    head = head_of(spec, job)
    begun = None if job.draft is None else eagle.read(job.draft, target, torch.float32)
    batches, heldout = texts_of(job, target, state)
    ids, coverage = _draft_ids(head, begun, batches, job.loop.steps, target, state)
    note(f"the {len(ids):,} draft ids cover {coverage:.2%} of the training tokens")
    teacher = open_teacher(job, head.layer_ids, ids)
    student = start_head(head, begun, teacher, batches, job.loop, job.text.seq_len, state)
    loss, chain = parse_loss(job.loss), spec.ttt_steps
    served = served_temperature(job)
    judged = [within_chains(batch, chain) for batch in heldout.batches]
    setup = TrainingSetup(
        teacher=teacher,
        batches=ChainBatches(batches, chain),
        heldout=replace(heldout, batches=judged),
        loss=loss,
        served=served,
        judge=teacher.at(served or 1.0),
        rounded=student.rounded(target),
        objective=EagleObjective(student, teacher.ids, loss, job.temperature, chain),
    )

    def write(work: Path, state: Path) -> dict[str, object]:
        """Write the head of the best evaluation, in SpecForge's layout."""
        weights = student.best_weights(state, target)
        embedding = None if begun is None else begun.embedding
        trained = Head(config=head, weights=weights, ids=teacher.ids, embedding=embedding)
        eagle.write(work, trained, "native", target=target, k=chain)
        return {"coverage": coverage}

    return OpenStudent(module=student, setup=setup, write=write)


def open_teacher(job: Distillation, layer_ids: tuple[int, ...], ids: Tensor | None) -> EagleTeacher:
    """Load the target, frozen, in the dtype to train in. For layer_ids and ids, see EagleTeacher."""
    assert job.target is not None  # a head reads the target's states
    device = select_device(job.hardware.device)
    dtype = training_dtype(job.loop.dtype)
    model = checkpoint.load_model(job.target, dtype, device, job.hardware.device_map)
    return EagleTeacher(model, layer_ids, ids, job.temperature, device)


def served_temperature(job: Distillation) -> float:
    """Return the temperature at which the head will run: that of the target's text, and otherwise 1."""
    return job.text.served if job.outputs is None else stored_temperature(job.outputs)


def texts_of(job: Distillation, target: Path, state: Path) -> tuple[Batches, HeldOut]:
    """Return the text to train a head on, and held-out text.

    The text is stored outputs of the target, data, or data that the target continues.

    Raises:
        UserError: The text cannot be used.
    """
    text, loop = job.text, job.loop
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


def _draft_ids(
    head: HeadShape, begun: Head | None, batches: Batches, steps: int, target: Path, state: Path
) -> tuple[Tensor, float]:
    """Return the token ids that the head predicts, and the share of the training tokens that are among them.

    A new head predicts the most frequent ids of the training text. If `begun` is set, the head keeps the ids of
    `begun`. The ids are stored in the directory `state`.

    Raises:
        UserError: There are more special tokens than ids that the head predicts.
    """

    def find() -> dict[str, Any]:
        if head.draft_vocab == head.vocab:
            return {"ids": torch.arange(head.vocab), "coverage": 1.0}
        texts = [batch.ids[:, 1:][batch.mask > 0] for batch in map(batches.batch, range(steps))]
        if begun is not None:
            coverage = float(np.isin(np.concatenate(texts), begun.ids.numpy()).mean())
            return {"ids": begun.ids, "coverage": coverage}
        ids, coverage = frequent_ids(texts, head.draft_vocab, head.vocab, special_ids(target))
        return {"ids": torch.tensor(ids), "coverage": coverage}

    found = load_or_make(state, "draft_ids.pt", find)
    return found["ids"], found["coverage"]


def start_head(
    head: HeadShape,
    begun: Head | None,
    teacher: EagleTeacher,
    batches: Batches,
    loop: Loop,
    seq_len: int,
    state: Path,
) -> EagleHead:
    """Return the head to train: `begun`, or a new head with initial weights from least squares (see eagle_start.py).

    The initial weights are stored in the directory `state`, so that a resumed run starts from the same weights.
    """
    torch.manual_seed(loop.seed)
    if begun is None:
        student, what = (
            EagleHead(head, teacher.embedding),
            "computing the head's initial weights by least squares",
        )
    else:
        student, what = EagleHead.of(begun, teacher.embedding), "measuring the target's states"
    student.to(teacher.device)

    def find() -> dict[str, Tensor]:
        sampled = sample(teacher, batches, loop, seq_len, what)
        if begun is not None:
            start_again(student, sampled)
        else:
            start_linear(student, sampled)
            with torch.no_grad():
                student.lm_head.weight.copy_(teacher.head_rows())
        tensors = student.state_dict() | {"scale": student.scale}
        return {name: weight.cpu() for name, weight in tensors.items()}

    start = load_or_make(state, "start.pt", find)
    student.scale.copy_(start.pop("scale"))
    student.load_state_dict(start)
    return student
