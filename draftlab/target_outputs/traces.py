"""A target's own output on prompts, recorded once: what replay needs, so that the target need not be there.

n tokens of a text, k listed. A trace is a directory: manifest.json, shards of some texts each, the longest prompts
first, and the target's vocabulary. Arrays of a shard are flat over its texts, with offsets.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from draftlab import provenance
from draftlab.engine.batch_generate import Completion
from draftlab.errors import UserError, did_you_mean
from draftlab.files import validation_text
from draftlab.model import checkpoint, saving
from draftlab.prompts import Prompt
from draftlab.sampling import SamplingParams

MANIFEST = "manifest.json"
SHARD_TEXTS = 32  # what a kill loses


Stop = Literal["length", "eos"]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Decoding(_Frozen):
    """How the target decoded; temperature 0 is greedy. top_k 0, top_p 1: nothing is cut."""

    temperature: float = Field(ge=0)
    top_k: int = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    seed: int
    max_new_tokens: int = Field(ge=1)
    eos_ids: tuple[int, ...]

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, max_tokens=self.max_new_tokens,
            seed=self.seed, stop_token_ids=self.eos_ids,
        )  # fmt: skip

    @property
    def plain(self) -> bool:
        """Samples from the model's own distribution, as it is."""
        return self.temperature == 1 and self.top_k == 0 and self.top_p == 1

    def words(self) -> str:
        if self.temperature == 0:
            return "greedy"
        cut = (f", top-k {self.top_k}" if self.top_k else "") + (f", top-p {self.top_p:g}" if self.top_p < 1 else "")
        return f"sampled at temperature {self.temperature:g}{cut}, seed {self.seed}"


class Shard(_Frozen):
    texts: int
    tokens: int
    sha256: str


class Manifest(_Frozen):
    """What a trace holds and what made it.

    logprobs: of each emitted token, in the distribution that was sampled from, or in that of the raw logits.
    """

    version: Literal[1] = 1
    target: str
    target_sha256: str | None  # None: it was somewhere else
    tokenizer_sha256: str
    vocab: int  # logits of the target, padding included
    written_by: str  # draftlab, transformers, imported, or the server's kind and version
    dtype: str
    rows: int  # texts decoded together: in half precision it has a share in the rounding
    decoding: Decoding
    logprobs: Literal["sampled", "raw", "none"]
    top: int  # most probable tokens listed of each position, by raw log-probability
    prompts: str
    prompts_sha256: str
    prompt_tokens: int | None  # prompts were cut to this
    categories: tuple[str, ...]
    planned: int  # texts of a finished trace
    versions: dict[str, str]
    shards: tuple[Shard, ...] = ()

    @property
    def texts(self) -> int:
        return sum(s.texts for s in self.shards)

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.shards)


class Writer(Protocol):
    """A target that writes."""

    def write(self, prompts: list[list[int]], numbers: list[int]) -> list[Completion]:
        """Continue each prompt. numbers: of the prompts in their file; with the seed they decide what is sampled."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One prompt and what the target wrote after it."""

    number: int  # of the prompt in its file
    category: str
    prompt: np.ndarray
    ids: np.ndarray  # [n]
    log_p: np.ndarray  # [n]
    stop: Stop
    top_ids: np.ndarray  # [n, k]
    top_log_p: np.ndarray  # [n, k]


@dataclass(frozen=True, slots=True)
class Trace:
    directory: Path
    manifest: Manifest
    texts: list[Text]  # in the order of their prompts

    def of_category(self, name: str) -> "Trace":
        """Raises UserError: no such category."""
        if name not in self.manifest.categories:
            known = [c for c in self.manifest.categories if c]
            hint = did_you_mean(name, known) if known else "; its prompts have no categories"
            raise UserError(f"{self.directory} has no category {name!r}{hint}")
        return Trace(self.directory, self.manifest, [t for t in self.texts if t.category == name])

    @property
    def vocabulary(self) -> Path:
        """A directory called as the target, with its tokenizer's files and how many logits it has."""
        return self.directory / self.manifest.target


def record(
    out: Path,
    manifest: Manifest,
    prompts: Sequence[Prompt],
    writer: Writer,
    tokenizer_from: Path,
    advance: Callable[[int, str], None],
) -> Manifest:
    """Write what is missing of a trace. A killed recording goes on where it stopped, with the same bytes.

    Raises:
        UserError: out holds something else, or cannot be written.
    """
    claimed = claim(out, manifest)
    order = np.argsort([-len(p.ids) for p in prompts], kind="stable")
    try:
        _write_manifest(out, claimed)
        _keep_vocabulary(out / manifest.target, manifest.vocab, tokenizer_from)
        while claimed.texts < claimed.planned:
            advance(claimed.texts, f"{claimed.tokens:,} tokens")
            numbers = [int(i) for i in order[claimed.texts : claimed.texts + SHARD_TEXTS]]
            picked = [prompts[i] for i in numbers]
            written = writer.write([p.ids for p in picked], numbers)
            arrays = _arrays(picked, numbers, written, manifest.categories)
            claimed = _add_shard(out, claimed, arrays)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write the trace {out}: {' '.join(str(error).split())[:200]}") from error
    advance(claimed.texts, f"{claimed.tokens:,} tokens")
    return claimed


def claim(out: Path, manifest: Manifest) -> Manifest:
    """The manifest of the unfinished trace in out, or this one where there is none; nothing is written.

    Raises:
        UserError: out holds another trace, or something else.
    """
    if not (out / MANIFEST).exists():
        checkpoint.check_free(out, force=False)
        return manifest
    held = read_manifest(out)
    ours, theirs = (json.loads(m.model_dump_json(exclude={"shards", "versions"})) for m in (manifest, held))
    differ = next((name for name in ours if ours[name] != theirs[name]), None)
    if differ is not None:
        raise UserError(
            f"{out} holds another trace: its {differ} is {_short(theirs[differ])}, not {_short(ours[differ])}; "
            "choose another --out, or remove it"
        )
    return held


def read_manifest(directory: Path) -> Manifest:
    try:
        return Manifest.model_validate_json((directory / MANIFEST).read_text())
    except OSError:
        raise UserError(f"{directory} is not a trace: it has no {MANIFEST}; draftlab trace record makes one") from None
    except ValidationError as error:
        raise UserError(f"{directory / MANIFEST} is not that of a trace: {validation_text(error)[:200]}") from None


def read_trace(directory: Path) -> Trace:
    """All of a finished trace.

    Raises:
        UserError: not a trace, an unfinished one, or a shard that is missing or corrupt.
    """
    manifest = read_manifest(directory)
    if manifest.texts < manifest.planned:
        done = f"{manifest.texts} of {manifest.planned} texts"
        raise UserError(f"{directory} is unfinished ({done}); repeat draftlab trace record to go on with it")
    texts = [text for i in range(len(manifest.shards)) for text in read_shard(directory, manifest, i)]
    return Trace(directory, manifest, sorted(texts, key=lambda t: t.number))


def read_shard(directory: Path, manifest: Manifest, number: int) -> list[Text]:
    """Raises UserError: missing, or not what the manifest says."""
    file = directory / _name(number)
    try:
        if provenance.file_sha256(file) != manifest.shards[number].sha256:
            raise UserError(f"{file} is corrupt: its checksum is not the manifest's; remove the trace and record again")
        arrays = load_file(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    tokens = list(zip(*_parts(arrays, "offsets", "ids", "log_p", "top_ids", "top_log_p"), strict=True))
    prompts = _parts(arrays, "prompt_offsets", "prompt_ids")[0]
    return [
        Text(
            number=int(arrays["number"][i]), category=manifest.categories[arrays["category"][i]], prompt=prompts[i],
            ids=ids, log_p=log_p, stop="eos" if arrays["eos"][i] else "length", top_ids=top_ids, top_log_p=top_log_p,
        )
        for i, (ids, log_p, top_ids, top_log_p) in enumerate(tokens)
    ]  # fmt: skip


def _arrays(
    prompts: list[Prompt], numbers: list[int], written: list[Completion], categories: tuple[str, ...]
) -> dict[str, np.ndarray]:
    def offsets(rows: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
        return np.cumsum([0, *map(len, rows)], dtype=np.int64)

    return {
        "number": np.array(numbers, dtype=np.int64),
        "category": np.array([categories.index(p.category) for p in prompts], dtype=np.uint16),
        "eos": np.array([w.finish_reason == "stop" for w in written], dtype=np.uint8),
        "prompt_offsets": offsets([p.ids for p in prompts]),
        "prompt_ids": np.concatenate([p.ids for p in prompts]).astype(np.uint32),
        "offsets": offsets([w.ids for w in written]),
        "ids": np.concatenate([w.ids for w in written]).astype(np.uint32),
        "log_p": np.concatenate([w.logprobs for w in written]).astype(np.float32),
        "top_ids": np.concatenate([w.top_ids for w in written]).astype(np.uint32),
        "top_log_p": np.concatenate([w.top_logprobs for w in written]).astype(np.float32),
    }


def _add_shard(out: Path, manifest: Manifest, arrays: dict[str, np.ndarray]) -> Manifest:
    name = _name(len(manifest.shards))
    writing = out / f".{name}.writing"
    save_file(arrays, writing)
    shard = Shard(texts=len(arrays["number"]), tokens=len(arrays["ids"]), sha256=provenance.file_sha256(writing))
    writing.rename(out / name)
    grown = manifest.model_copy(update={"shards": (*manifest.shards, shard)})
    _write_manifest(out, grown)
    return grown


def _write_manifest(out: Path, manifest: Manifest) -> None:
    out.mkdir(parents=True, exist_ok=True)
    writing = out / f".{MANIFEST}.writing"
    writing.write_text(manifest.model_dump_json(indent=1))
    writing.rename(out / MANIFEST)


def _keep_vocabulary(folder: Path, vocab: int, tokenizer_from: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in saving.TOKENIZER_FILES:
        if (tokenizer_from / name).is_file():
            shutil.copyfile(tokenizer_from / name, folder / name)
    # the config decides the tokenizer's class, and the class adds tokens of its own
    there = (tokenizer_from / "config.json").is_file()
    config = checkpoint.read_config(tokenizer_from) if there else {}
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab}))


def _parts(arrays: dict[str, np.ndarray], offsets: str, *names: str) -> list[list[np.ndarray]]:
    """Of each flat array its texts."""
    inner = arrays[offsets][1:-1]
    return [np.split(arrays[name], inner) for name in names]


def _name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else text[:56] + " ..."
