"""One prune on disk: select what stays, cut, refit, write."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from draftlab import provenance
from draftlab.atomic import check_writable, remove_state
from draftlab.console import is_main_process, note, progress
from draftlab.model import checkpoint, saving
from draftlab.model.hf_files import read_head_ids, write_head_ids
from draftlab.model.shape import Shape
from draftlab.model.trimmed_head import frequent_ids, template_ids
from draftlab.output import Output
from draftlab.pruning import choose
from draftlab.pruning.cut import Cut, Keep, Rotated, keep_all
from draftlab.pruning.importance import Importance, calibrate, load_scores, save_scores
from draftlab.pruning.masks.hard_concrete import Masks
from draftlab.pruning.masks.training import MASKS_FILE, MaskTraining, train_masks
from draftlab.pruning.refit import Agreement, Lockstep, Refit
from draftlab.pruning.source import Source
from draftlab.pruning.texts import Text
from draftlab.pruning.walk import Walk
from draftlab.training.checkpointer import process_state

KEEP_FILE = "keep.json"
GREEDY_TOKENS = 4096

Method = Literal["importance", "random", "first", "magnitude"]
Depth = Literal["influence", "contiguous", "even", "greedy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The parts of the source to keep. weights: the source's in the draft's basis [D, D'], not yet cut."""

    keep: Keep
    basis: Tensor
    weights: Mapping[str, Tensor]
    masks: Masks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedHead:
    """The ids of a draft's head. coverage: see frequent_ids; None: the source's head has these ids."""

    ids: list[int]
    coverage: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedDraft:
    """A finished draft. agreement: with the source on held-out text; None where the draft is the source itself."""

    source: Shape
    shape: Shape
    keep: Keep
    agreement: Agreement | None
    disk_bytes: int
    head: TrimmedHead | None = None  # where it is trimmed


def prune(
    source: Source,
    shape: Shape,
    output: Output,
    *,
    text: Text,
    refit: Refit,
    method: Method = "importance",
    depth: Depth = "influence",
    rotate: bool = True,
    scores_cache: Path | None = None,
) -> PrunedDraft:
    """Write the draft that importance scores or a baseline select.

    Weights keep the source's dtype: with the source's own shape they are the source's bits. rotate: turn the residual
    stream to its principal directions before its width is cut, unless the head is tied to the embedding.
    """
    output.check_space(shape.weight_bytes(source.stored_dtype.itemsize), "the draft")
    head = _head(source, shape, text)
    if shape.with_whole_head() == source.shape.with_whole_head():
        return _copy(source, shape, output, text, head)
    tokenizer = checkpoint.load_tokenizer(source.directory)
    heldout = text.heldout(tokenizer)
    seq_len = heldout[0].shape[1] - 1
    chunks = text.chunks(tokenizer, seq_len) if method == "importance" or refit.fits else []
    if method == "importance":
        importance = _importance(source, text, chunks, scores_cache)
        layers = _layers(source, shape, importance, depth, chunks[: max(1, GREEDY_TOKENS // text.seq_len)])
        selection = _most_active(source, shape, importance, layers, rotate=rotate and not source.shape.tied)
    else:
        scores = _baseline_scores(source, method, text.seed)
        keep = choose.choose(scores, source.shape, shape, choose.top(scores.layers, shape.layers))
        selection = _unrotated(source, keep)
    return _write_draft(source, shape, output, selection, refit, head, text, chunks, heldout)


def prune_by_masks(
    source: Source, shape: Shape, output: Output, *, text: Text, refit: Refit, training: MaskTraining
) -> PrunedDraft:
    """Write the draft that trained masks cut out; several processes may train them. A killed run resumes.

    Raises:
        UserError: see train_masks.
    """
    output.check_space(shape.weight_bytes(source.stored_dtype.itemsize), "the draft")
    head = _head(source, shape, text)
    if shape.with_whole_head() == source.shape.with_whole_head():
        return _copy(source, shape, output, text, head)
    tokenizer = checkpoint.load_tokenizer(source.directory)
    heldout = text.heldout(tokenizer)
    chunks = text.chunks(tokenizer, heldout[0].shape[1] - 1) if refit.fits else []
    with process_state().main_process_first():
        output.claim_state([source.directory])
    trained = train_masks(source, shape, text, training, output.state)
    selection = Selection(keep=trained.keep, basis=trained.basis, weights=trained.weights, masks=trained.masks)
    if not is_main_process():
        return PrunedDraft(source=source.shape, shape=shape, keep=trained.keep, agreement=None, disk_bytes=0)
    pruned = _write_draft(source, shape, output, selection, refit, head, text, chunks, heldout)
    remove_state(output.state)
    return pruned


def _head(source: Source, shape: Shape, text: Text) -> TrimmedHead | None:
    """Return the head to write, None for one of all ids. Raises UserError: see frequent_ids."""
    vocab = source.shape.vocab
    if shape.draft_vocab is None:
        return None
    if (ids := read_head_ids(source.directory, vocab)) is not None:
        return TrimmedHead(ids=ids, coverage=None)
    tokenizer = checkpoint.load_tokenizer(source.directory)
    if text.outputs is None:
        note(f"counting ids in {text.data}; the target's own answers (--outputs) say it better")
    special = template_ids(tokenizer) | set(checkpoint.eos_token_ids(source.directory))
    ids, coverage = frequent_ids(text.counted(tokenizer), shape.draft_vocab, vocab, special)
    return TrimmedHead(ids=ids, coverage=coverage)


def _copy(source: Source, shape: Shape, output: Output, text: Text, head: TrimmedHead | None) -> PrunedDraft:
    keep = keep_all(source.shape)
    with output.directory() as work:
        (work / KEEP_FILE).write_text(keep.model_dump_json())
        weights = source.with_head(checkpoint.Weights(source.directory)).items()
        size = saving.write_checkpoint(work, source.config_for(shape), iter(weights), source.directory)
        output.record(work, _inputs(source, text), params=shape.params(), **_write_head(work, head))
    return PrunedDraft(source=source.shape, shape=shape, keep=keep, agreement=None, disk_bytes=size, head=head)


def _inputs(source: Source, text: Text) -> list[Path]:
    return [source.directory] if text.outputs is None else [source.directory, text.outputs]


def _write_head(work: Path, head: TrimmedHead | None) -> dict[str, object]:
    """Write the ids of a trimmed head; return what to record."""
    if head is None:
        return {}
    write_head_ids(work, head.ids)
    return {"draft_vocab": len(head.ids), "coverage": head.coverage}


def _write_draft(
    source: Source,
    shape: Shape,
    output: Output,
    selection: Selection,
    refit: Refit,
    head: TrimmedHead | None,
    text: Text,
    chunks: list[Tensor],
    heldout: list[Tensor],
) -> PrunedDraft:
    keep = selection.keep
    draft_config = source.config_for(shape, keep.layers)
    draft = Walk(Cut(selection.weights, shape, keep), draft_config, source.dtype, source.device)
    head_ids = None if head is None else head.ids
    lockstep = Lockstep(source.walk(), draft, layers=keep.layers, basis=selection.basis, refit=refit, head_ids=head_ids)
    with output.directory() as work, progress("refit", source.shape.layers) as advance:
        (work / KEEP_FILE).write_text(keep.model_dump_json())
        tensors = lockstep.tensors(chunks, heldout, lambda done: advance(done, "layers"))
        stored = ((name, tensor.to("cpu", source.stored_dtype)) for name, tensor in tensors)
        size = saving.write_checkpoint(work, draft_config, stored, source.directory)
        if selection.masks is not None:
            (work / MASKS_FILE).parent.mkdir()
            selection.masks.save(work / MASKS_FILE)
        agreement = lockstep.agreement
        notes = {"params": shape.params(), "agreement": asdict(agreement) if agreement else None}
        notes |= _write_head(work, head)
        output.record(work, _inputs(source, text), **notes)
    return PrunedDraft(source=source.shape, shape=shape, keep=keep, agreement=agreement, disk_bytes=size, head=head)


def _unrotated(source: Source, keep: Keep) -> Selection:
    return Selection(keep=keep, basis=torch.eye(source.shape.hidden)[:, keep.hidden], weights=source.weights)


def _most_active(source: Source, shape: Shape, importance: Importance, layers: list[int], *, rotate: bool) -> Selection:
    keep = choose.choose(importance.scores, source.shape, shape, layers)
    if not rotate or shape.hidden == source.shape.hidden:
        return _unrotated(source, keep)
    rotation, _ = importance.principal(shape.hidden, source.device)
    keep = keep.model_copy(update={"hidden": list(range(shape.hidden))})
    rotated = Rotated(source.weights, source.shape, rotation.to(source.device))
    return Selection(keep=keep, basis=rotation, weights=rotated)


def _layers(source: Source, shape: Shape, importance: Importance, depth: Depth, few: list[Tensor]) -> list[int]:
    """Return the layers to keep. few: chunks of text to drop layers greedily on."""
    count, total = shape.layers, source.shape.layers
    if depth == "contiguous":
        return choose.contiguous(importance, count)
    if depth == "even":
        return choose.even(total, count)
    if depth == "influence" or count == total:
        return choose.influential(importance, count)
    with progress("drop layers", total - count) as advance:
        return choose.greedy(source.walk(resident=True), few, count, lambda done: advance(done, f"of {total}"))


def _baseline_scores(source: Source, method: Method, seed: int) -> choose.Scores:
    if method == "random":
        return choose.random_scores(source.shape, seed)
    if method == "first":
        return choose.first_scores(source.shape)
    return choose.magnitude_scores(source.weights, source.shape)


def _importance(source: Source, text: Text, chunks: list[Tensor], file: Path | None) -> Importance:
    """Return the scores in a file of them, or computed, and kept there if it is named."""
    facts = {
        "source": provenance.fingerprint(source.directory) if file else "",
        "data": provenance.fingerprint(text.outputs) if text.outputs else text.data,
        "tokens": str(text.tokens),
        "seq_len": str(text.seq_len),
        "seed": str(text.seed),
    }
    if file is not None and file.exists():
        return load_scores(file, facts)
    if file is not None:
        check_writable(file)
    with progress("calibrate", source.shape.layers) as advance:
        importance = calibrate(source.walk(), source.shape, chunks, lambda done: advance(done, "layers"))
    if file is not None:
        save_scores(importance, file, facts)
    return importance
