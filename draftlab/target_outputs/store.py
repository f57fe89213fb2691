"""Stores of target outputs on disk, to distil from and to replay drafts on without the target.

A store is a directory with manifest.json, shards and the target's vocabulary. A store to distil from also has heldout/,
a small store of held-out text. A shard has the concatenated arrays of its R sequences, and their offsets. When a store
is read, the log-probability of each token must agree with the list of most probable tokens at its position. This check
detects outputs that are shifted or belong to another text.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from draftlab.config.outputs import MANIFEST, check_store
from draftlab.config.shared import LossOn
from draftlab.console import note, note_once
from draftlab.dates import resume_date
from draftlab.errors import UserError, one_line
from draftlab.model import checkpoint, saving
from draftlab.reading import FileModel, read_model, reading
from draftlab.runs import provenance
from draftlab.runs.atomic import (
    check_free,
    differing,
    remove_temporary_files,
    replacing,
    write_atomic,
)
from draftlab.sampling import SamplingParams
from draftlab.target_outputs.outputs import StoredLogprobs, TargetOutput
from draftlab.trust import folder_name

LOOP = 0.5  # a text with a smaller fraction of distinct 4-grams is mostly a repetition loop


def distinct_4grams(texts: Sequence[Sequence[int]]) -> float:
    """Return the fraction of distinct 4-grams: their number divided by the number of all 4-grams.

    Both numbers are counted in each text, and summed. If no text has a 4-gram twice, the fraction is 1.
    """
    distinct = total = 0
    for tokens in texts:
        grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
        distinct += len(set(grams))
        total += len(grams)
    return distinct / total if total else 1.0


HELDOUT = "heldout"
OFF_ONE = 0.02  # rounding to fp16 may move the sum of probabilities this far from 1
Logprobs = Literal["sampled", "raw", "none"]
TOP: dict[str, type] = {  # arrays of StoredLogprobs in a shard, in the order of its fields
    "top_ids": np.uint32,
    "top_logprobs": np.float16,
    "rest_logprob": np.float32,
    "token_logprob": np.float16,
    "normalizers": np.float32,
}
DTYPES: dict[str, type] = {  # of all arrays in a shard
    **dict.fromkeys(("number", "conversation", "prompt_offsets", "offsets"), np.int64),
    "category": np.uint16,
    **dict.fromkeys(("stopped", "counted"), np.uint8),
    **dict.fromkeys(("prompt_ids", "ids"), np.uint32),
    "logprobs": np.float32,
    **TOP,
}
FolderName = Annotated[str, AfterValidator(lambda name: folder_name(name, "the target of stored outputs"))]


class Shard(FileModel):
    sequences: NonNegativeInt
    tokens: NonNegativeInt
    sha256: str
    left_out: NonNegativeInt = 0  # sequences that a server could not answer
    # largest token id in texts and lists; None in stores that were built before this field
    largest_id: NonNegativeInt | None = None


class TargetInfo(FileModel):
    """Facts about a target that are stored with its outputs.

    logprobs: Distribution of the stored log-probabilities of the tokens. "sampled": the distribution that the tokens
    were sampled from. "raw": the softmax of the unmodified logits. "none": they are not stored.
    """

    source: str  # "draftlab", the server's kind and version, or "log"
    target: FolderName
    target_sha256: str | None  # None if the weights were on a server
    vocab: PositiveInt  # number of ids; further logits are padding
    dtype: str
    batch_size: int  # prompts decoded per batch, which affects rounding in half precision
    logprobs: Logprobs
    temperatures: tuple[float, ...]


class Manifest(TargetInfo):
    """The content of manifest.json: the contents and the origin of a store."""

    version: Literal[1] = 1
    tokenizer_sha256: str
    text: Literal["data", "target"]
    data: str
    chat: bool = False  # whether prompts are in the tokenizer's chat template
    data_sha256: str | None = None  # hash of a server's log; in older stores, of the prompt file
    # hash of the prompts that the target answers, without those that are held out (see Prompts.selection)
    selection: str | None = None
    # which tokens of conversations to train on; only these have lists of most probable tokens
    loss_on: LossOn | None = None
    # whether the held-out texts share no prompt with the other texts, or were chosen by their numbers, as in 0.1
    split: Literal["content", "number"] = "number"
    prompt_tokens: int | None = None  # number of tokens to which prompts were cut
    categories: tuple[str, ...] = ("",)
    # None if the target did not write the text, or if its sampling is unknown
    sampling: SamplingParams | None = None
    top_logprobs: NonNegativeInt
    # length of rows in distillation; None: the length of the longest sequence
    seq_len: PositiveInt | None = None
    seed: int
    planned: PositiveInt  # number of sequences in the finished store
    # fingerprints of the text that was read, by path or name
    inputs: dict[str, str] = Field(default={})
    # date of the first start, if the chat template asks for a date
    date: str = ""
    versions: dict[str, str]
    shards: tuple[Shard, ...] = ()

    @property
    def sequences(self) -> int:
        return sum(s.sequences for s in self.shards)

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.shards)

    @property
    def left_out(self) -> int:
        return sum(s.left_out for s in self.shards)

    @property
    def stored_selection(self) -> str | None:
        """Return the selection, or None if it is unknown, as it is where a server refused some of the prompts."""
        return None if self.left_out else self.selection

    @property
    def finished(self) -> bool:
        return self.sequences + self.left_out == self.planned


@dataclass(frozen=True, slots=True)
class StoredOutputs:
    """All sequences of a finished store, in the order of their numbers."""

    directory: Path
    manifest: Manifest
    outputs: list[TargetOutput]

    @property
    def vocabulary(self) -> Path:
        """Return the store's folder with the target's tokenizer and number of logits. Its name is the target's."""
        return self.directory / self.manifest.target

    @property
    def target(self) -> Path | None:
        """Return the checkpoint of the target, as the store's record names it, or None if it is not here any more."""
        record = provenance.read_record(self.directory)
        if record is None or self.manifest.target_sha256 is None:
            return None
        named = [n for n, sha in record.inputs.items() if sha == self.manifest.target_sha256]
        return next((path for path in map(Path, named) if path.is_dir()), None)


def write_store(
    out: Path,
    manifest: Manifest,
    shard: Callable[[int], Sequence[TargetOutput | None]],
    *,
    tokenizer: Path,
    heldout: Callable[[], Sequence[TargetOutput | None]] | None = None,
) -> Manifest:
    """Write the missing shards of a store, and return its manifest. A killed build resumes, and writes the same bytes.

    Args:
        shard: Function that returns the sequences of the shard with a given number. None: the sequence is left out.
        tokenizer: Directory of the target's tokenizer, which is copied into the store.
        heldout: Function that returns the sequences of held-out text. None for a store without held-out text.

    Raises:
        UserError: The directory has other files or another store, or cannot be written. Or all first or all held-out
            sequences are left out.
    """
    manifest = _claim(out, manifest)
    if manifest.finished:
        return manifest
    # run the target before anything is written, so that a failure leaves no files
    apart = None
    if heldout is not None and not (out / HELDOUT / MANIFEST).exists():
        apart = heldout()
    outputs = shard(len(manifest.shards))
    needed = [rows for rows in (apart, None if manifest.shards else outputs) if rows is not None]
    for rows in needed:
        if all(row is None for row in rows):
            raise UserError(
                f"none of {len(rows)} sequences can be stored, because their answers lack log-probabilities; use vLLM "
                "or SGLang, or other prompts"
            )
    try:
        _write_manifest(out, manifest)
        _copy_vocabulary(out / manifest.target, tokenizer)
        if apart is not None:
            small = manifest.model_copy(update={"planned": len(apart), "shards": (), "selection": None})
            _add_shard(out / HELDOUT, small, apart)
        while True:
            manifest = _add_shard(out, manifest, outputs)
            left_out = f", {manifest.left_out:,} left out" if manifest.left_out else ""
            note(
                f"stored {manifest.sequences:,} of {manifest.planned:,} sequences, {manifest.tokens:,} tokens{left_out}"
            )
            if manifest.finished:
                return manifest
            outputs = shard(len(manifest.shards))
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {out}: {one_line(error)}") from error


def read_manifest(directory: Path) -> Manifest:
    check_store(directory)
    return read_model(Manifest, directory / MANIFEST)


def resume_date_of(out: Path) -> None:
    """If a directory has a store, use the date at which its build started, so that chat templates print that date."""
    if (out / MANIFEST).exists() and (date := read_manifest(out).date):
        resume_date(date)


def finished_manifest(directory: Path) -> Manifest:
    """Return the manifest of a finished store. Raises UserError: there is no store, or the store is unfinished."""
    manifest = read_manifest(directory)
    if not manifest.finished:
        done = f"{manifest.sequences} of {manifest.planned} sequences"
        raise UserError(f"{directory} is unfinished ({done}); repeat the same draftlab outputs build to resume it")
    return manifest


def heldout_part(directory: Path) -> Path | None:
    """Return the directory of a store's held-out texts, or None if the store has no held-out texts.

    Print a note if the texts were chosen by their numbers, so that the same prompts may be in the training text.
    """
    part = directory / HELDOUT
    if not (part / MANIFEST).exists():
        return None
    if read_manifest(part).split == "number":
        note_once(
            f"{directory}: an earlier version chose its held-out texts by their numbers, so their prompts may be in "
            "its training text, too; build the store again to hold out unseen prompts"
        )
    return part


def read_store(directory: Path) -> StoredOutputs:
    """Read all sequences of a store.

    Raises:
        UserError: The store is unfinished, or a shard is missing, corrupt or misaligned.
    """
    manifest = finished_manifest(directory)
    outputs = sorted(_all(directory, manifest), key=lambda output: output.number)
    return StoredOutputs(directory, manifest, outputs)


def read_texts(directory: Path) -> list[TargetOutput]:
    """Return the outputs of a store in the order in which they were written, without log-probabilities.

    Raises:
        UserError: See read_store.
    """
    outputs = _all(directory, finished_manifest(directory))
    return [replace(output, logprobs=None, top=None) for output in outputs]


def _all(directory: Path, manifest: Manifest) -> Iterator[TargetOutput]:
    for number in range(len(manifest.shards)):
        yield from read_shard(directory, manifest, number)


def read_shard(directory: Path, manifest: Manifest, number: int) -> list[TargetOutput]:
    """Return the outputs in a shard. Raises UserError: the shard is missing or damaged, or has impossible values."""
    file = directory / _shard_name(number)
    with reading(file):
        if provenance.file_sha256(file) != manifest.shards[number].sha256:
            raise UserError(
                f"{file} is corrupt: its checksum differs from the checksum in the manifest; remove the store and "
                "build it again"
            )
        if not manifest.shards[number].sequences:
            return []
        arrays = load_file(file)
        _check(arrays, manifest, manifest.shards[number].sequences)
        return _outputs(arrays, manifest)


def describe(directory: Path) -> dict[str, object]:
    """Return facts about the texts that the target wrote. For an unfinished store or a store of data, return {}."""
    manifest = read_manifest(directory)
    if not manifest.finished or manifest.text == "data":
        return {}
    outputs = read_store(directory).outputs
    lengths = [len(o.prompt) for o in outputs]
    return {
        "categories": dict(sorted(Counter(o.category for o in outputs if o.category).items())),
        "prompt_lengths": [min(lengths), max(lengths)],
        "stopped_at_eos": sum(o.finish_reason == "stop" for o in outputs),
        "degenerate_texts": sum(distinct_4grams([o.ids.tolist()]) < LOOP for o in outputs),
    }


def check_tokenizer(directory: Path, model: Path) -> None:
    """Check that a store was made with a model's vocabulary, and has no ids without a row in the model's embedding.

    If the store's target has more ids than the model, the largest id of each shard decides.

    Raises:
        UserError: The store is unfinished, its tokenizer is another, or an id has no row.
    """
    manifest = finished_manifest(directory)
    if vocabulary_sha256(model) != manifest.tokenizer_sha256:
        raise UserError(
            f"the outputs have token ids of {manifest.target}, but {model} has another tokenizer; use a model "
            "with the same vocabulary"
        )
    rows = logits_of(model)
    if manifest.vocab <= rows:
        return
    for part in (directory, directory / HELDOUT):
        if not (part / MANIFEST).exists():
            continue
        manifest = finished_manifest(part)
        largest_ids = [shard.largest_id for shard in manifest.shards]
        if all(largest is not None and largest < rows for largest in largest_ids):
            continue
        outputs = _all(part, manifest)  # to name the text
        for output in outputs:
            if (largest := _largest_id(output)) >= rows:
                raise UserError(
                    f"text {output.number} of {part} has the token id {largest}, but {model} embeds only the ids below "
                    f"{rows:,}; use outputs of a target with the same vocabulary"
                )


def _largest_id(output: TargetOutput) -> int:
    listed = () if output.top is None else (output.top.ids,)
    return max(int(ids.max(initial=0)) for ids in (output.prompt, output.ids, *listed))


def vocabulary_sha256(directory: Path) -> str:
    """Return the SHA-256 of a tokenizer's tokens and ids. A copy under another name has the same hash."""
    vocab = checkpoint.load_tokenizer(directory).get_vocab()
    return hashlib.sha256(json.dumps(sorted(vocab.items())).encode()).hexdigest()


def _claim(out: Path, manifest: Manifest) -> Manifest:
    """Return the manifest of the store in `out`. If `out` is free, return `manifest`.

    Raises:
        UserError: `out` has other files, or a store with other settings.
    """
    remove_temporary_files(out)
    if not (out / MANIFEST).exists():
        check_free(out, force=False, remedy=", or remove it")
        return manifest
    existing = read_manifest(out)
    if existing.finished:  # it keeps its split, whatever that is
        manifest = manifest.model_copy(update={"split": existing.split})
    new, old = (
        m.model_dump(mode="json", exclude={"shards", "versions", "inputs", "date"}) for m in (manifest, existing)
    )
    changed = differing(old, new)
    if not {"data", "target"} & set(changed):
        read, was_read = ({m.target: m.target_sha256, **m.inputs} for m in (manifest, existing))
        moved = differing(was_read, read)
        # the contents count, whatever path leads to them
        if moved and sorted(map(str, read.values())) != sorted(map(str, was_read.values())):
            name = moved[0]
            raise UserError(
                f"{out} has outputs of a build that read another {name}, because its content has changed; choose "
                "another --out, or remove that directory"
            )
    if manifest.selection is not None and existing.selection is None:
        raise UserError(
            f"{out} has outputs of an earlier version, which did not record the selection of its prompts; choose "
            "another --out, or remove that directory"
        )
    if changed:
        name = changed[0]
        raise UserError(
            f"{out} has outputs of another build, with {name} = {one_line(repr(old[name]), 60)} instead of "
            f"{one_line(repr(new[name]), 60)}; choose another --out, or remove that directory"
        )
    # left by a build that was killed while safetensors wrote a shard
    for left in out.rglob(".tmp*"):
        left.unlink()
    return existing


def _add_shard(out: Path, manifest: Manifest, rows: Sequence[TargetOutput | None]) -> Manifest:
    name = _shard_name(len(manifest.shards))
    outputs = [row for row in rows if row is not None]
    out.mkdir(parents=True, exist_ok=True)
    arrays = {"ids": np.empty(0, np.uint32)}
    if outputs:
        arrays = _arrays(outputs, manifest)
        with reading(f"the output of {manifest.target} cannot be stored"):
            _check(arrays, manifest, len(outputs))
    with replacing(out / name) as part:
        save_file(arrays, part)
        sha256 = provenance.file_sha256(part)
    shard = Shard(
        sequences=len(outputs),
        tokens=len(arrays["ids"]),
        sha256=sha256,
        left_out=len(rows) - len(outputs),
        largest_id=max(map(_largest_id, outputs), default=0),
    )
    grown = manifest.model_copy(update={"shards": (*manifest.shards, shard)})
    _write_manifest(out, grown)
    return grown


def _write_manifest(out: Path, manifest: Manifest) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / MANIFEST, manifest.model_dump_json(indent=1))


def _copy_vocabulary(folder: Path, tokenizer: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in saving.tokenizer_files(tokenizer):
        write_atomic(folder / name, (tokenizer / name).read_bytes())
    # config.json is needed too, because it decides the tokenizer's class, which may add tokens
    config = checkpoint.read_config(tokenizer) if (tokenizer / "config.json").is_file() else {}
    write_atomic(folder / "config.json", json.dumps(config | {"vocab_size": logits_of(tokenizer)}))


def logits_of(directory: Path) -> int:
    """Return the number of logits of a checkpoint, or the number of ids if the directory has only a tokenizer."""
    if (directory / "config.json").is_file():
        return checkpoint.vocab_size(directory)
    return len(checkpoint.load_tokenizer(directory))


def _arrays(outputs: Sequence[TargetOutput], manifest: Manifest) -> dict[str, np.ndarray]:
    def offsets(rows: Sequence[np.ndarray]) -> np.ndarray:
        return np.cumsum([0, *map(len, rows)], dtype=np.int64)

    arrays: dict[str, Any] = {
        "number": [o.number for o in outputs],
        "category": [manifest.categories.index(o.category) for o in outputs],
        "stopped": [o.finish_reason == "stop" for o in outputs],
        "prompt_offsets": offsets([o.prompt for o in outputs]),
        "prompt_ids": np.concatenate([o.prompt for o in outputs]),
        "offsets": offsets([o.ids for o in outputs]),
        "ids": np.concatenate([o.ids for o in outputs]),
    }
    numbers = [o.conversation for o in outputs if o.conversation is not None]
    if len(numbers) == len(outputs):
        arrays["conversation"] = numbers
    if any(o.counted is not None for o in outputs):
        marks = [np.ones(len(o.ids), bool) if o.counted is None else o.counted for o in outputs]
        arrays["counted"] = np.concatenate(marks)
    if manifest.logprobs != "none":
        arrays["logprobs"] = np.concatenate([o.logprobs for o in outputs if o.logprobs is not None])
    if manifest.top_logprobs:
        top = StoredLogprobs.joined([o.top for o in outputs if o.top is not None])
        columns = (getattr(top, name) for name in StoredLogprobs.__slots__)
        arrays |= dict(zip(TOP, columns, strict=True))
    return {name: np.asarray(values).astype(DTYPES[name]) for name, values in arrays.items()}


def _outputs(arrays: dict[str, np.ndarray], manifest: Manifest) -> list[TargetOutput]:
    prompts = np.split(arrays["prompt_ids"], arrays["prompt_offsets"][1:-1])
    bounds = arrays["offsets"]
    counted = arrays.get("counted")
    listed = bounds if counted is None else np.concatenate([[0], np.cumsum(counted)])[bounds]
    logprobs = arrays.get("logprobs")
    talks = arrays.get("conversation")
    top = None
    if manifest.top_logprobs:
        columns = (arrays[name] for name in TOP)
        top = StoredLogprobs(*(c if c.dtype == np.uint32 else c.astype(np.float32) for c in columns))
    outputs = []
    for i, prompt in enumerate(prompts):
        part = slice(int(bounds[i]), int(bounds[i + 1]))
        lists = slice(int(listed[i]), int(listed[i + 1]))
        outputs.append(
            TargetOutput(
                number=int(arrays["number"][i]),
                category=manifest.categories[arrays["category"][i]],
                conversation=None if talks is None else int(talks[i]),
                prompt=prompt,
                ids=arrays["ids"][part],
                finish_reason="stop" if arrays["stopped"][i] else "length",
                logprobs=None if logprobs is None else logprobs[part],
                top=None if top is None else top[lists],
                counted=None if counted is None else counted[part].astype(bool),
            )
        )
    return outputs


def _check_layout(arrays: Mapping[str, np.ndarray], sequences: int) -> None:
    """Check the dtypes and lengths of the arrays of a shard. Raises ValueError: one is not as `_arrays` makes it."""
    for name, values in arrays.items():
        if values.dtype != DTYPES.get(name):
            raise ValueError(f"the array {name} has the dtype {values.dtype}, not {DTYPES.get(name)}")
    tokens = len(arrays["ids"])
    listed = int(arrays["counted"].sum()) if "counted" in arrays else tokens
    lengths = dict.fromkeys(("number", "conversation", "category", "stopped"), sequences)
    lengths |= dict.fromkeys(("prompt_offsets", "offsets"), sequences + 1)
    lengths |= dict.fromkeys(("counted", "logprobs"), tokens) | dict.fromkeys(TOP, listed)
    for name, length in lengths.items():
        if name in arrays and len(arrays[name]) != length:
            raise ValueError(f"the array {name} has {len(arrays[name])} entries, but must have {length}")
    for name, ends in (("ids", arrays["offsets"]), ("prompt_ids", arrays["prompt_offsets"])):
        if ends[0] or ends[-1] != len(arrays[name]) or (np.diff(ends) < 0).any():
            raise ValueError(f"the offsets of {name} are not those of its {len(arrays[name])} entries")


def _check(arrays: Mapping[str, np.ndarray], manifest: Manifest, sequences: int) -> None:
    """Check the arrays of a shard.

    Raises:
        ValueError: An array has another layout, a value is impossible, or the log-probability of a token differs from
            the list at its position.
    """
    _check_layout(arrays, sequences)
    if manifest.sampling is not None:
        ends = zip(np.diff(arrays["offsets"]).tolist(), arrays["stopped"].tolist(), strict=True)
        if not all(manifest.sampling.allows(n, "stop" if stopped else "length") for n, stopped in ends):
            raise ValueError(
                f"a text is longer than max_tokens ({manifest.sampling.max_tokens}), or is shorter although it did "
                "not stop"
            )
    for name, values in arrays.items():
        if name.endswith("ids") and values.max(initial=0) >= manifest.vocab:
            raise ValueError(f"the array {name} has the id {values.max()}, but ids must be below {manifest.vocab:,}")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ValueError(f"the array {name} has NaN or infinite values")
    if not manifest.top_logprobs:
        return
    logprobs = arrays["top_logprobs"]
    token = arrays["token_logprob"]
    total = np.exp(logprobs.astype(np.float64)).sum(1)
    total += np.exp(arrays["rest_logprob"].astype(np.float64))
    if (np.abs(total - 1) > OFF_ONE).any():
        worst = total[np.abs(total - 1).argmax()]
        raise ValueError(f"the probabilities of top_logprobs and rest_logprob add up to {worst:g}, not 1")
    ids = arrays["ids"][arrays["counted"] > 0] if "counted" in arrays else arrays["ids"]
    inside = arrays["top_ids"] == ids[:, None]  # [n, k]
    matches = np.where(inside.any(1), np.where(inside, logprobs, 0).sum(1) == token, token <= logprobs[:, -1])
    if not matches.all():
        raise ValueError(
            f"{np.count_nonzero(~matches)} of {len(matches)} tokens have log-probabilities that differ from the "
            "lists at their positions; the outputs are shifted, or belong to another text or tokenizer"
        )


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"
