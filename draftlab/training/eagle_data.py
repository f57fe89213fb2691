"""Text for EAGLE-3 heads: stored sequences without their log-probabilities, in rows for chains of L steps."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from draftlab.data import Batch, HeldOut
from draftlab.errors import UserError
from draftlab.target_outputs.outputs import TargetOutput, padded
from draftlab.target_outputs.store import (
    HELDOUT,
    MANIFEST,
    check_tokenizer,
    finished_manifest,
    read_shard,
)
from draftlab.training.loop import Batches

HELDOUT_SHARE = 0.05  # share of a store without held-out text


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Stored sequences in a new random order each epoch; batch t is a function of (seed, t)."""

    outputs: list[TargetOutput]
    rows: int
    seq_len: int
    seed: int

    def batch(self, step: int) -> Batch:
        places = (divmod(step * self.rows + i, len(self.outputs)) for i in range(self.rows))
        return padded(
            [self.outputs[self._order(epoch)[place]] for epoch, place in places], self.seq_len
        )

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.outputs))


@dataclass(frozen=True, slots=True)
class ChainBatches:
    """Batches in which the first L positions of a row do not count: no chain of L steps ends there."""

    batches: Batches
    steps: int

    def batch(self, step: int) -> Batch:
        return within_chains(self.batches.batch(step), self.steps)


def within_chains(batch: Batch, steps: int) -> Batch:
    mask = batch.mask.copy()
    mask[:, :steps] = 0
    return replace(batch, mask=mask)


def open_texts(
    directory: Path, target: Path, *, rows: int, seq_len: int, seed: int, most_heldout: int
) -> tuple[StoredRows, HeldOut]:
    """Return training rows and held-out text of a store; log-probabilities are not kept in memory.

    Raises:
        UserError: another tokenizer, an unfinished store, or no sequence of which seq_len tokens hold an answer.
    """
    manifest = finished_manifest(directory)
    check_tokenizer(manifest, target)
    outputs = _sequences(directory, seq_len)
    if (directory / HELDOUT / MANIFEST).exists():
        heldout = _sequences(directory / HELDOUT, seq_len)
    else:
        order = np.random.default_rng(0).permutation(len(outputs))
        count = max(1, round(HELDOUT_SHARE * len(outputs)))
        heldout, outputs = [outputs[i] for i in order[:count]], [outputs[i] for i in order[count:]]
    if not outputs or not heldout:
        raise UserError(
            f"{directory} has fewer than two sequences whose answer begins within {seq_len} tokens; raise --seq-len"
        )
    batch = padded(heldout[:most_heldout], seq_len)
    return StoredRows(outputs, rows, seq_len, seed), HeldOut(batch.split(rows), 1.0)


def _sequences(directory: Path, seq_len: int) -> list[TargetOutput]:
    manifest = finished_manifest(directory)
    shards = (read_shard(directory, manifest, number) for number in range(len(manifest.shards)))
    return [
        replace(o, top=None, logprobs=None)
        for shard in shards
        for o in shard
        if len(o.prompt) < seq_len
    ]
