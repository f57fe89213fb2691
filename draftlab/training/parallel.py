"""Training parallel drafts (PARD, 2504.18583): which positions predict how many tokens (COD), and their quality.

B rows, T positions, K offsets. Conditional drop of tokens: of the positions that predict offset j, a random share goes
on to offset j + 1, so that a step costs about a third of all K T predictions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from draftlab.data import Batch
from draftlab.model import parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """Offsets of a parallel draft. token: the mask token. share, floor: of the positions of each offset, see drawn."""

    count: int
    token: int
    share: float
    floor: float
    seed: int

    @property
    def cost(self) -> float:
        """Return the tokens that a step reads, relative to those of its text."""
        return sum(max(self.share**j, self.floor) for j in range(self.count))

    @property
    def config(self) -> dict[str, object]:
        """Return what config.json says of a parallel draft, as PARD's do and vLLM reads."""
        return {
            parallel.PARD_TOKEN: self.token,
            parallel.SPD_TYPE: "pard",
            parallel.OFFSETS: self.count,
        }

    def prepare(self, student: PreTrainedModel) -> None:
        """Give the mask token the mean embedding, unless the student is a parallel draft with this token already."""
        if student.config.to_dict().get(parallel.PARD_TOKEN) != self.token:
            embedding = student.get_input_embeddings().get_parameter("weight")
            with torch.no_grad():
                embedding[self.token] = embedding.mean(0)

    def drawn(self, batch: Batch, number: int) -> Batch:
        """Return the batch with the offsets to predict from each position, a function of seed and number.

        Of a row's n positions that count, max(share^(j - 1), floor) n predict offset j, always among those of j - 1,
        and only where all tokens up to j count: a draft does not cross the end of an answer.
        """
        rng = np.random.default_rng((self.seed, number + (1 << 32)))
        counted = batch.mask > 0
        ahead = _run_lengths(counted)
        # random rank in its row
        order = np.where(counted, rng.random(counted.shape), np.inf).argsort(1).argsort(1)
        positions = counted.sum(1, keepdims=True)
        depths = np.zeros(counted.shape, dtype=np.int64)
        for offset in range(1, self.count + 1):
            most = (positions * max(self.share ** (offset - 1), self.floor)).astype(np.int64)
            depths += (order < most) & (ahead >= offset)
        return replace(batch, depths=depths)


def _run_lengths(counted: np.ndarray) -> np.ndarray:
    """Return how many positions in a row count from each on, [B, T]."""
    ahead = np.zeros(counted.shape, dtype=np.int64)
    for t in range(counted.shape[1] - 1, -1, -1):
        ahead[:, t] = np.where(
            counted[:, t], 1 + (ahead[:, t + 1] if t + 1 < counted.shape[1] else 0), 0
        )
    return ahead


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Return the tokens per target pass of K drafted tokens that are accepted independently with these chances."""
    return 1 + float(np.cumprod(acceptance).sum())
