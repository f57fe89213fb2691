"""Text to documents, token batches and prompts: deterministic, split by hash, addressable by step.

Sources are named by a short string: ``stdlib`` (the Python standard library on this disk, tests left out),
``stdlib-tests``, ``packages`` (what is installed beside draftlab), ``hf:NAME`` (a hub data set with a ``text``
column), or a path to ``.txt``, ``.py``, ``.jsonl`` or a folder of these. A mixture is
``stdlib=0.5,packages=0.5``.
"""

import functools
import hashlib
import itertools
import json
import math
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftlab.errors import UserError, did_you_mean

Split = Literal["train", "heldout"]
HELDOUT_SHARE = 0.08  # of documents, by hash of their name
HUB_ROWS = 50_000  # of a hub data set: it is streamed, and calibrating and distilling need no more
TEXT_COLUMNS = ("text", "prompt", "question", "content")
TEST_FOLDERS = {"test", "tests", "idle_test"}
NOT_STDLIB = {"site-packages", "dist-packages", "encodings", "pydoc_data"}  # the last two are generated tables


@dataclass(frozen=True, slots=True)
class Document:
    """One text with a name that does not change between machines."""

    name: str
    text: str

    @property
    def heldout(self) -> bool:
        return _unit_hash(self.name) < HELDOUT_SHARE


def parse_mixture(spec: str) -> dict[str, float]:
    """``a=0.7,b=0.3`` or a bare source name -> weights that sum to 1.

    Raises:
        UserError: a weight that is not a positive number.
    """
    weights: dict[str, float] = {}
    for part in spec.split(","):
        name, _, weight = part.strip().partition("=")
        try:
            weights[name] = float(weight) if weight else 1.0
        except ValueError:
            raise UserError(f"data {spec!r}: weight {weight!r} of {name!r} is not a number") from None
        if not name or weights[name] <= 0:
            raise UserError(f"data {spec!r}: want SOURCE or SOURCE=WEIGHT with a weight above 0, got {part!r}")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def documents(source: str, split: Split | None = None) -> list[Document]:
    """The documents of one source, in an order fixed by their names' hash; all of them when split is None.

    Raises:
        UserError: unknown source, unreadable file, or nothing left in the split.
    """
    found = [d for d in _read(source) if split is None or d.heldout == (split == "heldout")]
    if not found:
        raise UserError(f"data {source!r}: no documents" + (f" in its {split} split" if split else ""))
    return sorted(found, key=lambda d: _unit_hash("order:" + d.name))


def take_bytes(docs: list[Document], limit: int) -> list[Document]:
    """The first documents, up to limit bytes of text in all (at least one)."""
    sizes = np.cumsum([len(d.text.encode()) for d in docs])
    return docs[: max(1, int(np.searchsorted(sizes, limit, side="right")))]


def sample_texts(spec: str, limit: int) -> list[str]:
    """Return texts of the train split of a mixture, each source by its weight, up to limit bytes in all."""
    return [
        document.text
        for name, weight in parse_mixture(spec).items()
        for document in take_bytes(documents(name, "train"), int(limit * weight))
    ]


def without_heldout_lines(candidates: list[Document], heldout: list[Document]) -> list[Document]:
    """Drop documents that copy held-out text: more than a fifth of their long lines occur there.

    Packages vendor standard-library modules (setuptools carries distutils), which would flatter held-out numbers.
    """
    seen = {line for d in heldout for line in _long_lines(d.text)}
    return [d for d in candidates if _overlap(_long_lines(d.text), seen) <= 0.2]


def tokenize(docs: list[Document], tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> np.ndarray:
    """Documents as one stream of token ids [N]: bos, text, eos, bos, text, ...; stops once limit is reached."""
    ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    parts: list[np.ndarray] = []
    count = 0
    for start in range(0, len(docs), 64):
        batch = tokenizer([d.text for d in docs[start : start + 64]], verbose=False)["input_ids"]
        parts += [np.asarray(ids + ends, dtype=np.uint32) for ids in batch]
        count = sum(len(p) for p in parts) if limit is None else count + sum(len(i) + 1 for i in batch)
        if limit is not None and count >= limit:
            break
    return np.concatenate(parts)[:limit]


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """A target's k most probable tokens at each position: ids, log-probabilities [B, T, k], log tail mass [B, T]."""

    ids: np.ndarray
    log_p: np.ndarray
    tail: np.ndarray


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids [B, T + 1] and mask [B, T]: 1 where the token after this position is trained on or scored.

    top_logprobs: what a target thought of these positions, where that was kept.
    """

    ids: np.ndarray
    mask: np.ndarray
    top_logprobs: TopLogprobs | None = None

    def rows(self, which: slice) -> "Batch":
        held = self.top_logprobs
        top_logprobs = None if held is None else TopLogprobs(held.ids[which], held.log_p[which], held.tail[which])
        return Batch(self.ids[which], self.mask[which], top_logprobs)

    def split(self, rows: int) -> "list[Batch]":
        """Parts of at most rows rows."""
        return [self.rows(slice(i, i + rows)) for i in range(0, len(self.ids), rows)]

    def packed(self, tokens: int) -> "list[Batch]":
        """Parts of at most that many tokens each (at least one row), long rows together; 0: one part.

        Each is cut where its longest row ends: what comes after the last token that counts decides nothing.
        """
        lengths = np.where(self.mask > 0, np.arange(1, self.mask.shape[1] + 1), 1).max(1)  # [B]
        order = np.argsort(-lengths, kind="stable")
        parts: list[list[int]] = []
        for row in order:
            longest = lengths[parts[-1][0]] if parts else 0
            if parts and (tokens == 0 or (len(parts[-1]) + 1) * longest <= tokens):
                parts[-1].append(int(row))
            else:
                parts.append([int(row)])
        return [self._picked(rows, int(lengths[rows[0]])) for rows in parts]

    def _picked(self, rows: list[int], length: int) -> "Batch":
        held = self.top_logprobs
        cut = (rows, slice(0, length))
        top_logprobs = None if held is None else TopLogprobs(held.ids[cut], held.log_p[cut], held.tail[cut])
        return Batch(self.ids[rows, : length + 1], self.mask[cut], top_logprobs)

    def shard(self, index: int, count: int) -> "Batch":
        """Every count-th row from index on: one process's share; with fewer rows than that, one that does not count."""
        if index < len(self.ids):
            return self.rows(slice(index, None, count))
        spare = self.rows(slice(0, 1))
        return Batch(spare.ids, np.zeros_like(spare.mask), spare.top_logprobs)


def text_batch(rows: list[np.ndarray]) -> Batch:
    """Rows of T + 1 ids, all of which count."""
    ids = np.stack(rows).astype(np.int64)
    return Batch(ids, np.ones((len(ids), ids.shape[1] - 1), dtype=np.float32))


@dataclass(frozen=True, slots=True)
class TokenBatches:
    """Batches of a weighted mixture of token streams; step t is a pure function of (seed, t).

    Each source gives a fixed number of rows to every batch (largest remainder of its weight), and is gone
    through in a fresh random order each epoch, so nothing is repeated before everything was seen.
    """

    streams: dict[str, np.ndarray]
    weights: dict[str, float]
    rows: int
    seq_len: int
    seed: int

    def rows_of(self, weights: dict[str, float] | None = None) -> dict[str, int]:
        """Rows of each source in a batch, by these weights or its own."""
        exact = {name: weight * self.rows for name, weight in (weights or self.weights).items()}
        rows = {name: int(value) for name, value in exact.items()}
        for name in sorted(exact, key=lambda n: rows[n] - exact[n])[: self.rows - sum(rows.values())]:
            rows[name] += 1
        return rows

    def batch(self, step: int) -> Batch:
        return text_batch([self.row(name, step * n + i) for name, n in self.rows_of().items() for i in range(n)])

    def row(self, name: str, index: int) -> np.ndarray:
        """Row index of a source, [seq_len + 1], in the order of its epochs."""
        stream = self.streams[name]
        chunks = (len(stream) - 1) // self.seq_len
        if chunks < 1:
            raise UserError(f"data {name!r}: {len(stream)} tokens, less than one sequence of {self.seq_len}")
        epoch, position = divmod(index, chunks)
        start = _permuted(position, chunks, f"{self.seed}:{name}:{epoch}") * self.seq_len
        return stream[start : start + self.seq_len + 1]


@dataclass(slots=True)
class DynamicBatches:
    """A mixture that gives more rows to the sources that lag behind their reference loss.

    Dynamic batch loading of Sheared-LLaMA (2310.06694, algorithm 1). A batch is a function of its step and of the
    weights set before it, all of which are kept, so that a resumed run reads the same text.
    """

    base: TokenBatches
    heldout: dict[str, list[Batch]]
    reference: dict[str, float]  # cross-entropy that each source is expected to reach
    every: int  # steps between changes of the weights
    phases: list[tuple[int, dict[str, float], dict[str, int]]]  # from this step on: weights; rows read before

    @classmethod
    def start(
        cls, base: TokenBatches, heldout: dict[str, list[Batch]], reference: dict[str, float], every: int
    ) -> "DynamicBatches":
        return cls(base, heldout, reference, every, [(0, base.weights, dict.fromkeys(base.weights, 0))])

    def batch(self, step: int) -> Batch:
        began, weights, read = next(phase for phase in reversed(self.phases) if phase[0] <= step)
        rows = self.base.rows_of(weights).items()
        return text_batch(
            [self.base.row(name, read[name] + (step - began) * n + i) for name, n in rows for i in range(n)]
        )

    def reweigh(self, step: int, losses: dict[str, float]) -> None:
        """From step on: weights x exp(what is missing to the reference), never below a small share."""
        began, weights, read = self.phases[-1]
        rows = self.base.rows_of(weights)
        lagging = {name: w * math.exp(max(0.0, losses[name] - self.reference[name])) for name, w in weights.items()}
        total, floor = sum(lagging.values()), 1e-4
        shares = {name: (1 - floor) * w / total + floor / len(lagging) for name, w in lagging.items()}
        self.phases.append((step, shares, {name: read[name] + (step - began) * n for name, n in rows.items()}))

    def state_dict(self) -> dict[str, object]:
        return {"phases": self.phases}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.phases = state["phases"]


def open_batches(
    spec: str, tokenizer: PreTrainedTokenizerBase, *, rows: int, seq_len: int, steps: int, seed: int
) -> TokenBatches:
    """Training batches of a mixture: its train split, without copies of held-out standard-library files."""
    weights = parse_mixture(spec)
    heldout = documents("stdlib", "heldout") if PYTHON_SOURCES.keys() & weights else []
    streams = {}
    for name, weight in weights.items():
        needed = int(weight * rows * (seq_len + 1) * steps * 1.1) + 2 * seq_len
        streams[name] = tokenize(without_heldout_lines(documents(name, "train"), heldout), tokenizer, needed)
    return TokenBatches(streams, weights, rows, seq_len, seed)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out text as consecutive windows that overlap by one token, so that each token but one is predicted."""

    batches: list[Batch]
    bytes_per_token: float

    @property
    def ids(self) -> np.ndarray:
        """Of all windows, [N, T + 1]."""
        return np.concatenate([batch.ids for batch in self.batches])

    def subset(self, count: int) -> "HeldOut":
        """Return so many of the windows, evenly over all, or all if there are no more; in one batch."""
        ids = self.ids
        count = min(count, len(ids))
        return HeldOut([text_batch([ids[i * len(ids) // count] for i in range(count)])], self.bytes_per_token)

    def batched(self, rows: int) -> "HeldOut":
        """Return the same windows in batches of rows."""
        return HeldOut([part for batch in self.batches for part in batch.split(rows)], self.bytes_per_token)

    def bits_per_byte(self, cross_entropy: float) -> float:
        """From nats per token; bos and eos count as tokens of no bytes."""
        return cross_entropy / math.log(2) / self.bytes_per_token


def open_heldout(spec: str, tokenizer: PreTrainedTokenizerBase, *, rows: int, seq_len: int, most_rows: int) -> HeldOut:
    """The first most_rows windows of the held-out split of a mixture's first source, in batches of rows.

    Raises:
        UserError: not one window of that length.
    """
    source = first_source(spec)
    docs = documents(source, "heldout")
    stream = tokenize(docs, tokenizer)
    count = min(most_rows, (len(stream) - 1) // seq_len)
    if count < 1:
        raise UserError(f"data {source!r}: its held-out split has {len(stream)} tokens, less than {seq_len} in a row")
    windows = [stream[i * seq_len : (i + 1) * seq_len + 1] for i in range(count)]
    batches = [text_batch(windows[i : i + rows]) for i in range(0, count, rows)]
    return HeldOut(batches, sum(len(d.text.encode()) for d in docs) / len(stream))


def heldout_prompts(
    spec: str, tokenizer: PreTrainedTokenizerBase, *, count: int, length: int, seed: int
) -> list[list[int]]:
    """Prompts of exactly length tokens, each the start of a held-out document or, when these run out, of a later part.

    Raises:
        UserError: the held-out split of the mixture's first source is too short for that many.
    """
    source = first_source(spec)
    docs = documents(source, "heldout")
    ids = functools.cache(lambda i: tokenizer(docs[i].text, verbose=False)["input_ids"])
    places = itertools.product(range(0, 16 * length, 2 * length), range(len(docs)))
    starts = (ids(i)[at : at + length] for at, i in places if len(ids(i)) >= at + 2 * length)
    cut = list(itertools.islice(starts, count))
    if len(cut) < count:
        raise UserError(f"data {source!r}: held-out text gives {len(cut)} prompts of {length} tokens, {count} wanted")
    order = np.random.default_rng(seed).permutation(count)
    return [cut[i] for i in order]


def first_source(spec: str) -> str:
    return next(iter(parse_mixture(spec)))


def _read(source: str) -> Iterator[Document]:
    if source in PYTHON_SOURCES:
        return PYTHON_SOURCES[source]()
    if source.startswith("hf:"):
        return _hub_dataset(source.removeprefix("hf:"))
    path = Path(source)
    if not path.exists():
        hint = did_you_mean(source, PYTHON_SOURCES)
        raise UserError(f"data {source!r}: neither a built-in source nor a file or folder here{hint}")
    files = [f for f in sorted(path.rglob("*")) if f.suffix in READERS] if path.is_dir() else [path]
    if path.is_file() and path.suffix not in READERS:
        raise UserError(
            f"data {source!r}: cannot read {path.suffix or 'a file without suffix'}; want {sorted(READERS)}"
        )
    return (doc for file in files for doc in READERS[file.suffix](file))


def _stdlib() -> Iterator[Document]:
    return (d for d in _python_files(_stdlib_root(), "stdlib") if not _is_test(d.name))


def _stdlib_tests() -> Iterator[Document]:
    return (d for d in _python_files(_stdlib_root(), "stdlib") if _is_test(d.name))


def _packages() -> Iterator[Document]:
    return _python_files(Path(sysconfig.get_paths()["purelib"]), "packages")


def _stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _is_test(name: str) -> bool:
    return bool(TEST_FOLDERS & set(Path(name).parts))


def _python_files(root: Path, label: str) -> Iterator[Document]:
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if label == "stdlib" and NOT_STDLIB & set(relative.parts):
            continue
        if 200 <= file.stat().st_size <= 400_000:  # shorter says nothing, longer is generated tables
            yield Document(f"{label}/{relative.as_posix()}", file.read_text("utf-8", errors="replace"))


def _text_file(path: Path) -> Iterator[Document]:
    """A long text becomes documents of some 4,000 characters, cut at blank lines (or at any, where none is blank)."""
    text = path.read_text("utf-8", errors="replace")
    paragraphs, between = re.split(r"\n[ \t]*\n", text), "\n\n"
    if len(paragraphs) == 1:
        paragraphs, between = text.split("\n"), "\n"
    part: list[str] = []
    index = 0
    for paragraph in paragraphs:
        part.append(paragraph)
        if sum(map(len, part)) > 4000:
            yield Document(f"{path.name}:{index}", between.join(part))
            part, index = [], index + 1
    if "".join(part).strip():
        yield Document(f"{path.name}:{index}", between.join(part))


def _json_lines(path: Path) -> Iterator[Document]:
    for number, line in enumerate(path.open(encoding="utf-8"), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not JSON ({error.msg})") from None
        yield Document(f"{path.name}:{number}", _text_of(row, f"{path}:{number}"))


def _hub_dataset(name: str) -> Iterator[Document]:
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split="train", streaming=True)
    except Exception as error:  # the hub client raises many kinds, all of which mean: cannot be had here
        raise UserError(f"data set {name!r} could not be loaded: {error}") from error
    return (Document(f"{name}:{i}", _text_of(row, f"{name}:{i}")) for i, row in enumerate(rows.take(HUB_ROWS)))


def _text_of(row: object, where: str) -> str:
    columns = [c for c in TEXT_COLUMNS if isinstance(row, dict) and isinstance(row.get(c), str)]
    if not columns:
        raise UserError(f"{where}: no text column; want one of {', '.join(TEXT_COLUMNS)}")
    return row[columns[0]]  # type: ignore[index]


def _permuted(position: int, n: int, key: str) -> int:
    """Image of position under a keyed pseudo-random affine permutation of range(n)."""
    step = int(_unit_hash(key + ":step") * n) | 1
    while np.gcd(step, n) != 1:
        step += 2
    return (position * step + int(_unit_hash(key + ":shift") * n)) % n


def _unit_hash(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") / 2**56


def _long_lines(text: str) -> set[str]:
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= 24}


def _overlap(lines: set[str], seen: set[str]) -> float:
    return len(lines & seen) / len(lines) if lines else 0.0


PYTHON_SOURCES = {"stdlib": _stdlib, "stdlib-tests": _stdlib_tests, "packages": _packages}
READERS = {".txt": _text_file, ".md": _text_file, ".py": _text_file, ".jsonl": _json_lines}
