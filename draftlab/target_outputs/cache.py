"""A target's distributions on disk: its k most probable tokens and the exact mass of the rest, never renormalised.

n predicted tokens, k listed ones, T temperatures. A cache is a directory: manifest.json, and shards of a few hundred
sequences each. Entry i of a shard belongs to the token that it predicts, so the log-probability of the token that
came must agree with the list, which is how a shifted or foreign cache is found when it is opened.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from draftlab import provenance
from draftlab.console import progress
from draftlab.data import Batch, HeldOut, TopLogprobs, open_batches, open_heldout
from draftlab.errors import UserError
from draftlab.files import validation_text
from draftlab.model import checkpoint
from draftlab.sampling import SamplingParams
from draftlab.target_outputs.logprob_sources import Entries, Kept, Origin
from draftlab.target_outputs.server_log import Traffic

MANIFEST = "manifest.json"
VERIFIED = 64  # sequences that are looked at again
# nats by which listed log-probabilities may differ on average when they are computed anew: bf16 in vLLM and in
# transformers are 0.026 apart (embedded target), and weights that are 3 % off 0.10
TOLERANCE = 0.06
VERIFIED_AT_ONCE = 8
SHARD_ROWS = 256
HELDOUT, HELDOUT_ROWS = "heldout", 64


class Shard(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    sequences: int
    tokens: int
    sha256: str


class Manifest(BaseModel):
    """What a cache holds and what made it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = 1
    source: str = "hf"  # or the kind of server: vllm, sglang, llamacpp, openai; or traffic
    target: str
    target_sha256: str | None
    tokenizer_sha256: str
    vocab: int
    k: int
    temperatures: tuple[float, ...]
    logprobs: str  # raw: of the target's own logits, before any sampling setting; else the server's logprobs mode
    data: str
    data_sha256: str | None = None  # of traffic
    text: str  # data: the text itself; target: what the target wrote after its prompts; traffic: what it was asked
    sampling: SamplingParams | None = None  # where the target wrote
    seq_len: int
    seed: int
    planned: int  # sequences of a finished cache
    shards: tuple[Shard, ...] = ()

    @property
    def sequences(self) -> int:
        return sum(s.sequences for s in self.shards)

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Building:
    """What to keep on which text."""

    data: str
    text: Literal["data", "target"]
    sequences: int
    seq_len: int
    prompt_tokens: int
    temperature: float
    k: int
    seed: int

    def sampling(self, number: int) -> SamplingParams:
        """How the target writes for shard number; prompt i of it has the seed after i others."""
        seed = (self.seed * 100_003 + number) * 1009 % 2**31
        return SamplingParams(max_tokens=self.seq_len + 1 - self.prompt_tokens, temperature=self.temperature, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """mean, worst: difference of listed log-probabilities; same_top: share of equal most probable tokens."""

    shards: int
    sequences: int
    mean: float
    worst: float
    same_top: float

    @property
    def good(self) -> bool:
        return self.mean < TOLERANCE and self.same_top > 0.95

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "good": self.good}


def build(how: Building, origin: Origin, out: Path) -> Manifest:
    """Write the cache and, in its folder heldout, a small one of held-out text, in shards of SHARD_ROWS sequences."""
    tokenizer = checkpoint.load_tokenizer(origin.directory)
    batches = open_batches(
        how.data, tokenizer, rows=SHARD_ROWS, seq_len=how.seq_len, steps=-(-how.sequences // SHARD_ROWS), seed=how.seed
    )
    held = open_heldout(how.data, tokenizer, rows=HELDOUT_ROWS, seq_len=how.seq_len, most_rows=HELDOUT_ROWS).batches[0]

    def kept(batch: Batch, number: int) -> Kept:
        if how.text == "data":
            return batch, origin.see(batch, how.k)
        return origin.write(batch.ids[:, : how.prompt_tokens], how.sampling(number), how.k)

    def shard(number: int) -> Kept:
        left = how.sequences - number * SHARD_ROWS
        return kept(batches.batch(number).rows(slice(0, left)), number)

    manifest = Manifest(
        **asdict(origin.facts()), tokenizer_sha256=tokenizer_sha(origin.directory), k=how.k, data=how.data,
        text=how.text, sampling=how.sampling(0) if how.text == "target" else None, seq_len=how.seq_len, seed=how.seed,
        planned=how.sequences,
    )  # fmt: skip
    return _write(out, manifest, shard, lambda: kept(held, -1), len(held.ids))


def build_from_traffic(traffic: Traffic, directory: Path, out: Path) -> Manifest:
    """Keep a log of requests. directory: a checkpoint or tokenizer with the vocabulary of what was served."""
    trained, held = traffic.split(HELDOUT_ROWS)

    def shard(number: int) -> Kept:
        return traffic.rows(trained[number * SHARD_ROWS : (number + 1) * SHARD_ROWS])

    manifest = Manifest(
        source="traffic", target=directory.name, target_sha256=None, tokenizer_sha256=tokenizer_sha(directory),
        vocab=traffic.vocab, k=traffic.k, temperatures=(1.0,), logprobs="raw", data=traffic.path.name,
        data_sha256=provenance.file_sha256(traffic.path), text="traffic", seq_len=traffic.seq_len, seed=0,
        planned=len(trained),
    )  # fmt: skip
    return _write(out, manifest, shard, lambda: traffic.rows(held), len(held))


def _write(
    out: Path, manifest: Manifest, shard: Callable[[int], Kept], held: Callable[[], Kept], held_rows: int
) -> Manifest:
    few = manifest.model_copy(update={"planned": held_rows})
    write_shards(out / HELDOUT, few, lambda _: held(), lambda _: None)
    with progress("cache", manifest.planned) as advance:
        return write_shards(out, manifest, shard, lambda done: advance(done, "sequences"))


def verify(directory: Path, origin: Origin, seed: int) -> Verified:
    """Read every shard, and score up to VERIFIED sequences again.

    Raises:
        UserError: a corrupt or misaligned shard, or another tokenizer.
    """
    manifest = read_manifest(directory)
    check_tokenizer(manifest, origin.directory)
    shards = [read_shard(directory, manifest, i) for i in range(len(manifest.shards))]
    where = [(s, r) for s, shard in enumerate(shards) for r in range(len(shard["input_ids"]))]
    order = np.random.default_rng(seed).permutation(len(where))[:VERIFIED]
    apart, same = [np.empty(0, np.float32)], [np.empty(0, bool)]
    for start in range(0, len(order), VERIFIED_AT_ONCE):
        rows = [(shards[s], r) for s, r in (where[i] for i in order[start : start + VERIFIED_AT_ONCE])]
        ids, mask, top, kept = (
            np.stack([shard[name][r] for shard, r in rows]) for name in ("input_ids", "mask", "topk_id", "topk_logp")
        )
        top, kept = top[mask > 0], kept[mask > 0].astype(np.float32)  # [n, k]
        now = origin.see(Batch(ids.astype(np.int64), mask), manifest.k)
        probable = kept > -8  # below, rounding of the target's own arithmetic is all there is
        apart.append(np.abs(_again(top, kept, now, manifest.vocab) - kept)[probable])
        same.append(now.topk_id[:, 0] == top[:, 0])
    found, equal = np.concatenate(apart), np.concatenate(same)
    return Verified(
        shards=len(shards), sequences=len(order), mean=float(found.mean()), worst=float(found.max()),
        same_top=float(equal.mean()),
    )  # fmt: skip


def _again(top: np.ndarray, kept: np.ndarray, now: Entries, vocab: int) -> np.ndarray:
    """What is listed now for ids top [n, k]; for one that is not, the nearest that it can be."""
    found = np.empty_like(kept)
    for row, (ids, values) in enumerate(zip(now.topk_id, now.topk_logp.astype(np.float32), strict=True)):
        listed = np.full(vocab, np.nan, np.float32)
        listed[ids] = values
        found[row] = np.where(np.isnan(listed[top[row]]), np.minimum(kept[row], values[-1]), listed[top[row]])
    return found


def open_cache(directory: Path, draft: Path, *, rows: int, temperature: float) -> tuple["CachedBatches", HeldOut]:
    """Training batches and the held-out text of a cache, for a draft.

    Raises:
        UserError: another vocabulary, an unfinished or corrupt cache, or a temperature that it does not hold.
    """
    check_tokenizer(read_manifest(directory), draft)
    batches = CachedBatches(directory, rows, temperature)
    few = read_manifest(directory / HELDOUT).sequences
    held = CachedBatches(directory / HELDOUT, few, temperature).batch(0)
    counted = [ids[1:][mask > 0] for ids, mask in zip(held.ids, held.mask, strict=True)]
    text = checkpoint.load_tokenizer(draft).batch_decode(counted, skip_special_tokens=True)
    size = sum(len(t.encode()) for t in text) / float(held.mask.sum())
    return batches, HeldOut(held.split(rows), size)


def check_tokenizer(manifest: Manifest, model: Path) -> None:
    """Raises UserError: the cache was made with another vocabulary."""
    if tokenizer_sha(model) != manifest.tokenizer_sha256:
        raise UserError(f"the cache was made with the tokenizer of {manifest.target}, and {model} has another")


def read_manifest(directory: Path) -> Manifest:
    try:
        return Manifest.model_validate_json((directory / MANIFEST).read_text())
    except OSError:
        raise UserError(f"{directory} is not a cache: it has no {MANIFEST}") from None
    except ValidationError as error:
        raise UserError(f"{directory / MANIFEST}: {validation_text(error)}") from None


def write_shards(
    directory: Path,
    manifest: Manifest,
    make: Callable[[int], Kept],
    advance: Callable[[int], None],
) -> Manifest:
    """Build what is missing: make(i) are the sequences of shard i. A killed build goes on where it stopped.

    Raises:
        UserError: directory holds another cache, or cannot be written.
    """
    if (directory / MANIFEST).exists():
        held = read_manifest(directory)
        if held.model_copy(update={"shards": ()}) != manifest:
            raise UserError(f"{directory} holds another cache; choose another --out, or remove it")
        manifest = held
    try:
        while manifest.sequences < manifest.planned:
            advance(manifest.sequences)
            number = len(manifest.shards)
            batch, entries = make(number)
            tensors = _shard(batch, entries)
            directory.mkdir(parents=True, exist_ok=True)
            writing, file = directory / f".{_name(number)}.writing", directory / _name(number)
            save_file(tensors, writing)
            shard = Shard(
                sequences=len(batch.ids), tokens=int((batch.mask > 0).sum()), sha256=provenance.file_sha256(writing)
            )
            writing.rename(file)
            manifest = manifest.model_copy(update={"shards": (*manifest.shards, shard)})
            listing = directory / f".{MANIFEST}.writing"
            listing.write_text(manifest.model_dump_json(indent=1))
            listing.rename(directory / MANIFEST)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write the cache {directory}: {' '.join(str(error).split())[:200]}") from error
    advance(manifest.sequences)
    return manifest


class CachedBatches:
    """Rows of a finished cache with what the target thought of them; step t is a pure function of t.

    Two shards are held at a time: rows are read in their order.

    Raises:
        UserError: the cache is unfinished or a shard is corrupt, missing or misaligned.
    """

    def __init__(self, directory: Path, rows: int, temperature: float = 1.0) -> None:
        self.manifest, self.rows, self.temperature = read_manifest(directory), rows, temperature
        if self.manifest.sequences < self.manifest.planned:
            done = f"{self.manifest.sequences} of {self.manifest.planned} sequences"
            raise UserError(f"{directory} is unfinished ({done}); repeat draftlab cache build to go on with it")
        if temperature not in self.manifest.temperatures:
            raise UserError(f"{directory} holds temperatures {list(self.manifest.temperatures)}, not {temperature}")
        for number in range(len(self.manifest.shards)):
            read_shard(directory, self.manifest, number)  # checked before the expensive part, and not held
        self._where = [(s, r) for s, shard in enumerate(self.manifest.shards) for r in range(shard.sequences)]
        self._shard = functools.lru_cache(2)(lambda number: read_shard(directory, self.manifest, number))

    def batch(self, step: int) -> Batch:
        picked = [self._where[(step * self.rows + i) % len(self._where)] for i in range(self.rows)]

        def stack(name: str) -> np.ndarray:
            return np.stack([self._shard(s)[name][r] for s, r in picked])

        logp, tail = stack("topk_logp").astype(np.float32), stack("tail_logp")
        if self.temperature != 1:
            lse = stack("lse")[..., self.manifest.temperatures.index(self.temperature)]
            logp = logp / self.temperature - lse[..., None]
            listed = np.exp(np.logaddexp.reduce(logp, axis=-1))
            tail = np.log(np.clip(1 - listed, 1e-30, None)).astype(np.float32)
        listed = TopLogprobs(stack("topk_id").astype(np.int64), logp.astype(np.float32), tail)
        return Batch(stack("input_ids").astype(np.int64), stack("mask"), listed)


def read_shard(directory: Path, manifest: Manifest, number: int) -> dict[str, np.ndarray]:
    """Raises UserError: missing, corrupt, or its token log-probabilities contradict its lists."""
    file = directory / _name(number)
    try:
        if provenance.file_sha256(file) != manifest.shards[number].sha256:
            raise UserError(f"{file} is corrupt: its checksum is not the manifest's; remove it and build again")
        shard = load_file(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    _check_alignment(shard, file)
    return shard


def _check_alignment(shard: dict[str, np.ndarray], file: Path) -> None:
    counted = shard["mask"] > 0  # [R, T]
    labels = shard["input_ids"][:, 1:][counted]
    ids, logp, came = (shard[name][counted] for name in ("topk_id", "topk_logp", "tok_logp"))
    inside = ids == labels[:, None]  # [n, k]
    listed = inside.any(1)
    matches = np.where(listed, (np.where(inside, logp, 0).sum(1) == came), came <= logp[:, -1])
    if not matches.all():
        raise UserError(
            f"{file}: {np.count_nonzero(~matches)} of {len(matches)} tokens contradict their lists; "
            "the cache belongs to another text or tokenizer, or is shifted"
        )


def _shard(batch: Batch, entries: Entries) -> dict[str, np.ndarray]:
    """Arrays [R, T, ...] of R sequences; positions that do not count are zero."""
    counted = batch.mask > 0

    def spread(flat: np.ndarray) -> np.ndarray:
        out = np.zeros((*counted.shape, *flat.shape[1:]), dtype=flat.dtype)
        out[counted] = flat
        return out

    arrays = {name: spread(getattr(entries, name)) for name in Entries.__slots__}
    return arrays | {"input_ids": batch.ids.astype(np.uint32), "mask": batch.mask.astype(np.float32)}


def _name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def tokenizer_sha(directory: Path) -> str:
    """Of the tokenizer's vocabulary by id, so that a renamed copy is the same."""
    vocab = checkpoint.load_tokenizer(directory).get_vocab()
    return hashlib.sha256(json.dumps(sorted(vocab.items())).encode()).hexdigest()
