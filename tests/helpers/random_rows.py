"""Batches of random ids for training; a pure function of the step."""

import numpy as np

from draftlab.data import Batch


class RandomRows:
    """Rows of random ids. masked: Whether about half of the tokens count. prompt: Tokens of row 0 that do not count."""

    def __init__(self, rows: int = 4, seq_len: int = 16, *, masked: bool = False, prompt: int = 0) -> None:
        self.rows, self.seq_len, self.masked, self.prompt = rows, seq_len, masked, prompt

    def batch(self, step: int) -> Batch:
        rng = np.random.default_rng(step)
        ids = rng.integers(3, 300, (self.rows, self.seq_len + 1))
        mask = np.ones((self.rows, self.seq_len), dtype=np.float32)
        if self.masked:
            mask[:] = rng.integers(0, 2, mask.shape)
        mask[0, : self.prompt] = 0
        return Batch(ids, mask)
