"""A head for fewer ids: those that the target's own text uses, so that a draft of a large vocabulary computes less.

FR-Spec (Zhao et al. 2025, arXiv 2502.14856) and VocabTrim (Goel et al. 2025, arXiv 2506.22694). The embedding stays
whole, and so does the checkpoint: which ids count stands in a file beside it that our engine reads, and others do not.
What is not among them is never drafted; the target still writes it, so nothing is lost but speed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draftlab.errors import UserError
from draftlab.model import checkpoint, saving
from draftlab.model.llama import HEAD_IDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """ids: ascending. covered: share of the second half of the texts that those of the first half would have held."""

    ids: list[int]
    covered: float


def choose(texts: Sequence[np.ndarray], keep: int, vocab: int, always: Sequence[int]) -> Kept:
    """The keep most frequent ids of texts; of equally frequent ones the lowest, which a BPE learns first.

    Raises:
        UserError: keep is not below vocab, or there are fewer than two texts.
    """
    if not len(always) < keep < vocab:
        raise UserError(f"--keep {keep} is to be above {len(always)} and below the vocabulary's {vocab}")
    if len(texts) < 2:
        raise UserError(f"{len(texts)} texts say too little about what the target writes; record more prompts")
    half = len(texts) // 2
    first = _most_frequent(texts[:half], keep, vocab, always)
    covered = float(np.isin(np.concatenate(texts[half:]), first).mean())
    return Kept(ids=_most_frequent(texts, keep, vocab, always).tolist(), covered=covered)


def write(draft: Path, out: Path, kept: Kept) -> None:
    """draft with the ids of its head beside it."""
    config, weights = checkpoint.read_config(draft), checkpoint.Weights(draft)
    saving.write_checkpoint(out, config, weights.items(), draft)
    (out / HEAD_IDS).write_text(json.dumps(kept.ids))


def _most_frequent(texts: Sequence[np.ndarray], keep: int, vocab: int, always: Sequence[int]) -> np.ndarray:
    counts = np.bincount(np.concatenate(texts).astype(np.int64), minlength=vocab)[:vocab].astype(np.float64)
    counts[list(always)] = np.inf
    return np.sort(np.argsort(-counts, kind="stable")[:keep])
