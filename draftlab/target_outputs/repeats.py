"""Measures of repetition in generated text: loops flatter every draft."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DEGENERATE = 0.5  # share of distinct 4-grams below which a text is mostly a loop
CHUNK = 512  # texts compared at once


@dataclass(frozen=True, slots=True)
class Repeats:
    """The share of distinct 4-grams of a text, and its longest stretch that also occurs earlier in it."""

    distinct_4grams: float
    longest_repeat: int

    @property
    def degenerate(self) -> bool:
        return self.distinct_4grams < DEGENERATE


def repeats(texts: Sequence[np.ndarray]) -> list[Repeats]:
    longest: list[int] = []
    for start in range(0, len(texts), CHUNK):
        longest += _longest_repeats(texts[start : start + CHUNK]).tolist()
    return [Repeats(distinct_ngrams([text.tolist()], 4), length) for text, length in zip(texts, longest, strict=True)]


def distinct_ngrams(tokens: list[list[int]], n: int) -> float:
    """Return the distinct n-grams of each text over all its n-grams, sums over texts; 1: nothing repeats."""
    grams = [[tuple(t[i : i + n]) for i in range(len(t) - n + 1)] for t in tokens]
    total = sum(len(g) for g in grams)
    return sum(len(set(g)) for g in grams) / total if total else 1.0


def _longest_repeats(texts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the longest repeat of each text, [R]; run[r, j]: tokens up to j equal to as many up to token i > j."""
    lengths = np.array([len(t) for t in texts])
    n = int(lengths.max(initial=0))
    ids = np.zeros((len(texts), n), dtype=np.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    run, best = np.zeros((len(texts), n), dtype=np.int32), np.zeros(len(texts), dtype=np.int32)
    for i in range(1, n):
        same = (ids[:, :i] == ids[:, i : i + 1]) & (lengths > i)[:, None]
        longer = np.ones((len(texts), i), dtype=np.int32)
        longer[:, 1:] += run[:, : i - 1]
        run[:, :i] = longer * same
        best = np.maximum(best, run[:, :i].max(1))
    return best
