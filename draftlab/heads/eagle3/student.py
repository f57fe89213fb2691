"""The student eagle: an EAGLE-3 head (Li et al. 2025, 2503.01840), trained on the states of the frozen target.

W draft vocab.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from draftlab.console import note
from draftlab.errors import UserError
from draftlab.heads.eagle3 import layout
from draftlab.heads.eagle3.layout import Head, HeadShape
from draftlab.heads.eagle3.module import EagleHead
from draftlab.heads.eagle3.start import start_again, start_linear
from draftlab.heads.training import (
    HeadStudent,
    HeadTeacher,
    Layers,
    chain_setup,
    costs,
    open_teacher,
    sample,
    texts_of,
)
from draftlab.model import checkpoint
from draftlab.model.trimmed_head import frequent_ids
from draftlab.training.checkpointer import load_or_make
from draftlab.training.loop import Batches, Loop
from draftlab.training.run import Distillation, OpenStudent
from draftlab.training.students.base import student
from draftlab.training.vocabulary import special_ids

LARGEST_DEFAULT = 32_000  # largest default number of draft ids, as in heads of SafeAILab and speculators


@student("eagle")
class EagleStudent(HeadStudent):
    """Options of an EAGLE-3 head, with the names of the library speculators.

    ttt_steps: Number of steps of training-time test, which is the number of tokens in a row that the head learns to
    draft. layer_ids: Layers of the target whose states the head reads, as 2+12+21; by default 2, n / 2 and n - 3 of n
    layers. norm_before_residual: Whether hidden_norm's output, not its input, is the residual. SGLang does not support
    this.

    EAGLE-3.1 has the further options norm_before_fc (one RMSNorm for all states of the target) or fc_norm (one RMSNorm
    for the states of each layer), norm_output (the normed state is fed back) and sliding_window (number of latest
    tokens that the head reads).
    """

    free = frozenset({"ttt_steps"})
    lr_share = 0.5  # learning rate relative to that of pruned drafts, from runs on SmolLM2-135M
    ttt_steps: int = Field(4, ge=1, le=16)
    layer_ids: Layers = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    sliding_window: int | None = Field(None, ge=1)

    def layers_of(self, job: Distillation) -> Sequence[int]:
        return head_of(self, job).layer_ids

    def check(self, job: Distillation) -> None:
        super().check(job)
        if job.text.seq_len <= self.ttt_steps + 1:
            raise UserError(
                f"--seq-len {job.text.seq_len} is too short for --student {self.text} with ttt_steps={self.ttt_steps}; "
                f"use --seq-len {self.ttt_steps + 2} or more"
            )
        if job.draft is not None and job.vocab:
            raise UserError(f"--draft {job.draft} already decides the ids of the head; leave --vocab out")

    def facts(self, job: Distillation) -> Mapping[str, object]:
        head = head_of(self, job)
        described = f"{head.draft_vocab:,} draft ids"
        return costs(job, described, head.layer_ids, head.params(), self.ttt_steps)

    def open(self, job: Distillation, state: Path) -> OpenStudent:
        return open_head(self, job, state)


def head_of(spec: EagleStudent, job: Distillation) -> HeadShape:
    """Return the shape of the head to train. Raises UserError: the head does not fit the target."""
    assert job.target is not None  # a head reads the target's states
    if job.draft is not None:
        return layout.check(job.draft, job.target)
    vocab = checkpoint.vocab_size(job.target)
    size = job.vocab or min(LARGEST_DEFAULT, max(1, vocab // 4))
    layers = None if spec.layer_ids is None else tuple(spec.layer_ids)
    variant = spec.model_dump(exclude={"text", "ttt_steps", "layer_ids"})
    return layout.head_config(job.target, layers, size, **variant)


def open_head(spec: EagleStudent, job: Distillation, state: Path) -> OpenStudent:
    """Load the target and freeze it. Return the EAGLE-3 head with its teacher, loss and text.

    Raises:
        UserError: The target, the text or the head of --draft cannot be used.
    """
    target = job.target
    assert target is not None  # a head reads the target's states
    head = head_of(spec, job)
    previous = None if job.draft is None else layout.read(job.draft, target, torch.float32)
    batches, heldout = texts_of(job, target, state)
    ids, coverage = _draft_ids(head, previous, batches, job.loop.steps, target, state)
    note(f"the {len(ids):,} draft ids cover {coverage:.2%} of the training tokens")
    teacher = open_teacher(job, head.layer_ids, ids)
    student = start_head(head, previous, teacher, batches, job.loop, job.text.seq_len, state)
    chain = spec.ttt_steps
    setup = chain_setup(job, student, teacher, batches, heldout, chain)

    def write(work: Path, state: Path) -> dict[str, object]:
        """Write the head of the best evaluation, in SpecForge's layout."""
        weights = student.best_weights(state, target)
        embedding = None if previous is None else previous.embedding
        trained = Head(config=head, weights=weights, ids=teacher.ids, embedding=embedding)
        layout.write(work, trained, "native", target=target, k=chain)
        return {"coverage": coverage}

    return OpenStudent(module=student, setup=setup, write=write)


def _draft_ids(
    head: HeadShape, previous: Head | None, batches: Batches, steps: int, target: Path, state: Path
) -> tuple[Tensor, float]:
    """Return the token ids that the head predicts, and the share of the training tokens that are among them.

    A new head predicts the most frequent ids of the training text. If `previous` is set, the head keeps the ids of
    `previous`. The ids are stored in the directory `state`.

    Raises:
        UserError: There are more special tokens than ids that the head predicts.
    """

    def find() -> dict[str, Any]:
        if head.draft_vocab == head.vocab:
            return {"ids": torch.arange(head.vocab), "coverage": 1.0}
        texts = [batch.ids[:, 1:][batch.mask > 0] for batch in map(batches.batch, range(steps))]
        if previous is not None:
            coverage = float(np.isin(np.concatenate(texts), previous.ids.numpy()).mean())
            return {"ids": previous.ids, "coverage": coverage}
        ids, coverage = frequent_ids(texts, head.draft_vocab, head.vocab, special_ids(target))
        return {"ids": torch.tensor(ids), "coverage": coverage}

    found = load_or_make(state, "draft_ids.pt", find)
    return found["ids"], found["coverage"]


def start_head(
    head: HeadShape,
    previous: Head | None,
    teacher: HeadTeacher,
    batches: Batches,
    loop: Loop,
    seq_len: int,
    state: Path,
) -> EagleHead:
    """Return the head to train: `previous`, or a new head with initial weights from least squares (see start.py).

    The initial weights are stored in the directory `state`, so that a resumed run starts from the same weights.
    """
    torch.manual_seed(loop.seed)
    if previous is None:
        student = EagleHead(head, teacher.embedding)
        what = "computing the head's initial weights by least squares"
    else:
        student = EagleHead.of(previous, teacher.embedding)
        what = "measuring the target's states"
    student.to(teacher.device)

    def find() -> dict[str, Tensor]:
        sampled = sample(teacher, batches, loop, seq_len, what)
        if previous is not None:
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
