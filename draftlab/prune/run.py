"""One prune on disk: select what stays, cut, refit, write."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftlab import provenance
from draftlab.atomic import check_writable, remove_state, removed_if_unused
from draftlab.config.prune import CutConfig, PruneConfig, PruneMasksConfig
from draftlab.console import is_main_process, note, progress
from draftlab.data import open_batches, open_heldout
from draftlab.distill import distributed
from draftlab.distill.checkpointer import process_state
from draftlab.errors import UserError
from draftlab.model import checkpoint, saving
from draftlab.model.head_ids import read_head_ids, write_head_ids
from draftlab.model.shape import Shape
from draftlab.model.trimmed_head import frequent_ids, template_ids
from draftlab.output import Output
from draftlab.prune import choose
from draftlab.prune.cut import Cut, Keep, Rotated, keep_all
from draftlab.prune.importance import Importance, calibrate, load_scores, save_scores
from draftlab.prune.masks.hard_concrete import Masks
from draftlab.prune.masks.training import MASKS_FILE, train_masks
from draftlab.prune.refit import Agreement, Lockstep
from draftlab.prune.source import HELDOUT_TOKENS, Source, open_source
from draftlab.prune.walk import Walk
from draftlab.target_outputs.outputs import TargetOutput
from draftlab.target_outputs.store import HELDOUT, read_texts

KEEP_FILE = "keep.json"
GREEDY_TOKENS = 4096
LEAST_TOKENS = 32  # of held-out text, to compare the draft with its source on
COUNTED_TOKENS = 2_000_000  # of text, to choose the ids of a head
HELDOUT_SHARE = 16  # one in so many stored texts, where the store holds out none


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The parts of the source to keep. weights: the source's in the draft's basis [D, D'], not yet cut."""

    keep: Keep
    basis: Tensor
    weights: Mapping[str, Tensor]
    masks: Masks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The ids of a draft's head. coverage: see frequent_ids; None: the source's head has these ids."""

    ids: list[int]
    coverage: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """A finished draft. agreement: with the source on held-out text; None where the draft is the source itself."""

    source: Shape
    shape: Shape
    keep: Keep
    agreement: Agreement | None
    disk_bytes: int
    head: Head | None = None  # where it is trimmed


def prune(config: PruneConfig, output: Output) -> Pruned:
    """Write the draft that importance scores or a baseline select.

    Weights keep the source's dtype: with the source's own shape they are the source's bits.

    Raises:
        UserError: see open_source; a tied source where a rotation is asked for.
    """
    source, shape = open_source(config)
    output.check_space(shape.weight_bytes(source.stored_dtype.itemsize), "the draft")
    if config.basis == "pca" and source.shape.tied:
        raise UserError("--basis pca moves the last norm into the head, and this source ties it; add --untie")
    head = _head(config, source, shape)
    if shape.with_whole_head() == source.shape.with_whole_head():
        return _copy(config, output, source, shape, head)
    heldout = _heldout_text(config, source)
    chunks = _calibration_text(config, source, heldout[0].shape[1] - 1)
    if config.method == "activation":
        selection = _most_active(config, source, shape, chunks)
    else:
        scores = _baseline_scores(config, source)
        keep = choose.choose(scores, source.shape, shape, choose.top(scores.layers, shape.layers))
        selection = Selection(keep=keep, basis=torch.eye(source.shape.hidden)[:, keep.hidden], weights=source.weights)
    return _write_draft(config, output, source, shape, selection, head, chunks, heldout)


def prune_masks(config: PruneMasksConfig, output: Output) -> Pruned:
    """Write the draft that trained masks cut out; several processes may train them. A killed run resumes.

    Raises:
        UserError: see open_source and train_masks.
    """
    distributed.check(masks=True)
    source, shape = open_source(config)
    output.check_space(shape.weight_bytes(source.stored_dtype.itemsize), "the draft")
    head = _head(config, source, shape)
    if shape.with_whole_head() == source.shape.with_whole_head():
        return _copy(config, output, source, shape, head)
    heldout = _heldout_text(config, source)
    chunks = _calibration_text(config, source, heldout[0].shape[1] - 1)
    with removed_if_unused(output.state):
        with process_state().main_process_first():
            output.claim_state([source.directory])
        trained = train_masks(config, source, shape, output)
    selection = Selection(keep=trained.keep, basis=trained.basis, weights=trained.weights, masks=trained.masks)
    if not is_main_process():
        return Pruned(source=source.shape, shape=shape, keep=trained.keep, agreement=None, disk_bytes=0)
    pruned = _write_draft(config, output, source, shape, selection, head, chunks, heldout)
    remove_state(output.state)
    return pruned


def _head(config: CutConfig, source: Source, shape: Shape) -> Head | None:
    """Return the head to write, None for one of all ids.

    Raises:
        UserError: see frequent_ids; or outputs of another vocabulary.
    """
    vocab = source.shape.vocab
    if shape.draft_vocab is None:
        return None
    if (ids := read_head_ids(source.directory, vocab)) is not None:
        return Head(ids=ids, coverage=None)
    tokenizer = checkpoint.load_tokenizer(source.directory)
    if config.outputs is not None:
        texts = [output.ids for output in source.texts]
    else:
        note(f"counting ids in {config.data}; the target's own answers (--outputs) say it better")
        text = open_batches(config.data, tokenizer, rows=1, seq_len=COUNTED_TOKENS, steps=1, seed=0)
        streams = text.streams.values()
        texts = [part for ids in streams for part in np.array_split(ids, max(2, len(ids) // 512))]
    special = template_ids(tokenizer) | set(checkpoint.eos_token_ids(source.directory))
    ids, coverage = frequent_ids(texts, shape.draft_vocab, vocab, special)
    return Head(ids=ids, coverage=coverage)


def _copy(config: CutConfig, output: Output, source: Source, shape: Shape, head: Head | None) -> Pruned:
    keep = keep_all(source.shape)
    with output.directory() as work:
        (work / KEEP_FILE).write_text(keep.model_dump_json())
        weights = source.with_head(checkpoint.Weights(source.directory)).items()
        size = saving.write_checkpoint(work, source.config_for(shape), iter(weights), source.directory)
        output.record(work, _inputs(config, source), params=shape.params(), **_write_head(work, head))
    return Pruned(source=source.shape, shape=shape, keep=keep, agreement=None, disk_bytes=size, head=head)


def _inputs(config: CutConfig, source: Source) -> list[Path]:
    return [source.directory] if config.outputs is None else [source.directory, config.outputs]


def _write_head(work: Path, head: Head | None) -> dict[str, object]:
    """Write the ids of a trimmed head; return what to record."""
    if head is None:
        return {}
    write_head_ids(work, head.ids)
    return {"draft_vocab": len(head.ids), "coverage": head.coverage}


def _write_draft(
    config: CutConfig,
    output: Output,
    source: Source,
    shape: Shape,
    selection: Selection,
    head: Head | None,
    chunks: list[Tensor],
    heldout: list[Tensor],
) -> Pruned:
    keep = selection.keep
    draft_config = source.config_for(shape, keep.layers)
    draft = Walk(Cut(selection.weights, shape, keep), draft_config, source.dtype, source.device)
    lockstep = Lockstep(
        source.walk(), draft, layers=keep.layers, basis=selection.basis, settings=config,
        head_ids=None if head is None else head.ids,
    )  # fmt: skip
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
        output.record(work, _inputs(config, source), **notes)
    return Pruned(source=source.shape, shape=shape, keep=keep, agreement=agreement, disk_bytes=size, head=head)


def _most_active(config: PruneConfig, source: Source, shape: Shape, chunks: list[Tensor]) -> Selection:
    importance = _importance(config, source, chunks)
    keep = choose.choose(importance.scores, source.shape, shape, _layers(config, source, shape, importance, chunks))
    rotated = config.basis == "pca" or (config.basis == "auto" and not source.shape.tied)
    if not rotated or shape.hidden == source.shape.hidden:
        return Selection(keep=keep, basis=torch.eye(source.shape.hidden)[:, keep.hidden], weights=source.weights)
    rotation, _ = importance.principal(shape.hidden, source.device)
    keep = keep.model_copy(update={"hidden": list(range(shape.hidden))})
    rotated = Rotated(source.weights, source.shape, rotation.to(source.device))
    return Selection(keep=keep, basis=rotation, weights=rotated)


def _layers(
    config: PruneConfig, source: Source, shape: Shape, importance: Importance, chunks: list[Tensor]
) -> list[int]:
    count, total = shape.layers, source.shape.layers
    if config.depth == "contiguous":
        return choose.contiguous(importance, count)
    if config.depth == "even":
        return choose.even(total, count)
    if config.depth == "influence" or count == total:
        return choose.influential(importance, count)
    with progress("drop layers", total - count) as advance:
        few = chunks[: max(1, GREEDY_TOKENS // config.seq_len)]
        return choose.greedy(source.walk(resident=True), few, count, lambda done: advance(done, f"of {total}"))


def _baseline_scores(config: PruneConfig, source: Source) -> choose.Scores:
    if config.method == "random":
        return choose.random_scores(source.shape, config.seed)
    if config.method == "first":
        return choose.first_scores(source.shape)
    return choose.magnitude_scores(source.weights, source.shape)


def _importance(config: PruneConfig, source: Source, chunks: list[Tensor]) -> Importance:
    file = config.scores_cache
    facts = {
        "source": provenance.fingerprint(source.directory) if file else "",
        "data": provenance.fingerprint(config.outputs) if config.outputs else config.data,
        "tokens": str(config.calibration_tokens),
        "seq_len": str(config.seq_len),
        "seed": str(config.seed),
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


def _calibration_text(config: PruneConfig | PruneMasksConfig, source: Source, seq_len: int) -> list[Tensor]:
    """Return chunks of token ids [1, seq_len], as long as those of held-out text."""
    if not config.calibrates:
        return []
    rows = -(-config.calibration_tokens // seq_len)
    if config.outputs is not None:
        own = (config.outputs / HELDOUT).exists()
        texts = [text for i, text in enumerate(_whole(source.texts)) if own or i % HELDOUT_SHARE]
        return _chunks(texts, rows, seq_len, config.seed)
    tokenizer = checkpoint.load_tokenizer(source.directory)
    text = open_batches(config.data, tokenizer, rows=rows, seq_len=seq_len, steps=1, seed=config.seed)
    available = sum((len(stream) - 1) // seq_len for stream in text.streams.values())
    if 0 < available < rows:
        tokens = f"{available * seq_len:,} of {config.calibration_tokens:,} tokens"
        note(f"data {config.data!r} has {tokens} to calibrate on")
        text = replace(text, rows=available)
    return [torch.from_numpy(part.ids[:, :-1]) for part in text.batch(0).split(1)]


def _heldout_text(config: CutConfig, source: Source) -> list[Tensor]:
    """Return chunks of token ids [1, seq_len + 1], shorter where there is less text."""
    rows = max(1, HELDOUT_TOKENS // config.seq_len)
    if config.outputs is not None:
        own = config.outputs / HELDOUT
        texts = _whole(read_texts(own)) if own.exists() else _whole(source.texts)[::HELDOUT_SHARE]
        return _chunks(texts, rows, config.seq_len + 1, seed=0)
    tokenizer = checkpoint.load_tokenizer(source.directory)
    text = open_heldout(config.data, tokenizer, rows=1, seq_len=config.seq_len, most_rows=rows, least=LEAST_TOKENS)
    return [torch.from_numpy(batch.ids) for batch in text.batches]


def _whole(outputs: list[TargetOutput]) -> list[np.ndarray]:
    """Return prompts with the target's answers, in the order of their numbers."""
    ordered = sorted(outputs, key=lambda output: output.number)
    return [np.concatenate([output.prompt, output.ids]).astype(np.int64) for output in ordered]


def _chunks(texts: list[np.ndarray], rows: int, length: int, seed: int) -> list[Tensor]:
    """Return at most so many chunks [1, length] of texts in random order, joined, and repeated if too short for one."""
    order = np.random.default_rng(seed).permutation(len(texts))
    ids = np.concatenate([texts[i] for i in order])
    ids = ids if len(ids) >= length else np.resize(ids, length)
    return [torch.from_numpy(row[None]) for row in ids[: len(ids) // length * length].reshape(-1, length)[:rows]]
