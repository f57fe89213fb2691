"""Prompts, from a JSON-lines file or from the held-out text of a data source."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftlab import data, provenance
from draftlab.errors import UserError

FROM_DATA, FROM_DATA_TOKENS = 16, 64  # default number and length of the prompts of a data source


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    category: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts and their source. sha256: of the file, or of the token ids of a data source."""

    rows: list[Prompt]
    source: str
    sha256: str
    tokens: int | None  # each prompt was cut to this length

    @property
    def categories(self) -> tuple[str, ...]:
        return tuple(sorted({p.category for p in self.rows}))

    @property
    def longest(self) -> int:
        return max(len(p.ids) for p in self.rows)

    def spread(self, count: int | None) -> "Prompts":
        """Return count of them, evenly spaced: prompt sets list their categories one after the other.

        Raises:
            UserError: there are fewer.
        """
        if count is None:
            return self
        if count > len(self.rows):
            raise UserError(f"{self.source} has {len(self.rows)} prompts, not {count}")
        return replace(self, rows=[self.rows[i * len(self.rows) // count] for i in range(count)])

    def first(self, count: int | None) -> "Prompts":
        return replace(self, rows=self.rows[:count])


def load_prompts(
    file: Path | None,
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int | None,
    tokens: int | None,
    seed: int,
) -> Prompts:
    """Return count prompts evenly spaced in a file (None: all), or of a data source (None: 16 of 64 tokens each)."""
    if file is not None:
        return file_prompts(file, tokenizer, tokens=tokens).spread(count)
    return data_prompts(source, tokenizer, count=count or FROM_DATA, tokens=tokens or FROM_DATA_TOKENS, seed=seed)


def file_prompts(
    file: Path, tokenizer: PreTrainedTokenizerBase, *, count: int | None = None, tokens: int | None = None
) -> Prompts:
    """Read one prompt per JSON line: `prompt`, the first of `turns`, or another text column; `category` if present.

    count: read the first lines only. tokens: cut every prompt to this length.

    Raises:
        UserError: no such file, a line without text, an empty prompt, or one of fewer tokens.
    """
    rows = [_read_prompt(line, f"{file}:{number}", tokenizer, tokens) for number, line in _lines(file, count)]
    if not rows:
        raise UserError(f"{file} has no prompts")
    return Prompts(rows=rows, source=file.name, sha256=provenance.file_sha256(file), tokens=tokens)


def data_prompts(spec: str, tokenizer: PreTrainedTokenizerBase, *, count: int, tokens: int, seed: int) -> Prompts:
    """Return starts of held-out documents of a data source."""
    rows = [Prompt(ids) for ids in data.heldout_prompts(spec, tokenizer, count=count, length=tokens, seed=seed)]
    digest = hashlib.sha256(json.dumps([p.ids for p in rows]).encode()).hexdigest()
    return Prompts(rows=rows, source=spec, sha256=digest, tokens=tokens)


def _lines(file: Path, count: int | None) -> Iterator[tuple[int, str]]:
    try:
        with file.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                if count is not None and number > count:
                    return
                yield number, line
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None


def _read_prompt(line: str, where: str, tokenizer: PreTrainedTokenizerBase, tokens: int | None) -> Prompt:
    text, category = _text_and_category(line, where)
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    if not ids:
        raise UserError(f"{where}: the prompt is empty")
    if tokens is not None and len(ids) < tokens:
        raise UserError(f"{where}: the prompt has {len(ids)} tokens, fewer than --prompt-tokens {tokens}")
    return Prompt(ids[:tokens], category)


def _text_and_category(line: str, where: str) -> tuple[str, str]:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg})") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object with a prompt")
    turns = row.get("turns")
    texts = [row.get("prompt"), turns[0] if isinstance(turns, list) and turns else None]
    text = next((t for t in [*texts, *(row.get(c) for c in data.TEXT_COLUMNS)] if isinstance(t, str)), None)
    if text is None:
        raise UserError(f"{where}: no text; it needs one of prompt, turns, {', '.join(data.TEXT_COLUMNS)}")
    return text, str(row.get("category", ""))
