"""Training batches for distillation, read from stored target outputs."""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from draftlab.data import Batch, HeldOut, TopLogprobs
from draftlab.errors import UserError
from draftlab.model import checkpoint
from draftlab.target_outputs.outputs import StoredLogprobs, TargetOutput, padded
from draftlab.target_outputs.store import (
    check_tokenizer,
    finished_manifest,
    heldout_part,
    read_shard,
)

# two shards are enough, because an epoch reads a whole shard before it begins the next shard
SHARDS_IN_MEMORY = 2


def open_stored(
    directory: Path,
    draft: Path,
    *,
    batch_size: int,
    temperature: float,
    served: float = 1.0,
    seed: int | None = None,
) -> "tuple[StoredBatches, HeldOut]":
    """Open a store of target outputs to train the model `draft`. Return the training batches and the held-out text.

    Args:
        temperature: Temperature of the target's probabilities in the training batches.
        served: Temperature of the target's probabilities in the held-out text.
        seed: Same as in StoredBatches.

    Raises:
        UserError: The vocabularies of the store and the draft differ, the store has no held-out text, or StoredBatches
            raises it.
    """
    batches = StoredBatches(directory, batch_size, temperature, seed)
    check_tokenizer(directory, draft)
    part = heldout_part(directory)
    if part is None:
        raise UserError(
            f"{directory} has no held-out text; build a new store with draftlab outputs build --use distill"
        )
    heldout_size = finished_manifest(part).sequences
    heldout = StoredBatches(part, heldout_size, served).batch(0)
    return batches, HeldOut.of_counted(heldout, checkpoint.load_tokenizer(draft), batch_size)


def stored_temperature(outputs: Path) -> float:
    """Return the temperature at which evaluations on a store compare the distributions; 0 is greedy.

    It is the temperature at which the target wrote the text, if the store has probabilities at this temperature.
    Otherwise it is 1.
    """
    manifest = finished_manifest(outputs)
    written = 1.0 if manifest.sampling is None else manifest.sampling.temperature
    return written if written in (0.0, *manifest.temperatures) else 1.0


class StoredBatches:
    """Training batches from a finished store, with the target's top log-probabilities.

    The batch of step t depends only on the seed and t. In every epoch, the seed gives a new order of the shards, and of
    the sequences in each shard. Without a seed, sequences keep the order of the store.

    Raises:
        UserError: The store is unfinished, lacks top log-probabilities or the temperature, or has a shard that is
            corrupt, missing or misaligned.
    """

    def __init__(self, directory: Path, batch_size: int, temperature: float = 1.0, seed: int | None = None) -> None:
        manifest = finished_manifest(directory)
        if not manifest.top_logprobs:
            raise UserError(
                f"{directory} has no top log-probabilities to distil from; build a new store with --top-logprobs 64"
            )
        if temperature not in manifest.temperatures:
            raise UserError(
                f"{directory} supports distillation only at the temperatures {list(manifest.temperatures)}, not at "
                f"{temperature}; set --temperature to one of these"
            )
        self.manifest = manifest
        self.batch_size = batch_size
        self.temperature = temperature
        longest = 0
        # check all shards before training, without keeping them in memory
        for number in range(len(manifest.shards)):
            longest = max([longest, *map(len, read_shard(directory, manifest, number))])
        self.seq_len = manifest.seq_len or longest - 1
        self._order = functools.lru_cache(2)(functools.partial(_order, [s.sequences for s in manifest.shards], seed))
        self._shard = functools.lru_cache(SHARDS_IN_MEMORY)(lambda number: read_shard(directory, manifest, number))

    def batch(self, step: int) -> Batch:
        outputs: list[TargetOutput] = []
        for number in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, position = divmod(number, self.manifest.sequences)
            shard, row = self._order(epoch)[position]
            outputs.append(self._shard(shard)[row])
        batch = padded(outputs, min(self.seq_len, max(map(len, outputs)) - 1))
        fits = [int(n) for n in batch.mask.sum(1)]
        top = StoredLogprobs.joined([o.top[:n] for o, n in zip(outputs, fits, strict=True) if o.top is not None])
        logprobs, rest = top.at(self.temperature, self.manifest.temperatures)
        columns = (top.ids.astype(np.int64), logprobs.astype(np.float32), rest)
        top_logprobs = TopLogprobs(*(_spread(column, batch.mask > 0) for column in columns))
        return Batch(batch.ids, batch.mask, top_logprobs)


def _order(sequences: Sequence[int], seed: int | None, epoch: int) -> list[tuple[int, int]]:
    """Return a store's sequences as (shard, index in shard), in the order of an epoch. sequences: Number per shard."""
    rng = None if seed is None else np.random.default_rng((seed, epoch))

    def shuffled(count: int) -> list[int]:
        return list(range(count)) if rng is None else rng.permutation(count).tolist()

    order: list[tuple[int, int]] = []
    for shard in shuffled(len(sequences)):
        order += [(shard, row) for row in shuffled(sequences[shard])]
    return order


def _spread(flat: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Place the values of `flat` [n, ...] in order at the n positions where `counted` [R, T] is True.

    Return an array [R, T, ...] that is zero elsewhere.
    """
    out = np.zeros((*counted.shape, *flat.shape[1:]), dtype=flat.dtype)
    out[counted] = flat
    return out
