"""A target's distributions on disk: its k most probable tokens and the exact mass of the rest, never renormalised.

n predicted tokens, k listed ones, T temperatures. A cache is a directory: manifest.json, and shards of a few hundred
sequences each. Entry i of a shard belongs to the token that it predicts, so the log-probability of the token that
came must agree with the list, which is how a shifted or foreign cache is found when it is opened.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from draftlab import checkpoint, llama, provenance
from draftlab.console import progress
from draftlab.data import Batch, HeldOut, Listed, open_batches, open_heldout
from draftlab.distill.fused import Dense
from draftlab.distill.teacher import LocalTeacher, logits_of
from draftlab.distill.text import GeneratedRows, generate_rows
from draftlab.errors import UserError
from draftlab.shape import validation_text

MANIFEST = "manifest.json"
TEMPERATURES = (0.6, 0.8, 1.0, 1.5, 2.0)
VERIFIED = 64  # sequences that are looked at again
TOLERANCE = 0.25  # nats by which a listed log-probability may differ when it is computed anew in bf16
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
    target: str
    target_sha256: str
    tokenizer_sha256: str
    vocab: int
    k: int
    temperatures: tuple[float, ...]
    logprobs: str  # raw: of the target's own logits, before any sampling setting
    data: str
    text: str  # data: the text itself; target: what the target wrote after its prompts
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
    """What to keep of which target on which text."""

    target: Path
    data: str
    text: Literal["data", "target"]
    sequences: int
    seq_len: int
    prompt_tokens: int
    temperature: float
    k: int
    seed: int
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """worst: largest difference of a listed log-probability; same_top: share of equal most probable tokens."""

    shards: int
    sequences: int
    worst: float
    same_top: float

    @property
    def good(self) -> bool:
        return self.worst < TOLERANCE and self.same_top > 0.98

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "good": self.good}


@dataclass(frozen=True, slots=True)
class Entries:
    """What is kept of the tokens of some sequences: flat over the predicted tokens."""

    topk_id: np.ndarray  # u32 [n, k], the most probable first
    topk_logp: np.ndarray  # fp16 [n, k]
    tail_logp: np.ndarray  # fp32 [n]
    tok_logp: np.ndarray  # fp16 [n]
    lse: np.ndarray  # fp32 [n, T]: log-sum-exp at T less that at 1 over T, so that log p_T = log p / T - lse


def entries(teacher: Dense, labels: Tensor, k: int, rows: int = 256) -> Entries:
    """From the target's hidden states of n positions and the tokens that came, [n]."""
    parts: list[list[np.ndarray]] = []
    for start in range(0, len(labels), rows):
        log_p = teacher.log_probs(slice(start, start + rows), 1.0)  # [c, V]
        values, ids = log_p.topk(k)
        tail = log_p.scatter(1, ids, -torch.inf).logsumexp(-1).clamp_min(-80)
        came = log_p.gather(1, labels[start : start + rows, None]).squeeze(1)
        lse = torch.stack([(log_p / t).logsumexp(-1) for t in TEMPERATURES], 1)
        columns = (ids.int(), values.half(), tail, came.half(), lse)
        parts.append([c.cpu().numpy() for c in columns])
    joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Entries(joined[0].astype(np.uint32), *joined[1:])


def build(how: Building, out: Path) -> Manifest:
    """Write the cache and, in its folder heldout, a small one of held-out text, in shards of SHARD_ROWS sequences."""
    tokenizer = checkpoint.load_tokenizer(how.target)
    batches = open_batches(
        how.data, tokenizer, rows=SHARD_ROWS, seq_len=how.seq_len, steps=-(-how.sequences // SHARD_ROWS), seed=how.seed
    )
    held = open_heldout(how.data, tokenizer, rows=HELDOUT_ROWS, seq_len=how.seq_len, most_rows=HELDOUT_ROWS).batches[0]
    teacher = _teacher(how.target, how.device)
    writer = llama.load(how.target, torch.float32, how.device) if how.text == "target" else None
    eos = checkpoint.special_ids(tokenizer)["eos"]

    def text(batch: Batch, number: int) -> Batch:
        if writer is None:
            return batch
        prompt, length = how.prompt_tokens, batch.ids.shape[1] - how.prompt_tokens
        ids = generate_rows(
            writer, batch.ids[:, :prompt].astype(np.uint32), length=length, temperature=how.temperature,
            seed=how.seed * 100_003 + number, rows=64, advance=lambda _: None,
        )  # fmt: skip
        return GeneratedRows(ids, prompt, eos, len(ids)).batch(0)

    def rows(number: int) -> Batch:
        left = how.sequences - number * SHARD_ROWS
        return text(batches.batch(number).rows(slice(0, left)), number)

    manifest = Manifest(
        target=how.target.name, target_sha256=provenance.fingerprint(how.target),
        tokenizer_sha256=tokenizer_sha(how.target), vocab=checkpoint.read_shape(how.target).vocab, k=how.k,
        temperatures=TEMPERATURES, logprobs="raw", data=how.data, text=how.text, seq_len=how.seq_len, seed=how.seed,
        planned=how.sequences,
    )  # fmt: skip
    few = manifest.model_copy(update={"planned": len(held.ids)})
    write_shards(out / HELDOUT, few, lambda number: text(held, -1 - number), teacher.look, lambda _: None)
    with progress("cache", how.sequences) as advance:
        return write_shards(out, manifest, rows, teacher.look, lambda done: advance(done, "sequences"))


def verify(directory: Path, target: Path, seed: int, device: torch.device) -> Verified:
    """Read every shard, and score up to VERIFIED sequences again.

    Raises:
        UserError: a corrupt or misaligned shard, or another tokenizer.
    """
    manifest = read_manifest(directory)
    check_tokenizer(manifest, target)
    shards = [read_shard(directory, manifest, i) for i in range(len(manifest.shards))]
    where = [(s, r) for s, shard in enumerate(shards) for r in range(len(shard["input_ids"]))]
    order = np.random.default_rng(seed).permutation(len(where))[:VERIFIED]
    teacher = _teacher(target, device)
    worst, same, count = 0.0, 0, 0
    for s, r in (where[i] for i in order):
        shard = shards[s]
        batch = Batch(shard["input_ids"][r : r + 1].astype(np.int64), shard["mask"][r : r + 1])
        log_p = teacher.look(batch).log_probs(slice(None), 1.0).cpu()  # [n, V]
        counted = shard["mask"][r] > 0
        ids = torch.from_numpy(shard["topk_id"][r][counted].astype(np.int64))
        kept = torch.from_numpy(shard["topk_logp"][r][counted].astype(np.float32))
        probable = kept > -8  # below, rounding of the target's own arithmetic is all there is
        worst = max(worst, float(((log_p.gather(1, ids) - kept).abs() * probable).max()))
        same += int((log_p.argmax(-1) == ids[:, 0]).sum())
        count += len(ids)
    return Verified(shards=len(shards), sequences=len(order), worst=worst, same_top=same / max(1, count))


def _teacher(target: Path, device: torch.device) -> LocalTeacher:
    """The target as it is stored."""
    model = checkpoint.load_model(target, checkpoint.stored_dtype(target), device).eval()
    return LocalTeacher(model, logits_of(model), device)


def open_cache(directory: Path, draft: Path, *, rows: int, temperature: float) -> tuple["CachedBatches", HeldOut]:
    """Training batches and the held-out text of a cache, for a draft.

    Raises:
        UserError: another vocabulary, an unfinished or corrupt cache, or a temperature that it does not hold.
    """
    check_tokenizer(read_manifest(directory), draft)
    batches = CachedBatches(directory, rows, temperature)
    held = CachedBatches(directory / HELDOUT, HELDOUT_ROWS, temperature).batch(0)
    text = checkpoint.load_tokenizer(draft).batch_decode(held.ids)
    size = sum(len(t.encode()) for t in text) / held.ids.size
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
    rows: Callable[[int], Batch],
    look: Callable[[Batch], Dense],
    advance: Callable[[int], None],
) -> Manifest:
    """Build what is missing: rows(i) are the sequences of shard i. A killed build goes on where it stopped.

    Raises:
        UserError: directory holds another cache, or cannot be written.
    """
    if (directory / MANIFEST).exists():
        held = read_manifest(directory)
        if held.model_copy(update={"shards": ()}) != manifest:
            raise UserError(f"{directory} holds another cache; choose another --out, or remove it")
        manifest = held
    try:
        directory.mkdir(parents=True, exist_ok=True)
        while manifest.sequences < manifest.planned:
            advance(manifest.sequences)
            number = len(manifest.shards)
            batch = rows(number)
            tensors = _shard(batch, look(batch), manifest.k)
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
        self._shards = [read_shard(directory, self.manifest, i) for i in range(len(self.manifest.shards))]
        self._where = [(s, r) for s, shard in enumerate(self._shards) for r in range(len(shard["input_ids"]))]

    def batch(self, step: int) -> Batch:
        picked = [self._where[(step * self.rows + i) % len(self._where)] for i in range(self.rows)]

        def stack(name: str) -> np.ndarray:
            return np.stack([self._shards[s][name][r] for s, r in picked])

        logp, tail = stack("topk_logp").astype(np.float32), stack("tail_logp")
        if self.temperature != 1:
            lse = stack("lse")[..., self.manifest.temperatures.index(self.temperature)]
            logp = logp / self.temperature - lse[..., None]
            listed = np.exp(np.logaddexp.reduce(logp, axis=-1))
            tail = np.log(np.clip(1 - listed, 1e-30, None)).astype(np.float32)
        listed = Listed(stack("topk_id").astype(np.int64), logp.astype(np.float32), tail)
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


def _shard(batch: Batch, teacher: Dense, k: int) -> dict[str, np.ndarray]:
    """Arrays [R, T, ...] of R sequences; positions that do not count are zero."""
    counted = batch.mask > 0
    labels = torch.from_numpy(batch.ids[:, 1:][counted])
    found = entries(teacher, labels.to(teacher.hidden.device), k)

    def spread(flat: np.ndarray) -> np.ndarray:
        out = np.zeros((*counted.shape, *flat.shape[1:]), dtype=flat.dtype)
        out[counted] = flat
        return out

    arrays = {name: spread(getattr(found, name)) for name in Entries.__slots__}
    return arrays | {"input_ids": batch.ids.astype(np.uint32), "mask": batch.mask.astype(np.float32)}


def _name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def tokenizer_sha(directory: Path) -> str:
    """Of the tokenizer's vocabulary by id, so that a renamed copy is the same."""
    vocab = checkpoint.load_tokenizer(directory).get_vocab()
    return hashlib.sha256(json.dumps(sorted(vocab.items())).encode()).hexdigest()
