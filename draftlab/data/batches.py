"""Token batches, held-out windows and prompts of text: a batch is a function of seed and step."""

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftlab.data.sources import (
    PYTHON_SOURCES,
    Document,
    documents,
    first_source,
    parse_mixture,
    unit_hash,
    without_heldout_lines,
)
from draftlab.errors import UserError


def tokenize(docs: list[Document], tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> np.ndarray:
    """Return documents as one stream of token ids, [N]: bos, text, eos, bos, text, ...; at most limit of them."""
    ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    parts: list[np.ndarray] = []
    count = 0
    for start in range(0, len(docs), 64):
        batch = tokenizer([d.text for d in docs[start : start + 64]], verbose=False)["input_ids"]
        parts += [np.asarray(ids + ends, dtype=np.uint32) for ids in batch]
        count = sum(len(p) for p in parts) if limit is None else count + sum(len(i) + 1 for i in batch)
        if limit is not None and count >= limit:
            break
    return np.concatenate(parts)[:limit]


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """A target's top k tokens at each position: ids and log-probabilities, [B, T, k], and log tail mass, [B, T]."""

    ids: np.ndarray
    log_p: np.ndarray
    tail: np.ndarray


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids [B, T + 1] and mask [B, T]: 1 where the token after a position is trained on or scored.

    top_logprobs: the target's at these positions, if they were cached. positions: of the tokens in their sequences,
    [B, T], where a row holds several. depths: for parallel drafting, how many of the tokens after each position are
    predicted from it, [B, T]; None: the next one where the mask is 1.
    """

    ids: np.ndarray
    mask: np.ndarray
    top_logprobs: TopLogprobs | None = None
    positions: np.ndarray | None = None
    depths: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Return how many tokens of each row have an influence, [B]: up to the last in the mask, at least one."""
        return np.where(self.mask > 0, np.arange(1, self.mask.shape[1] + 1), 1).max(1)

    @property
    def predictions(self) -> int:
        """Return how many tokens are predicted; with depths, each as often as it is."""
        return int(self.mask.sum() if self.depths is None else self.depths.sum())

    def predictions_by_offset(self, offsets: int) -> np.ndarray:
        """Return the predictions of each offset from 1 on, [offsets]."""
        if self.depths is None:
            return np.full(offsets, self.predictions)
        return (self.depths[..., None] > np.arange(offsets)).sum((0, 1))

    def rows(self, index: slice) -> "Batch":
        return self._picked(index, self.mask.shape[1])

    def split(self, rows: int) -> "list[Batch]":
        """Return parts of at most that many rows."""
        return [self.rows(slice(i, i + rows)) for i in range(0, len(self.ids), rows)]

    def packed(self) -> "Batch":
        """Put short sequences one after another, in rows of up to twice the longest one's length.

        The gradient is that of the rows apart, for a model that keeps sequences apart by their positions.
        """
        needed = self.lengths + 1
        widths = [int(needed.max() * (1 + eighths / 8)) for eighths in range(9)]
        choices = [(_first_fit(needed, width), width) for width in widths]
        rows, width = min(choices, key=lambda choice: len(choice[0]) * choice[1])
        return self if len(rows) == len(self.ids) else self._joined(rows, needed, width)

    def _joined(self, rows: list[list[int]], needed: np.ndarray, width: int) -> "Batch":
        """Return a row of width tokens for each list of sequences; each token that is left is a sequence of its own."""
        number, place = np.full((len(rows), width), -1), np.zeros((len(rows), width), np.int64)
        for row, numbers in enumerate(rows):
            lengths = needed[numbers]
            number[row, : lengths.sum()] = np.repeat(numbers, lengths)
            place[row, : lengths.sum()] = np.concatenate([np.arange(n) for n in lengths])
        ids = np.where(number < 0, 0, self.ids[number, place])
        ends = (number < 0) | (place >= needed[number] - 1)  # not the last token: it predicts none of the next
        at, top = (number[:, :-1], place[:, :-1].clip(max=self.mask.shape[1] - 1)), self.top_logprobs
        top = None if top is None else TopLogprobs(top.ids[at], top.log_p[at], top.tail[at])
        return Batch(ids, np.where(ends[:, :-1], 0, self.mask[at]), top, place[:, :-1])

    def parts(self, tokens: int) -> "list[Batch]":
        """Return parts of at most that many tokens each (at least one row), long rows together; 0: one part."""
        return [part for _, part in self.numbered_parts(tokens)]

    def numbered_parts(self, tokens: int) -> "list[tuple[list[int], Batch]]":
        """Return parts, see there, with the numbers of their rows.

        Each part ends at its longest row's last token in the mask; later tokens have no influence. The mask tokens of
        parallel drafting count.
        """
        lengths = self.lengths
        fed = lengths if self.depths is None else lengths + np.maximum(self.depths - 1, 0).sum(1)
        order = np.argsort(-fed, kind="stable")
        parts: list[list[int]] = []
        for row in order:
            longest = fed[parts[-1][0]] if parts else 0
            if parts and (tokens == 0 or (len(parts[-1]) + 1) * longest <= tokens):
                parts[-1].append(int(row))
            else:
                parts.append([int(row)])
        return [(rows, self._picked(rows, int(lengths[rows].max()))) for rows in parts]

    def _picked(self, rows: list[int] | slice, length: int) -> "Batch":
        top, index = self.top_logprobs, (rows, slice(0, length))
        top = None if top is None else TopLogprobs(top.ids[index], top.log_p[index], top.tail[index])
        positions, depths = (None if x is None else x[index] for x in (self.positions, self.depths))
        return Batch(self.ids[rows, : length + 1], self.mask[index], top, positions, depths)

    def shard(self, index: int, count: int) -> "Batch":
        """Return every count-th row from index on, the share of a process; if none, one with an empty mask."""
        if index < len(self.ids):
            return self.rows(slice(index, None, count))
        spare = self.rows(slice(0, 1))
        depths = None if spare.depths is None else np.zeros_like(spare.depths)
        return replace(spare, mask=np.zeros_like(spare.mask), depths=depths)


def _first_fit(lengths: np.ndarray, width: int) -> list[list[int]]:
    """Share sequences out over as few rows of a width as first fit finds, the longest first."""
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
    """Return rows of T + 1 ids as a batch with a full mask."""
    ids = np.stack(rows).astype(np.int64)
    return Batch(ids, np.ones((len(ids), ids.shape[1] - 1), dtype=np.float32))


@dataclass(frozen=True, slots=True)
class TokenBatches:
    """Batches of a weighted mixture of token streams; batch t is a function of (seed, t).

    Each source has a fixed number of rows in every batch (largest remainder of its weight), and is read in a new
    random order each epoch, so that nothing repeats within an epoch.
    """

    streams: dict[str, np.ndarray]
    weights: dict[str, float]
    rows: int
    seq_len: int
    seed: int

    def rows_of(self, weights: dict[str, float] | None = None) -> dict[str, int]:
        """Return the rows of each source in a batch, by these weights or its own."""
        exact = {name: weight * self.rows for name, weight in (weights or self.weights).items()}
        rows = {name: int(value) for name, value in exact.items()}
        for name in sorted(exact, key=lambda n: rows[n] - exact[n])[: self.rows - sum(rows.values())]:
            rows[name] += 1
        return rows

    def batch(self, step: int) -> Batch:
        return text_batch([self.row(name, step * n + i) for name, n in self.rows_of().items() for i in range(n)])

    def row(self, name: str, index: int) -> np.ndarray:
        """Return a row of a source, [seq_len + 1], in the order of its epochs."""
        stream = self.streams[name]
        chunks = (len(stream) - 1) // self.seq_len
        if chunks < 1:
            raise UserError(f"data {name!r}: {len(stream)} tokens, less than one sequence of {self.seq_len}")
        epoch, position = divmod(index, chunks)
        start = _permuted(position, chunks, f"{self.seed}:{name}:{epoch}") * self.seq_len
        return stream[start : start + self.seq_len + 1]


@dataclass(slots=True)
class DynamicBatches:
    """A mixture with more rows of the sources whose loss exceeds their reference loss.

    Dynamic batch loading of Sheared-LLaMA (2310.06694, algorithm 1). A batch is a function of its step and of the
    weights set before it, all of which are in the state, so that a resumed run reads the same text.
    """

    base: TokenBatches
    heldout: dict[str, list[Batch]]
    reference: dict[str, float]  # expected cross-entropy of each source
    every: int  # steps between changes of the weights
    phases: list[tuple[int, dict[str, float], dict[str, int]]]  # first step, weights, rows read before

    @classmethod
    def start(
        cls, base: TokenBatches, heldout: dict[str, list[Batch]], reference: dict[str, float], every: int
    ) -> "DynamicBatches":
        return cls(base, heldout, reference, every, [(0, base.weights, dict.fromkeys(base.weights, 0))])

    def batch(self, step: int) -> Batch:
        start, weights, read = next(phase for phase in reversed(self.phases) if phase[0] <= step)
        rows = self.base.rows_of(weights).items()
        return text_batch(
            [self.base.row(name, read[name] + (step - start) * n + i) for name, n in rows for i in range(n)]
        )

    def reweigh(self, step: int, losses: dict[str, float]) -> None:
        """From step on, multiply weights by exp(loss - reference), with a lower bound on each share."""
        start, weights, read = self.phases[-1]
        rows = self.base.rows_of(weights)
        scaled = {name: w * math.exp(max(0.0, losses[name] - self.reference[name])) for name, w in weights.items()}
        total, floor = sum(scaled.values()), 1e-4
        shares = {name: (1 - floor) * w / total + floor / len(scaled) for name, w in scaled.items()}
        self.phases.append((step, shares, {name: read[name] + (step - start) * n for name, n in rows.items()}))

    def state_dict(self) -> dict[str, object]:
        return {"phases": self.phases}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.phases = state["phases"]


def open_batches(
    spec: str, tokenizer: PreTrainedTokenizerBase, *, rows: int, seq_len: int, steps: int, seed: int
) -> TokenBatches:
    """Return training batches of a mixture's train split, without copies of held-out standard-library files."""
    weights = parse_mixture(spec)
    heldout = documents("stdlib", "heldout") if PYTHON_SOURCES.keys() & weights else []
    streams = {}
    for name, weight in weights.items():
        needed = int(weight * rows * (seq_len + 1) * steps * 1.1) + 2 * seq_len
        streams[name] = tokenize(without_heldout_lines(documents(name, "train"), heldout), tokenizer, needed)
    return TokenBatches(streams, weights, rows, seq_len, seed)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Windows of held-out text that overlap by one token, so that all tokens but the first are predicted."""

    batches: list[Batch]
    bytes_per_token: float

    @property
    def ids(self) -> np.ndarray:
        """Return the ids of all windows, [N, T + 1]."""
        return np.concatenate([batch.ids for batch in self.batches])

    def subset(self, count: int) -> "HeldOut":
        """Return count windows in one batch, spread evenly over all; all if there are fewer."""
        ids = self.ids
        count = min(count, len(ids))
        return HeldOut([text_batch([ids[i * len(ids) // count] for i in range(count)])], self.bytes_per_token)

    def batched(self, rows: int) -> "HeldOut":
        """Return the same windows in batches of rows."""
        return HeldOut([part for batch in self.batches for part in batch.split(rows)], self.bytes_per_token)

    def bits_per_byte(self, cross_entropy: float) -> float:
        """Convert from nats per token; bos and eos are tokens of no bytes."""
        return cross_entropy / math.log(2) / self.bytes_per_token


def open_heldout(spec: str, tokenizer: PreTrainedTokenizerBase, *, rows: int, seq_len: int, most_rows: int) -> HeldOut:
    """Return the first most_rows windows of the held-out split of a mixture's first source, in batches of rows.

    Raises:
        UserError: the text is shorter than a window.
    """
    source = first_source(spec)
    docs = documents(source, "heldout")
    stream = tokenize(docs, tokenizer)
    count = min(most_rows, (len(stream) - 1) // seq_len)
    if count < 1:
        raise UserError(f"data {source!r}: its held-out split has {len(stream)} tokens, less than {seq_len} in a row")
    windows = [stream[i * seq_len : (i + 1) * seq_len + 1] for i in range(count)]
    batches = [text_batch(windows[i : i + rows]) for i in range(0, count, rows)]
    return HeldOut(batches, sum(len(d.text.encode()) for d in docs) / len(stream))


def heldout_prompts(
    spec: str, tokenizer: PreTrainedTokenizerBase, *, count: int, length: int, seed: int
) -> list[list[int]]:
    """Return prompts of length tokens: starts of held-out documents, then of later parts of them.

    Raises:
        UserError: the held-out split of the mixture's first source is too short.
    """
    source = first_source(spec)
    docs = documents(source, "heldout")
    ids = functools.cache(lambda i: tokenizer(docs[i].text, verbose=False)["input_ids"])
    places = itertools.product(range(0, 16 * length, 2 * length), range(len(docs)))
    starts = (ids(i)[at : at + length] for at, i in places if len(ids(i)) >= at + 2 * length)
    prompts = list(itertools.islice(starts, count))
    if len(prompts) < count:
        raise UserError(f"data {source!r}: held-out text has {len(prompts)} prompts of {length} tokens, not {count}")
    return [prompts[i] for i in np.random.default_rng(seed).permutation(count)]


def _permuted(position: int, n: int, key: str) -> int:
    """Return the image of position under a keyed pseudo-random affine permutation of range(n)."""
    step = int(unit_hash(key + ":step") * n) | 1
    while np.gcd(step, n) != 1:
        step += 2
    return (position * step + int(unit_hash(key + ":shift") * n)) % n
