"""One prune on disk: calibrate, choose, cut, refit, write."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from draftlab import checkpoint, provenance
from draftlab.console import progress
from draftlab.data import open_batches, open_heldout, parse_mixture
from draftlab.errors import UserError
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
from draftlab.prune.refit import Agreement, Fit, Lockstep
from draftlab.prune.walk import Walk
from draftlab.shape import Shape

Method = Literal["activation", "random", "first", "magnitude"]
Basis = Literal["auto", "pca", "coordinates"]

KEEP_FILE = "keep.json"
HELDOUT_TOKENS = 4096
GREEDY_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
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

    @property
    def have(self) -> Shape:
        return checkpoint.read_shape(self.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """keep is None and agreement is None where the draft is the source itself."""

    keep: Keep
    agreement: Agreement | None
    disk_bytes: int


def check_plan(plan: Plan) -> None:
    """Raises UserError: a tied head cannot be rotated or refitted."""
    if plan.have.tied and plan.basis == "pca":
        raise UserError("--basis pca moves the last norm into the head, and this source ties it; use coordinates")
    if plan.have.tied and plan.fit.head:
        raise UserError("--refit-head changes the head alone, and this source ties it to the embedding; leave it out")


def prune(plan: Plan, *, out: Path, arguments: dict[str, object], began: float, force: bool) -> Pruned:
    """Write the draft of plan.shape to out.

    Weights keep the source's dtype: with the source's own shape they are the source's bits.
    """
    check_plan(plan)
    source, have, shape = checkpoint.Weights(plan.source), plan.have, plan.shape
    config = checkpoint.read_config(plan.source)
    chunks = _text(plan) if shape != have else []
    with checkpoint.new_directory(out, force=force) as work:
        if shape == have:
            keep, lockstep = keep_all(have), None
            tensors: Iterator[tuple[str, Tensor]] = iter(source.items())
        else:
            keep, basis, weights = _decide(plan, source, config, chunks)
            walk = Walk(source, config, _dtype(plan), plan.device)
            draft = Walk(
                Cut(weights, shape, keep), checkpoint.config_for(shape, config, keep.layers), _dtype(plan), plan.device
            )
            lockstep = Lockstep(walk, draft, layers=keep.layers, basis=basis, fit=plan.fit)
            tensors = _following(lockstep, plan, chunks)
        size = checkpoint.write_checkpoint(
            work, checkpoint.config_for(shape, config, keep.layers), tensors, plan.source
        )
        (work / KEEP_FILE).write_text(keep.model_dump_json())
        agreement = lockstep.agreement if lockstep else None
        notes = {"params": shape.params()} | ({"agreement": asdict(agreement)} if agreement else {})
        provenance.write_record(work, "prune", arguments, [plan.source], began, **notes)
    return Pruned(keep=keep, agreement=agreement, disk_bytes=size)


def _decide(
    plan: Plan, source: checkpoint.Weights, config: dict[str, object], chunks: list[Tensor]
) -> tuple[Keep, Tensor, Mapping[str, Tensor]]:
    """What is kept, the draft's basis [D, D'], and the source's weights in it."""
    have, shape = plan.have, plan.shape
    if plan.method == "activation":
        importance = _importance(plan, source, config, chunks)
        keep = choose(importance.scores, have, shape, _layers(plan, importance, source, config, chunks))
        if plan.basis == "pca" or (plan.basis == "auto" and not have.tied and shape.hidden < have.hidden):
            rotation, _ = importance.principal(shape.hidden)
            keep = keep.model_copy(update={"hidden": list(range(shape.hidden))})
            return keep, rotation, Rotated(source, have, rotation)
    else:
        scores = _baseline(plan, source)
        keep = choose(scores, have, shape, top(scores.layers, shape.layers))
    return keep, torch.eye(have.hidden)[:, keep.hidden], source


def _layers(
    plan: Plan, importance: Importance, source: checkpoint.Weights, config: dict[str, object], chunks: list[Tensor]
) -> list[int]:
    count, total = plan.shape.layers, plan.have.layers
    if plan.depth == "contiguous":
        return contiguous(importance, count)
    if plan.depth == "even":
        return even(total, count)
    if plan.depth == "greedy" and count < total:
        walk = Walk(source, config, _dtype(plan), plan.device, resident=True)
        with progress("drop layers", total - count) as advance:
            few = chunks[: max(1, GREEDY_TOKENS // plan.seq_len)]
            return greedy(walk, few, count, lambda done: advance(done, f"of {total}"))
    return influential(importance, count)


def _baseline(plan: Plan, source: checkpoint.Weights) -> Scores:
    if plan.method == "random":
        return random_scores(plan.have, plan.seed)
    return first_scores(plan.have) if plan.method == "first" else magnitude_scores(source, plan.have)


def _importance(plan: Plan, source: checkpoint.Weights, config: dict[str, object], chunks: list[Tensor]) -> Importance:
    made_by = {
        "source": provenance.fingerprint(plan.source) if plan.scores_cache else "",
        "data": plan.data,
        "tokens": str(plan.tokens),
        "seq_len": str(plan.seq_len),
        "seed": str(plan.seed),
    }
    if plan.scores_cache is not None and plan.scores_cache.exists():
        return load_scores(plan.scores_cache, made_by)
    walk = Walk(source, config, _dtype(plan), plan.device)
    with progress("calibrate", plan.have.layers) as advance:
        importance = calibrate(walk, plan.have, chunks, lambda done: advance(done, "layers"))
    if plan.scores_cache is not None:
        save_scores(importance, plan.scores_cache, made_by)
    return importance


def _following(lockstep: Lockstep, plan: Plan, chunks: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    tokenizer = checkpoint.load_tokenizer(plan.source)
    name = next(iter(parse_mixture(plan.data)))
    most = max(1, HELDOUT_TOKENS // plan.seq_len)
    held = open_heldout(name, tokenizer, rows=1, seq_len=plan.seq_len, most_rows=most)
    heldout = [torch.from_numpy(batch.ids) for batch in held.batches]
    dtype = checkpoint.stored_dtype(plan.source)
    with progress("refit", plan.have.layers) as advance:
        for name, tensor in lockstep.tensors(chunks, heldout, lambda done: advance(done, "layers")):
            yield name, tensor.to("cpu", dtype)


def _text(plan: Plan) -> list[Tensor]:
    """Calibration text: chunks of token ids [1, seq_len]."""
    rows = -(-plan.tokens // plan.seq_len)
    tokenizer = checkpoint.load_tokenizer(plan.source)
    text = open_batches(plan.data, tokenizer, rows=rows, seq_len=plan.seq_len, steps=1, seed=plan.seed)
    return [torch.from_numpy(part.ids[:, :-1]) for part in text.batch(0).split(1)]


def _dtype(plan: Plan) -> torch.dtype:
    return checkpoint.stored_dtype(plan.source)
