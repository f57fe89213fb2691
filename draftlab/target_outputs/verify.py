"""Check stored outputs against the target that made them."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from draftlab.errors import UserError
from draftlab.target_outputs.outputs import StoredLogprobs, padded
from draftlab.target_outputs.store import check_tokenizer, read_store
from draftlab.target_outputs.targets import Target

SEQUENCES, BATCH = 64, 8  # sequences that are scored again, and at once
# nats by which listed log-probabilities may differ on average when they are computed again: bf16 in vLLM and in
# transformers are 0.026 apart (embedded target), and weights that are 3 % off 0.10
TOLERANCE = 0.06
ROUNDED_BELOW = -8.0  # there, rounding of the target's own arithmetic is all there is
SAME_TOP = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreVerification:
    """Differences of listed log-probabilities; same_top is the share of positions with the same most probable token."""

    shards: int
    sequences: int
    mean: float
    worst: float
    same_top: float

    @property
    def good(self) -> bool:
        return self.mean < TOLERANCE and self.same_top > SAME_TOP

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "good": self.good}


def verify(directory: Path, target: Target, seed: int = 0) -> StoreVerification:
    """Read every shard, and let the target score up to SEQUENCES sequences again.

    Raises:
        UserError: a corrupt or misaligned shard, another tokenizer, or nothing to compare.
    """
    store = read_store(directory)
    manifest = store.manifest
    check_tokenizer(manifest, target.directory)
    if not manifest.top_logprobs:
        raise UserError(
            f"{directory} has no top log-probabilities to compare; its checksums are right"
        )
    order = np.random.default_rng(seed).permutation(len(store.outputs))[:SEQUENCES]
    differences, same = [np.empty(0, np.float32)], [np.empty(0, bool)]
    for start in range(0, len(order), BATCH):
        outputs = [store.outputs[i] for i in order[start : start + BATCH]]
        stored = StoredLogprobs.joined([o.top for o in outputs if o.top is not None])
        new = target.score(padded(outputs), manifest.top_logprobs)
        probable = stored.logprobs > ROUNDED_BELOW
        differences.append(
            np.abs(_same_tokens(stored, new, manifest.vocab) - stored.logprobs)[probable]
        )
        same.append(new.ids[:, 0] == stored.ids[:, 0])
    apart, equal = np.concatenate(differences), np.concatenate(same)
    return StoreVerification(
        shards=len(manifest.shards),
        sequences=len(order),
        mean=float(apart.mean()),
        worst=float(apart.max()),
        same_top=float(equal.mean()),
    )


def _same_tokens(stored: StoredLogprobs, new: StoredLogprobs, vocab: int) -> np.ndarray:
    """Return new log-probabilities of the stored ids, [n, k]. An id that is not listed now gets the nearest value."""
    values = np.empty_like(stored.logprobs)
    new_logprobs = new.logprobs.astype(np.float16).astype(np.float32)
    for row, (ids, logprobs) in enumerate(zip(new.ids, new_logprobs, strict=True)):
        listed = np.full(vocab, np.nan, np.float32)
        listed[ids] = logprobs
        now = listed[stored.ids[row]]
        values[row] = np.where(np.isnan(now), np.minimum(stored.logprobs[row], logprobs[-1]), now)
    return values
