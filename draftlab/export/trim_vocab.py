"""Vocabulary trimming: a head for the tokens that the target writes, so that a large vocabulary costs a draft less.

FR-Spec (Zhao et al. 2025, arXiv 2502.14856) and VocabTrim (Goel et al. 2025, arXiv 2506.22694). The checkpoint stays
whole: a file beside it lists the tokens of the head, which draftlab's engine reads and other runtimes ignore. The draft
never proposes other tokens; the target still writes them, so nothing but speed is lost.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from draftlab.config.export import TrimVocabConfig
from draftlab.errors import UserError
from draftlab.model import checkpoint, saving
from draftlab.model.llama import HEAD_IDS
from draftlab.output import Output
from draftlab.target_outputs.store import read_store


def trim_vocab(config: TrimVocabConfig, output: Output) -> tuple[int, float]:
    """Write the draft with the ids of its head; return its vocabulary size, and the coverage of frequent_ids.

    Raises:
        UserError: see frequent_ids.
    """
    draft = config.draft_directory()
    vocab = checkpoint.vocab_size(draft)
    texts = [text.ids for text in read_store(config.outputs).outputs]
    special = [i for i in checkpoint.special_ids(checkpoint.load_tokenizer(draft)).values() if i is not None]
    ids, coverage = frequent_ids(texts, config.draft_vocab_size, vocab, special)
    with output.directory() as work:
        write(draft, work, ids)
        output.record(work, [draft, config.outputs], coverage=coverage)
    return vocab, coverage


def write(draft: Path, out: Path, ids: Sequence[int]) -> None:
    """Write a draft with the ids of its head."""
    saving.write_checkpoint(out, checkpoint.read_config(draft), checkpoint.Weights(draft).items(), draft)
    (out / HEAD_IDS).write_text(json.dumps(ids))


def frequent_ids(texts: Sequence[np.ndarray], size: int, vocab: int, special: Sequence[int]) -> tuple[list[int], float]:
    """Return the most frequent ids of the texts, ascending, and the share of the second half that the first covers.

    special: ids that stay in any case. Of equally frequent ids the lowest stay, which a BPE learns first.

    Raises:
        UserError: size is not between those of special and of vocab, or there are fewer than two texts.
    """
    if not len(special) < size < vocab:
        raise UserError(f"--draft-vocab-size {size}: want more than {len(special)} and less than {vocab}")
    if len(texts) < 2:
        raise UserError(f"--outputs has {len(texts)} texts, which say too little; build it with more prompts")

    def top(some: Sequence[np.ndarray]) -> np.ndarray:
        counts = np.bincount(np.concatenate(some).astype(np.int64), minlength=vocab)[:vocab].astype(np.float64)
        counts[list(special)] = np.inf
        return np.sort(np.argsort(-counts, kind="stable")[:size])

    half = len(texts) // 2
    coverage = float(np.isin(np.concatenate(texts[half:]), top(texts[:half])).mean())
    return top(texts).tolist(), coverage
