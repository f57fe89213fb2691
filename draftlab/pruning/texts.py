"""The text that a prune calibrates on, and the held-out text on which draft and source are compared."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftlab.console import note
from draftlab.data import open_batches, open_heldout
from draftlab.target_outputs.outputs import TargetOutput
from draftlab.target_outputs.store import HELDOUT, read_texts

HELDOUT_TOKENS = 4096  # draft and source are compared on at most these tokens
LEAST_TOKENS = 32  # a comparison with fewer held-out tokens is refused
HELDOUT_SHARE = 16  # every 16th stored text is held out, if the store holds out none
COUNTED_TOKENS = 2_000_000  # ids of a head are counted in at most these tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Text to calibrate on: a mixture of data, or stored outputs of the target."""

    data: str
    outputs: Path | None = None
    tokens: int = 32768
    seq_len: int = 512
    seed: int = 0

    def chunks(self, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> list[Tensor]:
        """Return chunks of token ids to calibrate on, [1, seq_len], as long as those of the held-out text."""
        rows = -(-self.tokens // seq_len)
        if self.outputs is not None:
            own = (self.outputs / HELDOUT).exists()
            texts = [
                text
                for i, text in enumerate(_whole(read_texts(self.outputs)))
                if own or i % HELDOUT_SHARE
            ]
            return joined(texts, rows, seq_len, self.seed)
        text = open_batches(
            self.data, tokenizer, rows=rows, seq_len=seq_len, steps=1, seed=self.seed
        )
        available = sum((len(stream) - 1) // seq_len for stream in text.streams.values())
        if 0 < available < rows:
            note(
                f"data {self.data!r} has {available * seq_len:,} of {self.tokens:,} tokens to calibrate on"
            )
            text = replace(text, rows=available)
        return [torch.from_numpy(part.ids[:, :-1]) for part in text.batch(0).split(1)]

    def heldout(self, tokenizer: PreTrainedTokenizerBase) -> list[Tensor]:
        """Return chunks of token ids, [1, seq_len + 1], shorter where there is less text."""
        rows = max(1, HELDOUT_TOKENS // self.seq_len)
        if self.outputs is not None:
            own = self.outputs / HELDOUT
            texts = (
                _whole(read_texts(own))
                if own.exists()
                else _whole(read_texts(self.outputs))[::HELDOUT_SHARE]
            )
            return joined(texts, rows, self.seq_len + 1, seed=0)
        text = open_heldout(
            self.data, tokenizer, rows=1, seq_len=self.seq_len, most_rows=rows, least=LEAST_TOKENS
        )
        return [torch.from_numpy(batch.ids) for batch in text.batches]

    def counted(self, tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
        """Return texts in which to count ids."""
        if self.outputs is not None:
            return [output.ids for output in read_texts(self.outputs)]
        text = open_batches(self.data, tokenizer, rows=1, seq_len=COUNTED_TOKENS, steps=1, seed=0)
        parts: list[np.ndarray] = []
        for ids in text.streams.values():
            parts += np.array_split(ids, max(2, len(ids) // 512))
        return parts


def joined(texts: list[np.ndarray], rows: int, length: int, seed: int) -> list[Tensor]:
    """Join texts in random order; return at most `rows` chunks [1, length]. Text shorter than a chunk is repeated."""
    order = np.random.default_rng(seed).permutation(len(texts))
    ids = np.concatenate([texts[i] for i in order])
    ids = ids if len(ids) >= length else np.resize(ids, length)
    return [
        torch.from_numpy(row[None])
        for row in ids[: len(ids) // length * length].reshape(-1, length)[:rows]
    ]


def _whole(outputs: list[TargetOutput]) -> list[np.ndarray]:
    """Return prompts with the target's answers, in the order of their numbers."""
    ordered = sorted(outputs, key=lambda output: output.number)
    return [np.concatenate([output.prompt, output.ids]).astype(np.int64) for output in ordered]
