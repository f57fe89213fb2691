"""Batches of token ids to train on, held-out windows and prompts. A batch depends only on seed and step.

B rows, T predicted tokens of a row, k listed tokens of a position, N tokens of a stream or windows of a text.
"""

import functools
import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftlab.config.shared import LossOn
from draftlab.console import heartbeat, note
from draftlab.data.rendering import render
from draftlab.data.sources import (
    HELDOUT_SHARE,
    PYTHON_SOURCES,
    Document,
    documents,
    first_source,
    has_conversations,
    heldout_keys,
    parse_mixture,
    settle,
    split_domains,
    unit_hash,
    without_heldout_lines,
)
from draftlab.data.text import chat_ids, note_unread, prompts_of, text_ids, unread_fields
from draftlab.errors import UserError
from draftlab.model.tokenizer import check_embedded


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The target's k most probable tokens at each position: their ids and log-probabilities, both [B, T, k].

    tail: Log-probability of all other tokens together, [B, T].
    """

    ids: np.ndarray
    log_p: np.ndarray
    tail: np.ndarray

    def __getitem__(self, at: slice | np.ndarray | tuple[slice | list[int] | np.ndarray, ...]) -> "TopLogprobs":
        return TopLogprobs(self.ids[at], self.log_p[at], self.tail[at])


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of token ids, [B, T + 1], with a mask, [B, T]. The mask is 1 where the next token is trained on or scored.

    B is the number of rows, T the number of predicted tokens of a row.

    Args:
        top_logprobs: The target's most probable tokens at each position, from stored target outputs.
        positions: Position of each token in its sequence, [B, T], if a row has several sequences.
        depths: Number of tokens that a parallel draft predicts from each position, [B, T]. If None, each position with
            mask 1 predicts its next token.
    """

    ids: np.ndarray
    mask: np.ndarray
    top_logprobs: TopLogprobs | None = None
    positions: np.ndarray | None = None
    depths: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens that a model must read of each of the B rows, [B].

        The model reads the tokens up to the last position with mask 1, and at least one token.
        """
        return np.where(self.mask > 0, np.arange(1, self.mask.shape[1] + 1), 1).max(1)

    @property
    def predictions(self) -> int:
        """Return the number of predictions. With depths, a token counts once for each position that predicts it."""
        return int(self.mask.sum() if self.depths is None else self.depths.sum())

    def predictions_by_offset(self, offsets: int) -> np.ndarray:
        """Return the number of predictions at each offset from 1 to `offsets`, [offsets].

        The offset is the distance in tokens from a position to the predicted token. Without depths, all numbers are
        equal to `predictions`.
        """
        if self.depths is None:
            return np.full(offsets, self.predictions)
        return (self.depths[..., None] > np.arange(offsets)).sum((0, 1))

    def rows(self, index: slice) -> "Batch":
        return self._picked(index, self.mask.shape[1])

    def split(self, rows: int) -> "list[Batch]":
        """Split the batch into batches of at most `rows` rows."""
        return [self.rows(slice(i, i + rows)) for i in range(0, len(self.ids), rows)]

    def packed(self) -> "Batch":
        """Put several short sequences into one row. A row has at most twice the length of the longest sequence.

        Packing does not change the gradient of a model that separates the sequences of a row by their positions.
        """
        needed = self.lengths + 1
        widths = [int(needed.max() * (1 + eighths / 8)) for eighths in range(9)]
        choices = [(_first_fit(needed, width), width) for width in widths]
        rows, width = min(choices, key=lambda choice: len(choice[0]) * choice[1])
        return self if len(rows) == len(self.ids) else self._joined(rows, needed, width)

    def _joined(self, rows: list[list[int]], needed: np.ndarray, width: int) -> "Batch":
        """Return a batch in which each row of `width` tokens has one or more sequences.

        Each padding token is a sequence of its own, at position 0.

        rows: Indices of the sequences of each new row. needed: Number of tokens of each sequence, [B].
        """
        number = np.full((len(rows), width), -1)
        place = np.zeros((len(rows), width), np.int64)
        for row, numbers in enumerate(rows):
            lengths = needed[numbers]
            number[row, : lengths.sum()] = np.repeat(numbers, lengths)
            place[row, : lengths.sum()] = np.concatenate([np.arange(n) for n in lengths])
        ids = np.where(number < 0, 0, self.ids[number, place])
        # a sequence's last token must not predict the first token of the next sequence
        ends = (number < 0) | (place >= needed[number] - 1)
        at = number[:, :-1], place[:, :-1].clip(max=self.mask.shape[1] - 1)
        top = None if self.top_logprobs is None else self.top_logprobs[at]
        return Batch(ids, np.where(ends[:, :-1], 0, self.mask[at]), top, place[:, :-1])

    def parts(self, tokens: int) -> "list[Batch]":
        """Split the batch into parts of at most `tokens` tokens each. A part has rows of similar length.

        If a single row has more tokens, it is a part by itself. With tokens=0, there is a single part.
        """
        return [part for _, part in self.numbered_parts(tokens)]

    def numbered_parts(self, tokens: int) -> "list[tuple[list[int], Batch]]":
        """Return the parts that `parts` returns, each with the indices of its rows in this batch.

        The rows of a part are cut after the last position at which the mask of any row is 1. Mask tokens of a parallel
        draft count towards the limit `tokens`, too.
        """
        lengths = self.lengths
        fed = lengths if self.depths is None else lengths + np.maximum(self.depths - 1, 0).sum(1)
        parts: list[list[int]] = []
        limit = 0  # largest number of rows that the last part may have
        for row in np.argsort(-fed, kind="stable").tolist():
            if parts and (tokens == 0 or len(parts[-1]) < limit):
                parts[-1].append(row)
            else:
                parts.append([row])
                limit = tokens // int(fed[row])
        return [(rows, self._picked(rows, int(lengths[rows].max()))) for rows in parts]

    def _picked(self, rows: list[int] | slice, length: int) -> "Batch":
        at = rows, slice(0, length)
        top = None if self.top_logprobs is None else self.top_logprobs[at]
        positions, depths = (None if x is None else x[at] for x in (self.positions, self.depths))
        ids = self.ids[rows, : length + 1]
        return Batch(ids, self.mask[at], top, positions, depths)

    def shard(self, index: int, count: int) -> "Batch":
        """Return the rows of process `index` out of `count` processes: every count-th row, from row `index` on.

        If there is no row for the process, it gets the first row with a mask of zeros.
        """
        if index < len(self.ids):
            return self.rows(slice(index, None, count))
        spare = self.rows(slice(0, 1))
        depths = None if spare.depths is None else np.zeros_like(spare.depths)
        return replace(spare, mask=np.zeros_like(spare.mask), depths=depths)


def _first_fit(lengths: np.ndarray, width: int) -> list[list[int]]:
    """Assign sequences to rows of `width` tokens by first fit, the longest sequence first.

    lengths: Number of tokens of each sequence, [B].

    Returns: the indices of the sequences of each row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for number in np.argsort(-lengths, kind="stable").tolist():
        row = next((i for i, free in enumerate(room) if free >= lengths[number]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(number)
        room[row] -= int(lengths[number])
    return rows


def text_batch(rows: list[np.ndarray]) -> Batch:
    """Return rows of T + 1 ids each as a batch in which every token after the first is predicted."""
    ids = np.stack(rows).astype(np.int64)
    return Batch(ids, np.ones((len(ids), ids.shape[1] - 1), dtype=np.float32))


def tokenize(docs: list[Document], tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> np.ndarray:
    """Join documents to a stream of at most `limit` token ids, [N]: bos, text, eos, bos, text, ...

    bos is present only if the tokenizer adds it, and eos only if the tokenizer has this token, once. If the tokenizer
    has a chat template, the template renders conversations, and no eos is added to them.

    Texts that the tokenizer cannot encode and conversations that the chat template refuses are left out as bad rows.

    Raises:
        UserError: Too many rows are bad.
    """
    return np.concatenate([ids for _, ids in _tokenized(docs, tokenizer, limit)])[:limit]


def _tokenized(
    docs: list[Document], tokenizer: PreTrainedTokenizerBase, limit: int | None = None
) -> list[tuple[int, np.ndarray]]:
    """Return the number and the ids of each document, see tokenize. The last documents may exceed the limit."""
    parts: list[tuple[int, np.ndarray]] = []
    count = 0
    for start in range(0, len(docs), 64):
        for number, doc in enumerate(docs[start : start + 64], start):
            with doc.rows.leaving_out(doc.name):
                parts.append((number, np.asarray(_ids(doc, tokenizer), dtype=np.uint32)))
                count += len(parts[-1][1]) + 1
        if limit is not None and count >= limit:
            break
    settle(docs, parts)
    return parts


def _ids(doc: Document, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if doc.messages and tokenizer.chat_template:
        return chat_ids(doc.messages, tokenizer, doc.name, reply=False, tools=doc.tools)
    ids = text_ids(doc.text, tokenizer, doc.name)
    eos: Any = tokenizer.eos_token_id
    # some tokenizers add eos themselves
    if eos is None or ids[-1:] == [eos]:
        return ids
    check_embedded([eos], tokenizer, doc.name)
    return [*ids, eos]


@dataclass(frozen=True, slots=True)
class TokenBatches:
    """Batches of a weighted mixture of token streams. A batch depends only on seed and step.

    A source has the same number of rows in every batch: its weight times the batch size, rounded by largest remainder.
    A source is read in a new random order each epoch, and no row repeats within an epoch.

    streams: The N token ids of each source of plain text, [N]. conversations: The rows, with masks, of each source of
    conversations.
    """

    streams: dict[str, np.ndarray]
    weights: dict[str, float]
    rows: int
    seq_len: int
    seed: int
    conversations: dict[str, Batch] = field(default_factory=dict)

    def rows_of(self, weights: dict[str, float] | None = None) -> dict[str, int]:
        """Return the number of rows of each source in a batch. weights: None uses the weights of the mixture."""
        exact = {name: weight * self.rows for name, weight in (weights or self.weights).items()}
        rows = {name: int(value) for name, value in exact.items()}
        missing = self.rows - sum(rows.values())
        for name in sorted(exact, key=lambda n: rows[n] - exact[n])[:missing]:
            rows[name] += 1
        return rows

    def batch(self, step: int) -> Batch:
        return self.picked(places(self.rows_of(), step, dict.fromkeys(self.weights, 0)))

    def picked(self, places: list[tuple[str, int]]) -> Batch:
        """Return a batch of chosen rows. places: Source and index of each row."""
        parts = [self._row(*place) for place in places]
        return Batch(np.concatenate([p.ids for p in parts]), np.concatenate([p.mask for p in parts]))

    def _row(self, name: str, index: int) -> Batch:
        """Return a batch of a single row.

        index: Number of rows of this source that were read before, in all epochs.

        Raises:
            UserError: The source has fewer tokens than a row.
        """
        if name in self.conversations:
            talks = self.conversations[name]
            row = self._permuted(name, index, len(talks.ids))
            return talks.rows(slice(row, row + 1))
        stream = self.streams[name]
        chunks = (len(stream) - 1) // self.seq_len
        if chunks < 1:
            raise UserError(
                f"data {name!r}: the source has only {len(stream)} tokens, but a sequence needs more than "
                f"{self.seq_len}; add text, or lower --seq-len"
            )
        start = self._permuted(name, index, chunks) * self.seq_len
        return text_batch([stream[start : start + self.seq_len + 1]])

    def _permuted(self, name: str, index: int, n: int) -> int:
        """Return which of the n rows of a source is read after `index` other rows.

        The rows of an epoch are permuted by an affine map modulo n, whose step and shift are hashes.
        """
        epoch, position = divmod(index, n)
        key = f"{self.seed}:{name}:{epoch}"
        step = int(unit_hash(key + ":step") * n) | 1
        while np.gcd(step, n) != 1:
            step += 2
        return (position * step + int(unit_hash(key + ":shift") * n)) % n


def places(rows: dict[str, int], step: int, read: dict[str, int]) -> list[tuple[str, int]]:
    """Return the source and the index of each row of a step.

    rows: Number of rows of each source in a batch. read: Number of rows of each source that were read before step 0.
    """
    chosen: list[tuple[str, int]] = []
    for name, n in rows.items():
        first = read[name] + step * n
        chosen += [(name, index) for index in range(first, first + n)]
    return chosen


@dataclass(slots=True)
class DynamicBatches:
    """A mixture that gives more rows to the sources whose loss exceeds their reference loss.

    This is the dynamic batch loading of Sheared LLaMA (arXiv 2310.06694, algorithm 1). A batch depends on its step and
    on the weights that were set before this step. The state dict has all earlier weights, so a resumed run reads the
    same text.

    heldout: Held-out batches of each source.
    """

    base: TokenBatches
    heldout: dict[str, list[Batch]]
    reference: dict[str, float]  # expected cross-entropy of each source in nats per token
    every: int  # number of steps between updates of the weights
    # for each phase with the same weights: its first step, weights, and number of rows of each source read before
    phases: list[tuple[int, dict[str, float], dict[str, int]]]

    @classmethod
    def start(
        cls,
        base: TokenBatches,
        heldout: dict[str, list[Batch]],
        reference: dict[str, float],
        every: int,
    ) -> "DynamicBatches":
        return cls(base, heldout, reference, every, [(0, base.weights, dict.fromkeys(base.weights, 0))])

    def batch(self, step: int) -> Batch:
        start, weights, read = next(phase for phase in reversed(self.phases) if phase[0] <= step)
        return self.base.picked(places(self.base.rows_of(weights), step - start, read))

    def reweigh(self, step: int, losses: dict[str, float]) -> None:
        """Multiply each source's weight by exp(max(0, loss - reference)) from `step` on.

        The weights are then scaled to a sum of 1, and mixed with equal weights (1e-4 in total), so no weight becomes 0.

        losses: Held-out cross-entropy of each source in nats per token.
        """
        start, weights, read = self.phases[-1]
        rows = self.base.rows_of(weights)
        scaled = {name: w * math.exp(max(0.0, losses[name] - self.reference[name])) for name, w in weights.items()}
        total = sum(scaled.values())
        floor = 1e-4
        shares = {name: (1 - floor) * w / total + floor / len(scaled) for name, w in scaled.items()}
        read = {name: read[name] + (step - start) * n for name, n in rows.items()}
        self.phases.append((step, shares, read))

    def state_dict(self) -> dict[str, object]:
        return {"phases": self.phases}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.phases = state_dict["phases"]


def first_tokens(source: str, tokenizer: PreTrainedTokenizerBase, count: int) -> np.ndarray:
    """Return the first `count` training tokens of a data source, [N].

    For a mixture, join the first `count` tokens of each source, and return at most 2 * count tokens.
    """
    batches = open_batches(source, tokenizer, rows=1, seq_len=count, steps=1, seed=0)
    return np.concatenate([stream[:count] for stream in batches.streams.values()])[: 2 * count]


def open_batches(
    spec: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rows: int,
    seq_len: int,
    steps: int,
    seed: int,
    loss_on: LossOn | None = None,
    stop_token_ids: Collection[int] = (),
) -> TokenBatches:
    """Return batches of the training text of a mixture.

    Python modules are left out if they copy held-out modules of the standard library, or of the first source.

    Args:
        spec: The mixture, as in "a=0.7,b=0.3".
        rows: Rows per batch.
        steps: Number of batches for which enough text is read. Further batches repeat the text.
        loss_on: Tokens of conversations that count in the loss. Each conversation is then a row. If None, conversations
            are read as plain text.
        stop_token_ids: Ids at which the target stops, in addition to the tokenizer's eos. They count in the loss.

    Raises:
        UserError: A source cannot be read, has no training text, or does not suit the tokenizer or chat template.
    """
    weights = split_domains(parse_mixture(spec))
    # prompts come from the standard library, and held-out windows from the first source
    sources = dict.fromkeys(("stdlib", next(iter(weights))))
    heldout = [
        document
        for source in sources
        if PYTHON_SOURCES.keys() & weights and source in PYTHON_SOURCES
        for document in documents(source, "heldout")
    ]
    streams = {}
    talks = {}
    for name, weight in weights.items():
        needed = int(weight * rows * (seq_len + 1) * steps * 1.1) + 2 * seq_len
        docs = documents(name, "train")
        note_unread((doc.name, doc.unread | unread_fields(doc.messages, doc.tools, tokenizer)) for doc in docs)
        if loss_on is not None and has_conversations(name):
            talks[name], _ = _conversations(name, docs, tokenizer, seq_len, loss_on, stop_token_ids)
        else:
            streams[name] = tokenize(without_heldout_lines(docs, heldout), tokenizer, needed)
    return TokenBatches(streams, weights, rows, seq_len, seed, talks)


def loss_on_of(spec: str, asked: LossOn | None) -> LossOn | None:
    """Return which tokens of conversations count in the loss, or None for data without conversations.

    asked: Value of --loss-on. If None, the assistant's tokens count.

    Raises:
        UserError: `asked` is not None, but no source of the mixture begins with a conversation.
    """
    if any(has_conversations(name) for name in parse_mixture(spec)):
        return asked or "assistant"
    if asked is not None:
        raise UserError(
            f"--loss-on {asked}: data {spec!r} has no conversations (rows of messages); leave --loss-on out"
        )
    return None


def _conversations(
    source: str,
    docs: list[Document],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    loss_on: LossOn,
    stop_token_ids: Collection[int],
) -> tuple[Batch, list[int]]:
    """Return conversations as rows, cut or padded to seq_len + 1 tokens, and the number of each row's document.

    A conversation is left out if none of its tokens counts, or if it is a bad row. Some templates make several rows of
    a conversation (see render).

    Raises:
        UserError: Too many rows are bad, or no conversation has a token that counts in its first seq_len + 1 tokens.
    """
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    numbers: list[int] = []
    for number, doc in enumerate(docs):
        with doc.rows.leaving_out(doc.name):
            talks = render(
                doc.messages,
                tokenizer,
                doc.name,
                loss_on,
                tools=doc.tools,
                stop_token_ids=stop_token_ids,
            )
            rows += [talk.row(seq_len) for talk in talks]
            numbers += [number] * len(talks)
    settle(docs, rows)
    counting = [row for row in rows if row[1].any()]
    numbers = [number for number, row in zip(numbers, rows, strict=True) if row[1].any()]
    if len(counting) < len(rows):
        without = f"{len(rows) - len(counting)} of {len(rows)} conversations"
        note(
            f"data {source!r}: {without} are left out, because the assistant says nothing in their first "
            f"{seq_len} tokens"
        )
    if not counting:
        raise UserError(
            f"data {source!r}: the assistant says nothing in the first {seq_len} tokens of any conversation; raise "
            "--seq-len, or add --text target, so that the target writes the answers"
        )
    batch = Batch(np.stack([ids for ids, _ in counting]), np.stack([mask for _, mask in counting]))
    return batch, numbers


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Windows of held-out text. If the text has conversations, each window is a conversation.

    Neighbouring windows of plain text overlap by one token, so every token except the first is predicted.

    bytes_per_token: Bytes of the text divided by its number of tokens. For conversations, only tokens that count in the
    loss are included, and special tokens have 0 bytes.
    documents: Number of the document in which each window begins, [N]. Windows of one document depend on each other.
    None: it is unknown.
    """

    batches: list[Batch]
    bytes_per_token: float
    documents: list[int] | None = None

    @classmethod
    def of_counted(cls, windows: Batch, tokenizer: PreTrainedTokenizerBase, rows: int) -> "HeldOut":
        """Return windows in batches of `rows`. Only tokens that count are included in bytes_per_token."""
        counted = [ids[1:][mask > 0] for ids, mask in zip(windows.ids, windows.mask, strict=True)]
        text = tokenizer.batch_decode(counted, skip_special_tokens=True)
        size = sum(len(t.encode()) for t in text)
        return cls(windows.split(rows), size / float(windows.mask.sum()))

    @property
    def ids(self) -> np.ndarray:
        """Return the ids of all N windows, [N, T + 1]."""
        return np.concatenate([batch.ids for batch in self.batches])

    @property
    def mask(self) -> np.ndarray:
        """Return the masks of all N windows, [N, T]."""
        return np.concatenate([batch.mask for batch in self.batches])

    def subset(self, count: int) -> "HeldOut":
        """Return at most `count` windows, spread evenly over the text, in a single batch."""
        ids = self.ids
        mask = self.mask
        count = min(count, len(ids))
        chosen = [i * len(ids) // count for i in range(count)]
        documents = None if self.documents is None else [self.documents[i] for i in chosen]
        return HeldOut([Batch(ids[chosen], mask[chosen])], self.bytes_per_token, documents)

    def starts(self, count: int, length: int) -> list[np.ndarray]:
        """Return the first `length` ids of each of the first `count` windows, as prompts.

        The prompt of a conversation ends before the first token that counts, so its length may differ from `length`.
        """
        rows = zip(self.ids[:count], self.mask[:count], strict=True)
        return [ids[:length] if mask.all() else ids[: int(mask.argmax()) + 1] for ids, mask in rows]

    def batched(self, rows: int) -> "HeldOut":
        """Return the same windows in batches of at most `rows` windows."""
        parts = itertools.chain.from_iterable(batch.split(rows) for batch in self.batches)
        return HeldOut(list(parts), self.bytes_per_token, self.documents)

    def bits_per_byte(self, cross_entropy: float) -> float:
        """Convert a cross-entropy in nats per token to bits per byte. bos and eos count as tokens of 0 bytes."""
        return cross_entropy / math.log(2) / self.bytes_per_token


def open_heldout(
    spec: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rows: int,
    seq_len: int,
    most_rows: int,
    loss_on: LossOn | None = None,
    stop_token_ids: Collection[int] = (),
    least: int | None = None,
) -> HeldOut:
    """Return the first held-out windows of the first source of a mixture: at most `most_rows`, in batches of `rows`.

    Args:
        spec: The mixture, as in "a=0.7,b=0.3".
        seq_len: Number of predicted tokens of a window, which has seq_len + 1 ids.
        loss_on: Tokens of conversations that count. Each conversation is then a window. If None, conversations are read
            as plain text.
        stop_token_ids: Ids at which the target stops, in addition to the tokenizer's eos. They count, too.
        least: If the text is too short for a window of seq_len predicted tokens, the whole text becomes one window. It
            must have at least `least` predicted tokens. If None, the text must have a full window.

    Raises:
        UserError: The source cannot be read, the text is too short for a window, or no token of the conversations
            counts.
    """
    source = first_source(spec)
    docs = documents(source, "heldout")
    if loss_on is not None and has_conversations(source):
        docs = docs[:most_rows]
        talks, numbers = _conversations(source, docs, tokenizer, seq_len, loss_on, stop_token_ids)
        windows = HeldOut.of_counted(talks.rows(slice(0, most_rows)), tokenizer, rows)
        return replace(windows, documents=numbers[:most_rows])
    parts = _tokenized(docs, tokenizer)
    stream = np.concatenate([ids for _, ids in parts])
    if least is not None and least < len(stream) <= seq_len:
        note(
            f"data {source!r}: its held-out split has only {len(stream)} tokens, so the held-out window is shorter "
            f"than {seq_len}; add text, or lower --seq-len"
        )
        seq_len = len(stream) - 1
    count = min(most_rows, (len(stream) - 1) // seq_len)
    if count < 1:
        needed = least or seq_len
        raise UserError(
            f"data {source!r}: its held-out split has {len(stream)} tokens, but a window needs more than {needed}; add "
            f"text until the source has about {math.ceil(needed / HELDOUT_SHARE):,} tokens, or use --data stdlib"
        )
    windows = text_batch([stream[i * seq_len : (i + 1) * seq_len + 1] for i in range(count)])
    ends = np.cumsum([len(ids) for _, ids in parts])
    begin = np.searchsorted(ends, np.arange(count) * seq_len, side="right")
    size = sum(len(d.text.encode()) for d in docs)
    return HeldOut(windows.split(rows), size / len(stream), [parts[i][0] for i in begin])


def heldout_prompts(
    spec: str, tokenizer: PreTrainedTokenizerBase, *, count: int, length: int, seed: int
) -> list[list[int]]:
    """Return the ids of held-out prompts, see numbered_prompts."""
    found = numbered_prompts(spec, tokenizer, count=count, length=length, seed=seed)
    return [ids for _, ids in found]


def heldout_pieces(source: str, tokenizer: PreTrainedTokenizerBase, *, count: int, length: int) -> list[list[int]]:
    """Return the ids of at most `count` pieces of a source's held-out text, of 2 to `length` tokens each.

    The pieces are the first tokens of documents and, if these pieces are too few, later parts of the same documents.

    Raises:
        UserError: The source cannot be read, or its held-out text gives no piece.
    """
    docs = documents(source, "heldout")
    parts = [ids for _, ids in _tokenized(docs[:count], tokenizer)]
    longest = max(map(len, parts))
    pieces = [ids[at : at + length].tolist() for at in range(0, longest, length) for ids in parts]
    long_enough = [piece for piece in pieces if len(piece) > 1]
    if not long_enough:
        raise UserError(f"data {source!r}: its held-out text has a single token; add text")
    return long_enough[:count]


def numbered_prompts(
    spec: str, tokenizer: PreTrainedTokenizerBase, *, count: int, length: int, seed: int
) -> list[tuple[int, list[int]]]:
    """Return `count` held-out prompts of `length` tokens each from the first source of a mixture, in random order.

    The prompts are the first tokens of documents and, if these prompts are too few, later parts of the same documents.
    In its document, each prompt is followed by at least `length` more tokens. Each comes with its document's number.

    Raises:
        UserError: The source cannot be read, or its held-out split is too short.
    """
    source = first_source(spec)
    docs = documents(source, "heldout")

    @functools.cache
    def ids(i: int) -> list[int]:
        with docs[i].rows.leaving_out(docs[i].name):
            return text_ids(docs[i].text, tokenizer, docs[i].name)
        return []

    places = itertools.product(range(0, 16 * length, 2 * length), range(len(docs)))
    starts = ((i, ids(i)[at : at + length]) for at, i in places if len(ids(i)) >= at + 2 * length)
    prompts = list(itertools.islice(starts, count))
    settle(docs, prompts)
    if len(prompts) < count:
        raise UserError(
            f"data {source!r}: its held-out text gives only {len(prompts)} prompts of {length} tokens, not "
            f"{count}; add text, or lower --num-prompts or --prompt-tokens (options of score and outputs build)"
        )
    return [prompts[i] for i in np.random.default_rng(seed).permutation(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSize:
    """The size of the training text or of the held-out text of a source.

    Attributes:
        rows: Number of documents.
        conversations: Number of documents that are conversations.
        answers: Number of messages of the assistant in the conversations.
        questions: Number of prompts in the conversations (see prompts_of).
        tokens: Number of tokens as tokenize() counts them.
    """

    rows: int = 0
    conversations: int = 0
    answers: int = 0
    questions: int = 0
    tokens: int = 0

    def __add__(self, other: "SplitSize") -> "SplitSize":
        return SplitSize(**{name: getattr(self, name) + getattr(other, name) for name in SplitSize.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSize:
    """The sizes of a text source's training documents, and of its held-out documents, which training never reads."""

    train: SplitSize
    heldout: SplitSize

    @property
    def whole(self) -> SplitSize:
        return self.train + self.heldout


def measure_source(source: str, tokenizer: PreTrainedTokenizerBase) -> SourceSize:
    """Return the size of a source. Tokens of conversations are counted as the chat template renders them.

    Raises:
        UserError: The source cannot be read, or too many of its rows are bad.
    """
    sizes = {True: SplitSize(), False: SplitSize()}
    docs = documents(source)
    apart = heldout_keys(document.key for document in docs)
    with heartbeat(f"counting tokens of {source}") as beat:
        for number, document in enumerate(docs):
            beat(f"{number:,} of {len(docs):,} rows")
            with document.rows.leaving_out(document.name):
                sizes[document.key in apart] += _size(document, tokenizer)
    settle(docs, docs)
    return SourceSize(train=sizes[False], heldout=sizes[True])


def _size(document: Document, tokenizer: PreTrainedTokenizerBase) -> SplitSize:
    roles = [message["role"] for message in document.messages]
    return SplitSize(
        rows=1,
        conversations=bool(roles),
        answers=roles.count("assistant"),
        questions=len(prompts_of(document.messages)),
        tokens=len(_ids(document, tokenizer)),
    )
