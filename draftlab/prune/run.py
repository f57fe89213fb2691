"""One prune on disk: decide what stays, cut, refit, write."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from draftlab import provenance
from draftlab.console import is_main_process, processes, progress
from draftlab.data import open_batches, open_heldout
from draftlab.distill import distributed
from draftlab.distill.checkpointer import process_state
from draftlab.errors import UserError
from draftlab.files import claim_state, state_directory
from draftlab.model import checkpoint, saving
from draftlab.model.shape import Shape
from draftlab.prune.choose import (
    Depth,
    choose,
    contiguous,
    even,
    first_scores,
    greedy,
    influential,
    magnitude_scores,
    random_scores,
    top,
)
from draftlab.prune.cut import Cut, Keep, Rotated, keep_all
from draftlab.prune.importance import Importance, Scores, calibrate, load_scores, save_scores
from draftlab.prune.masks.hard_concrete import Masks
from draftlab.prune.masks.training import MASKS_FILE, Learning, learn
from draftlab.prune.refit import Agreement, Fit, Lockstep
from draftlab.prune.trial_model import check_buildable, check_prunable
from draftlab.prune.walk import Walk

Method = Literal["activation", "masks", "random", "first", "magnitude"]
Basis = Literal["auto", "pca", "coordinates"]

KEEP_FILE = "keep.json"
HELDOUT_TOKENS = 4096
GREEDY_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to cut, by which rule, and what to adjust afterwards."""

    source: Path
    shape: Shape
    method: Method
    depth: Depth
    basis: Basis
    fit: Fit
    data: str
    tokens: int
    seq_len: int
    seed: int
    device: torch.device
    scores_cache: Path | None
    learning: Learning | None = None  # of masks

    @cached_property
    def have(self) -> Shape:
        return checkpoint.planned_shape(self.source)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The draft is written as the source is stored."""
        return checkpoint.stored_dtype(self.source)

    @property
    def weights(self) -> checkpoint.Weights:
        """The source's, as they are computed with."""
        return checkpoint.Weights(self.source, self.computed)

    @property
    def computed(self) -> torch.dtype:
        return checkpoint.compute_dtype(self.source, self.device)

    @property
    def rotated(self) -> bool:
        narrower = self.shape.hidden < self.have.hidden
        wanted = self.basis == "pca" or (self.basis == "auto" and not self.have.tied)
        return self.method == "activation" and narrower and wanted

    def walk(self, *, resident: bool = False) -> Walk:
        config = checkpoint.read_config(self.source)
        return Walk(self.weights, config, self.computed, self.device, resident)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What stays. weights are the source's in the draft's basis [D, D'], not yet cut."""

    keep: Keep
    basis: Tensor
    weights: Mapping[str, Tensor]
    masks: Masks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """agreement with the source; None where the draft is the source itself."""

    keep: Keep
    agreement: Agreement | None
    disk_bytes: int


def check_plan(plan: Plan) -> None:
    """Raises UserError: not what the axis table takes it for; a tied head cannot be rotated or refitted alone."""
    if processes() > 1 and plan.learning is None:
        raise UserError(f"--method {plan.method} runs in one process; only --method masks trains in several")
    distributed.check(masks=plan.learning is not None)
    config = checkpoint.read_config(plan.source)
    check_prunable(config, plan.have)
    check_buildable(checkpoint.config_for(plan.shape, config, list(range(plan.shape.layers))), plan.shape)
    if plan.basis == "pca" and plan.have.tied:
        raise UserError("--basis pca moves the last norm into the head, and this source ties it; use coordinates")
    if plan.basis == "pca" and plan.method != "activation":
        raise UserError(f"--basis pca goes with --method activation; {plan.method} chooses coordinates")
    if plan.fit.head and plan.have.tied:
        raise UserError("--refit-head changes the head alone, and this source ties it to the embedding; leave it out")


def prune(plan: Plan, *, out: Path, arguments: dict[str, object], began: float, force: bool) -> Pruned:
    """Write the draft of plan.shape to out.

    Weights keep the source's dtype: with the source's own shape they are the source's bits.
    """
    check_plan(plan)
    if plan.shape == plan.have:
        keep = keep_all(plan.have)
        with checkpoint.new_directory(out, force=force) as work:
            size = _write(plan, keep, iter(checkpoint.Weights(plan.source).items()), work)
            provenance.write_record(work, "prune", arguments, [plan.source], began, params=plan.shape.params())
        return Pruned(keep=keep, agreement=None, disk_bytes=size)
    chunks, heldout, state = _text(plan), _heldout(plan), state_directory(out)
    made = _decide(plan, chunks, state, arguments)
    if not is_main_process():  # masks may be trained in several, and one writes
        return Pruned(keep=made.keep, agreement=None, disk_bytes=0)
    config = checkpoint.config_for(plan.shape, checkpoint.read_config(plan.source), made.keep.layers)
    draft = Walk(Cut(made.weights, plan.shape, made.keep), config, plan.computed, plan.device)
    lockstep = Lockstep(plan.walk(), draft, layers=made.keep.layers, basis=made.basis, fit=plan.fit)
    with checkpoint.new_directory(out, force=force) as work:
        size = _write(plan, made.keep, _fitted(lockstep, plan, chunks, heldout), work)
        if made.masks is not None:
            (work / MASKS_FILE).parent.mkdir()
            made.masks.save(work / MASKS_FILE)
        found = lockstep.agreement
        notes = {"params": plan.shape.params(), "agreement": asdict(found) if found else None}
        provenance.write_record(work, "prune", arguments, [plan.source], began, **notes)
    shutil.rmtree(state, ignore_errors=True)
    return Pruned(keep=made.keep, agreement=found, disk_bytes=size)


def _write(plan: Plan, keep: Keep, tensors: Iterator[tuple[str, Tensor]], work: Path) -> int:
    config = checkpoint.config_for(plan.shape, checkpoint.read_config(plan.source), keep.layers)
    (work / KEEP_FILE).write_text(keep.model_dump_json())
    return saving.write_checkpoint(work, config, tensors, plan.source)


def _decide(plan: Plan, chunks: list[Tensor], state: Path, arguments: dict[str, object]) -> Decision:
    source, have, shape = plan.weights, plan.have, plan.shape
    if plan.learning is not None:
        identity = arguments | {"command": "prune", "inputs": [provenance.fingerprint(plan.source)]}
        with process_state().main_process_first():
            claim_state(state, identity)
        learned = learn(plan.source, have, shape, plan.learning, data=plan.data, state=state)
        return Decision(keep=learned.keep, basis=learned.basis, weights=learned.weights, masks=learned.masks)
    if plan.method == "activation":
        importance = _importance(plan, chunks)
        keep = choose(importance.scores, have, shape, _layers(plan, importance, chunks))
        if plan.rotated:
            rotation, _ = importance.principal(shape.hidden)
            keep = keep.model_copy(update={"hidden": list(range(shape.hidden))})
            return Decision(keep=keep, basis=rotation, weights=Rotated(source, have, rotation))
    else:
        scores = _baseline(plan, source)
        keep = choose(scores, have, shape, top(scores.layers, shape.layers))
    return Decision(keep=keep, basis=torch.eye(have.hidden)[:, keep.hidden], weights=source)


def _layers(plan: Plan, importance: Importance, chunks: list[Tensor]) -> list[int]:
    count, total = plan.shape.layers, plan.have.layers
    if plan.depth == "contiguous":
        return contiguous(importance, count)
    if plan.depth == "even":
        return even(total, count)
    if plan.depth == "influence" or count == total:
        return influential(importance, count)
    with progress("drop layers", total - count) as advance:
        few = chunks[: max(1, GREEDY_TOKENS // plan.seq_len)]
        return greedy(plan.walk(resident=True), few, count, lambda done: advance(done, f"of {total}"))


def _baseline(plan: Plan, source: checkpoint.Weights) -> Scores:
    if plan.method == "random":
        return random_scores(plan.have, plan.seed)
    return first_scores(plan.have) if plan.method == "first" else magnitude_scores(source, plan.have)


def _importance(plan: Plan, chunks: list[Tensor]) -> Importance:
    made_by = {
        "source": provenance.fingerprint(plan.source) if plan.scores_cache else "",
        "data": plan.data,
        "tokens": str(plan.tokens),
        "seq_len": str(plan.seq_len),
        "seed": str(plan.seed),
    }
    if plan.scores_cache is not None and plan.scores_cache.exists():
        return load_scores(plan.scores_cache, made_by)
    with progress("calibrate", plan.have.layers) as advance:
        importance = calibrate(plan.walk(), plan.have, chunks, lambda done: advance(done, "layers"))
    if plan.scores_cache is not None:
        save_scores(importance, plan.scores_cache, made_by)
    return importance


def _fitted(
    lockstep: Lockstep, plan: Plan, chunks: list[Tensor], heldout: list[Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The draft's tensors as the source stores its own."""
    with progress("refit", plan.have.layers) as advance:
        for name, tensor in lockstep.tensors(chunks, heldout, lambda done: advance(done, "layers")):
            yield name, tensor.to("cpu", plan.dtype)


def _text(plan: Plan) -> list[Tensor]:
    """Calibration text: chunks of token ids [1, seq_len]."""
    rows = -(-plan.tokens // plan.seq_len)
    tokenizer = checkpoint.load_tokenizer(plan.source)
    text = open_batches(plan.data, tokenizer, rows=rows, seq_len=plan.seq_len, steps=1, seed=plan.seed)
    return [torch.from_numpy(part.ids[:, :-1]) for part in text.batch(0).split(1)]


def _heldout(plan: Plan) -> list[Tensor]:
    most = max(1, HELDOUT_TOKENS // plan.seq_len)
    held = open_heldout(plan.data, checkpoint.load_tokenizer(plan.source), rows=1, seq_len=plan.seq_len, most_rows=most)
    return [torch.from_numpy(batch.ids) for batch in held.batches]
