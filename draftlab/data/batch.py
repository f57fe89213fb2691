"""A batch of token ids with its mask, and its layout in rows: in parts, packed, shared out."""

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """A target's k most probable tokens at each position: ids and log-probabilities [B, T, k], log tail mass [B, T]."""

    ids: np.ndarray
    log_p: np.ndarray
    tail: np.ndarray


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids [B, T + 1] and mask [B, T], which is 1 if the token after a position is trained on or scored.

    Args:
        top_logprobs: Stored lists of the target at these positions.
        positions: Position of each token in its sequence, [B, T], if rows hold several sequences.
        depths: Number of tokens that a parallel draft predicts from each position, [B, T]. None predicts the next token
            at each position of the mask.
    """

    ids: np.ndarray
    mask: np.ndarray
    top_logprobs: TopLogprobs | None = None
    positions: np.ndarray | None = None
    depths: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each row with an influence, [B]: up to the last in the mask, at least 1."""
        return np.where(self.mask > 0, np.arange(1, self.mask.shape[1] + 1), 1).max(1)

    @property
    def predictions(self) -> int:
        """Return the number of predictions; with depths, a token may be predicted several times."""
        return int(self.mask.sum() if self.depths is None else self.depths.sum())

    def predictions_by_offset(self, offsets: int) -> np.ndarray:
        """Return the predictions of each offset from 1 on, [offsets]."""
        if self.depths is None:
            return np.full(offsets, self.predictions)
        return (self.depths[..., None] > np.arange(offsets)).sum((0, 1))

    def rows(self, index: slice) -> "Batch":
        return self._picked(index, self.mask.shape[1])

    def split(self, rows: int) -> "list[Batch]":
        """Return parts of at most `rows` rows."""
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
        """Return a row of width tokens for each list of sequences. Each token of padding is a sequence of its own."""
        number, place = np.full((len(rows), width), -1), np.zeros((len(rows), width), np.int64)
        for row, numbers in enumerate(rows):
            lengths = needed[numbers]
            number[row, : lengths.sum()] = np.repeat(numbers, lengths)
            place[row, : lengths.sum()] = np.concatenate([np.arange(n) for n in lengths])
        ids = np.where(number < 0, 0, self.ids[number, place])
        # not the last token: it predicts none of the next
        ends = (number < 0) | (place >= needed[number] - 1)
        at, top = (
            (number[:, :-1], place[:, :-1].clip(max=self.mask.shape[1] - 1)),
            self.top_logprobs,
        )
        top = None if top is None else TopLogprobs(top.ids[at], top.log_p[at], top.tail[at])
        return Batch(ids, np.where(ends[:, :-1], 0, self.mask[at]), top, place[:, :-1])

    def parts(self, tokens: int) -> "list[Batch]":
        """Return parts of at most `tokens` tokens and at least one row each, long rows together; 0 gives one part."""
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
        top = (
            None if top is None else TopLogprobs(top.ids[index], top.log_p[index], top.tail[index])
        )
        positions, depths = (None if x is None else x[index] for x in (self.positions, self.depths))
        return Batch(self.ids[rows, : length + 1], self.mask[index], top, positions, depths)

    def shard(self, index: int, count: int) -> "Batch":
        """Return the share of a process: every count-th row from index on, or a row with an empty mask."""
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
