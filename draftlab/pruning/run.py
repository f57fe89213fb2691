"""Prune from start to end: calibrate, select what to keep, cut, refit, compare with the source, and write the draft."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftlab.console import note, progress
from draftlab.data import open_batches, open_heldout
from draftlab.inputs import text_inputs
from draftlab.model import checkpoint, saving
from draftlab.model.devices import free_bytes
from draftlab.model.hf_files import read_head_ids, write_head_ids
from draftlab.model.shape import Shape
from draftlab.model.trimmed_head import frequent_ids
from draftlab.output import Output
from draftlab.pruning import choose
from draftlab.pruning.cut import Cut, Keep, Rotated, keep_all
from draftlab.pruning.importance import CONTENT, Calibration, calibrate, load_scores, save_scores
from draftlab.pruning.refit import Agreement, Lockstep, Refit
from draftlab.pruning.source import Source
from draftlab.pruning.walk import Walk
from draftlab.runs import provenance
from draftlab.runs.atomic import check_writable
from draftlab.target_outputs.outputs import heldout_numbers
from draftlab.target_outputs.store import heldout_part, read_texts
from draftlab.training.vocabulary import special_ids

HELDOUT_TOKENS = 4096  # most held-out tokens on which draft and source are compared
LEAST_TOKENS = 32  # fewest held-out tokens on which draft and source are compared
# share of the stored texts that is held out if the store has no held-out texts
HELDOUT_SHARE = 1 / 16
COUNTED_TOKENS = 2_000_000  # most tokens that are counted to find the frequent ids of a trimmed head


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The text for calibration and refit: a mixture of data sources, or stored outputs of the target.

    Attributes:
        data: The mixture, as in "a=0.7,b=0.3".
        outputs: Directory of stored target outputs, which are used in place of `data`.
        tokens: Number of tokens to calibrate on.
    """

    data: str
    outputs: Path | None = None
    tokens: int = 32768
    seq_len: int = 512
    seed: int = 0

    def chunks(self, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> list[Tensor]:
        """Return chunks of token ids to calibrate on, [1, seq_len] each."""
        rows = -(-self.tokens // seq_len)
        if self.outputs is not None:
            texts = _stored_texts(self.outputs, heldout=False)
            return joined(texts, rows, seq_len, self.seed)
        text = open_batches(self.data, tokenizer, rows=rows, seq_len=seq_len, steps=1, seed=self.seed)
        available = sum((len(stream) - 1) // seq_len for stream in text.streams.values())
        if 0 < available < rows:
            note(
                f"--data {self.data} has only {available * seq_len:,} tokens for calibration, and all of them are "
                f"used; --calibration-tokens is {self.tokens:,}"
            )
            text = replace(text, rows=available)
        return [torch.from_numpy(part.ids[:, :-1]) for part in text.batch(0).split(1)]

    def heldout(self, tokenizer: PreTrainedTokenizerBase) -> list[Tensor]:
        """Return chunks of held-out token ids, [1, seq_len + 1] each.

        If a data source has less held-out text than a chunk, return one shorter chunk.

        Raises:
            UserError: The held-out text of the data source is too short.
        """
        rows = max(1, HELDOUT_TOKENS // self.seq_len)
        if self.outputs is not None:
            texts = _stored_texts(self.outputs, heldout=True)
            return joined(texts, rows, self.seq_len + 1, seed=0)
        text = open_heldout(self.data, tokenizer, rows=1, seq_len=self.seq_len, most_rows=rows, least=LEAST_TOKENS)
        return [torch.from_numpy(batch.ids) for batch in text.batches]

    def counted(self, tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
        """Return the token ids of each text in which the ids for a trimmed head are counted."""
        if self.outputs is not None:
            return [output.ids for output in read_texts(self.outputs)]
        text = open_batches(self.data, tokenizer, rows=1, seq_len=COUNTED_TOKENS, steps=1, seed=0)
        parts: list[np.ndarray] = []
        for ids in text.streams.values():
            parts += np.array_split(ids, max(2, len(ids) // 512))
        return parts


def joined(texts: list[np.ndarray], rows: int, length: int, seed: int) -> list[Tensor]:
    """Join texts in random order, and return at most `rows` chunks of token ids, [1, length] each.

    If all texts together are shorter than one chunk, they are repeated to fill it.
    """
    order = np.random.default_rng(seed).permutation(len(texts))
    ids = np.concatenate([texts[i] for i in order])
    ids = ids if len(ids) >= length else np.resize(ids, length)
    return [torch.from_numpy(row[None]) for row in ids[: len(ids) // length * length].reshape(-1, length)[:rows]]


def _stored_texts(directory: Path, *, heldout: bool) -> list[np.ndarray]:
    """Return the token ids of each prompt and its answer, joined, in the order of the prompt numbers.

    heldout: Whether to return the held-out texts, or all texts except these.
    """
    own = heldout_part(directory)
    part = own if heldout and own is not None else directory
    ordered = sorted(read_texts(part), key=lambda output: output.number)
    texts = [np.concatenate([output.prompt, output.ids]).astype(np.int64) for output in ordered]
    if own is not None:
        return texts
    apart = set(heldout_numbers(ordered, HELDOUT_SHARE))
    return [text for i, text in enumerate(texts) if (i in apart) == heldout]


KEEP_FILE = "keep.json"

Method = Literal["importance", "random", "first"]
Depth = Literal["influence", "even"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadIds:
    """The token ids of a trimmed head, which can propose only these ids.

    coverage: Share of the text's tokens that are among the ids (see frequent_ids). None if the source already has a
    trimmed head, whose ids the draft keeps.
    """

    ids: list[int]
    coverage: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedDraft:
    """The result of pruning.

    Attributes:
        source, shape: Shapes of the source and of the draft.
        keep: Indices of the source that the draft keeps.
        agreement: Comparison with the source on held-out text. None if the draft is a copy of the source.
        disk_bytes: Size of the draft's weights on disk.
        head: Token ids of a trimmed head. None for a complete head.
    """

    source: Shape
    shape: Shape
    keep: Keep
    agreement: Agreement | None
    disk_bytes: int
    head: HeadIds | None = None


@dataclass(frozen=True, kw_only=True)
class Prune:
    """The pruning of a source to a smaller shape. The draft is stored in the dtype of the source.

    If both shapes are equal, the draft is an exact copy of the source's weights.
    """

    source: Source
    shape: Shape
    output: Output
    text: Text
    refit: Refit

    def by_scores(
        self,
        method: Method = "importance",
        depth: Depth = "influence",
        *,
        rotate: bool = True,
        scores_cache: Path | None = None,
    ) -> PrunedDraft:
        """Select what to keep by importance or by a baseline's scores, and write the draft.

        Args:
            method: Source of the scores. All except "importance" are baselines.
            depth: Whether "importance" keeps the most influential layers or evenly spaced layers.
            rotate: Whether to rotate the residual stream to its principal directions before cutting the width. A model
                with tied embeddings is never rotated.
            scores_cache: File with the importance. If the file does not exist, this run writes it for later runs.
        """
        self.check()
        if self.is_copy:
            return self.copy()
        source = self.source
        have = self.source.shape
        shape = self.shape
        if method != "importance":
            scores = choose.first_scores(have)
            if method == "random":
                scores = choose.random_scores(have, self.text.seed)
            layers = choose.top(scores.layers, shape.layers)
            keep = choose.choose(scores, have, shape, layers)
            return self.write(keep, torch.eye(have.hidden)[:, keep.hidden], source.weights)

        def chosen(scores: Tensor, count: int) -> list[int]:
            if depth == "even":
                return choose.even(have.layers, shape.layers)[:count]
            return choose.influential(scores, count)

        calibration = self._calibration(scores_cache, chosen)
        importance = calibration.importance
        streams = calibration.streams
        keep = choose.choose(importance, have, shape, chosen(importance.layers, shape.layers))
        if not rotate or have.tied or shape.hidden == have.hidden:
            basis = torch.eye(have.hidden)[:, keep.hidden]
            return self.write(keep, basis, source.weights, streams)
        rotation = importance.principal(shape.hidden, source.device)
        keep = keep.model_copy(update={"hidden": list(range(shape.hidden))})
        rotated = Rotated(source.weights, have, rotation.to(source.device))
        return self.write(keep, rotation, rotated, streams)

    @property
    def is_copy(self) -> bool:
        """Return whether draft and source have the same shape, apart from a trimmed head."""
        return self.shape.with_whole_head() == self.source.shape.with_whole_head()

    def check(self) -> None:
        """Hash the inputs, and check that disk and text suffice, before work that may take hours.

        Raises:
            UserError: An input cannot be read, or there is too little space on the disk or too little held-out text.
        """
        self.output.inputs([self.source.directory])
        self.output.check_space(self.shape.weight_bytes(self.source.stored_dtype.itemsize), "the draft")
        # open the text now, so that its errors come before hours of calibration or training
        _ = self._head if self.is_copy else (self._head, self._heldout)

    def copy(self) -> PrunedDraft:
        """Write the source's weights as the draft, unchanged, except that the head may be made separate or trimmed."""
        source = self.source
        keep = keep_all(self.source.shape)
        with self.output.directory() as work:
            weights = source.with_head(checkpoint.Weights(source.directory)).items()
            size = saving.write_checkpoint(work, source.config_for(self.shape), iter(weights), source.directory)
            return self._record(work, keep, size, None)

    def write(
        self,
        keep: Keep,
        basis: Tensor,
        weights: Mapping[str, Tensor],
        streams: Mapping[int, list[Tensor]] | None = None,
        **facts: object,
    ) -> PrunedDraft:
        """Cut the selected parts from the source, refit the draft, and write it.

        Args:
            keep: Indices of the source to keep.
            basis: Map from the source's residual stream to the draft's, [source's hidden size, draft's hidden size].
            weights: The source's weights before the cut. They may be rotated or multiplied by masks.
            streams: Residual streams of the source that are known, as in Lockstep.
            facts: Further notes for draftlab.json.
        """
        source = self.source
        head = self._head
        draft_config = source.config_for(self.shape, keep.layers)
        draft = Walk(
            Cut(weights, self.shape, keep),
            draft_config,
            source.dtype,
            source.device,
            stored=source.stored_dtype,
        )
        lockstep = Lockstep(
            self._walk,
            draft,
            layers=keep.layers,
            basis=basis,
            refit=self.refit,
            head_ids=head.ids if head else None,
            streams=streams,
        )
        chunks = self._chunks if self.refit.fits else []
        with (
            self.output.directory() as work,
            progress("refitting layers", source.shape.layers) as advance,
        ):
            tensors = lockstep.tensors(chunks, self._heldout, lambda done: advance(done, "layers"))
            stored = ((name, tensor.to("cpu", source.stored_dtype)) for name, tensor in tensors)
            size = saving.write_checkpoint(work, draft_config, stored, source.directory)
            return self._record(work, keep, size, lockstep.agreement, **facts)

    @cached_property
    def _walk(self) -> Walk:
        return self.source.walk()

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return self.source.checkpoint.tokenizer

    @cached_property
    def _heldout(self) -> list[Tensor]:
        return self.text.heldout(self._tokenizer)

    @cached_property
    def _chunks(self) -> list[Tensor]:
        return self.text.chunks(self._tokenizer, self._heldout[0].shape[1] - 1)

    @cached_property
    def _head(self) -> HeadIds | None:
        """Return the token ids of the draft's trimmed head, or None for a complete head.

        Raises:
            UserError: The token ids cannot be chosen (see frequent_ids).
        """
        directory = self.source.directory
        vocab = self.source.shape.vocab
        if self.shape.draft_vocab is None:
            return None
        if (ids := read_head_ids(directory, vocab)) is not None:
            return HeadIds(ids=ids, coverage=None)
        if self.text.outputs is None:
            note(
                f"lm_head keeps the most frequent token ids of {self.text.data}; the most frequent ids of the target's "
                "answers fit better: add --outputs DIRECTORY"
            )
        ids, coverage = frequent_ids(
            self.text.counted(self._tokenizer),
            self.shape.draft_vocab,
            vocab,
            special_ids(directory),
        )
        return HeadIds(ids=ids, coverage=coverage)

    def _record(self, work: Path, keep: Keep, size: int, agreement: Agreement | None, **facts: object) -> PrunedDraft:
        """Write draftlab.json, the kept indices and the ids of a trimmed head. Return the result of pruning."""
        (work / KEEP_FILE).write_text(keep.model_dump_json())
        notes: dict[str, object] = {"params": self.shape.params(), **facts}
        if agreement is not None:
            notes["agreement"] = asdict(agreement)
        if self._head is not None:
            write_head_ids(work, self._head.ids)
            notes |= {"draft_vocab": len(self._head.ids), "coverage": self._head.coverage}
        self.output.record(work, **notes)
        return PrunedDraft(
            source=self.source.shape,
            shape=self.shape,
            keep=keep,
            agreement=agreement,
            disk_bytes=size,
            head=self._head,
        )

    def _calibration(self, file: Path | None, chosen: Callable[[Tensor, int], Sequence[int]]) -> Calibration:
        """Return how important each layer, hidden dimension, head and FFN neuron of the source is.

        Args:
            file: If this file exists, the importance is read from it. Otherwise the importance is computed, and written
                to this file. With None, the importance is computed and not stored.
            chosen: Function that returns a number of layers to keep, from the scores of layers.
        """
        if file is None:
            have = self.source.shape
            shape = self.shape
            widths = ((s.hidden, s.heads, s.kv_heads, s.ffn) for s in (have, shape))
            return self._calibrated(chosen, width=len({*widths}) > 1)
        text = self.text
        if text.outputs is None:
            read = text_inputs(text.data)
        else:
            read = {str(text.outputs): provenance.fingerprint(text.outputs)}
        facts = {
            "source": provenance.fingerprint(self.source.directory),
            "data": str(text.outputs or text.data),
            **{CONTENT + name: sha256 for name, sha256 in read.items()},
            "tokens": str(text.tokens),
            "seq_len": str(text.seq_len),
            "seed": str(text.seed),
        }
        if file.exists():
            return Calibration(importance=load_scores(file, facts), streams={})
        check_writable(file)
        calibration = self._calibrated(chosen, width=True)
        save_scores(calibration.importance, file, facts)
        return calibration

    def _calibrated(self, chosen: Callable[[Tensor, int], Sequence[int]], *, width: bool) -> Calibration:
        source = self.source
        most = 0
        heldout = self._heldout if self.refit.fits else []
        if heldout:  # the refit reads the same text: streams before its layers may take half of the free memory
            tokens = sum(chunk.shape[1] for chunk in [*self._chunks, *heldout])
            stream = tokens * source.shape.hidden * source.pass_dtype.itemsize
            most = min(self.shape.layers, int(free_bytes(source.device) / 2 // stream))
        with progress("calibrating layers", source.shape.layers) as advance:
            return calibrate(
                self._walk,
                source.shape,
                self._chunks,
                lambda done: advance(done, "layers"),
                heldout=[row[:, :-1] for row in heldout],
                layers=lambda scores: chosen(scores, most),
                width=width,
            )
