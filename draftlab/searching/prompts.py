"""Prompts of auto, in three parts: to train on, to choose by, and to measure with."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftlab import data
from draftlab.atomic import write_atomic
from draftlab.data.instructions import mixed
from draftlab.data.sources import unit_hash
from draftlab.data.text import TextRow, prompt_of, rows_of
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.prompts import FROM_DATA_TOKENS, file_prompts

CHOOSE, MEASURE, LEAST_TRAINED = 48, 24, 24  # search replays 48 texts
BUILT_IN = 12_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """What a target is asked. rows: as a prompt file has them; none where the target continues parts of data."""

    about: str
    rows: list[dict[str, Any]]
    data: str | None
    choose: int
    measure: int

    @property
    def train(self) -> int | None:
        """Return the number of prompts to train on; None where drafts learn from data."""
        return None if self.data else len(self.rows) - self.choose - self.measure

    def write(self, folder: Path, target: Path) -> None:
        """Write choose.jsonl, measure.jsonl and train.jsonl where they are not there yet; the same files every time."""
        rows, count = self.rows, self.choose + self.measure
        if self.data is not None:
            tokenizer = checkpoint.load_tokenizer(target)
            ids = data.heldout_prompts(self.data, tokenizer, count=count, length=FROM_DATA_TOKENS, seed=0)
            texts: list[str] = tokenizer.batch_decode(ids, skip_special_tokens=True)
            rows = [{"prompt": text} for text in texts]
        parts = {"choose": rows[: self.choose], "measure": rows[self.choose : count], "train": rows[count:]}
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            if part and not (folder / f"{name}.jsonl").exists():
                write_atomic(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in part))


def find_prompts(
    file: Path | None, text: str | None, default_text: str | None, target: Path, streams: Sequence[int]
) -> Prompts:
    """Return the prompts of a file, those that draftlab brings for chat models, or parts of text.

    default_text: for models without a chat template. streams: numbers of prompts that are decoded at once; each
    part has whole batches.

    Raises:
        UserError: a file that cannot be used or is too short, no text, or text that cannot be had.
    """
    together = math.lcm(*streams)
    choose, measure = (-(-count // together) * together for count in (CHOOSE, MEASURE))
    prompts = Prompts(about="", rows=[], data=None, choose=choose, measure=measure)
    if file is not None:
        return replace(prompts, about=file.name, rows=_of_file(file, target, choose, measure, batched=together > 1))
    if text is None and checkpoint.load_tokenizer(target).chat_template:
        about = "draftlab's own for chat models; --prompts takes your users'"
        return replace(prompts, about=about, rows=mixed(0, BUILT_IN))
    text = text or default_text
    if text is None:
        raise UserError(
            f"--prompts: {target.name} has no chat template: name your users' prompts by --prompts FILE, or text that "
            "they resemble by --data SOURCE"
        )
    hub.check_data(text)
    data.documents(data.first_source(text), "heldout")
    about = f"parts of {text}, which {hub.checkpoint_name(target)} continues; --prompts takes your users'"
    return replace(prompts, about=about, data=text)


def _of_file(file: Path, target: Path, choose: int, measure: int, *, batched: bool) -> list[dict[str, Any]]:
    """Return the rows of a file in an order of their own, each distinct; batches take the first turn of each."""
    file_prompts(file, checkpoint.load_tokenizer(target), chat="auto")  # each line is checked
    lines: dict[str, None] = {}
    for _, row in rows_of(file, prompt_of):
        lines |= dict.fromkeys(json.dumps(said, sort_keys=True) for said in _said(row, batched))
    rows = [json.loads(line) for line in sorted(lines, key=lambda line: unit_hash(f"0:{line}"))]
    needed = choose + measure + LEAST_TRAINED
    if len(rows) < needed:
        raise UserError(
            f"--prompts: {file} has {len(rows)} different prompts; auto wants {needed} or more: {choose} to choose by, "
            f"{measure} to measure with, and {LEAST_TRAINED} or more to train on"
        )
    return rows


def _said(row: TextRow, batched: bool) -> list[dict[str, Any]]:
    """Return the prompts of a row, each in a form of its own; batches take the first turn."""
    said: dict[str, Any] = {"category": row.category} if row.category else {}
    if row.messages:
        return [said | {"messages": list(messages)} for messages in row.asked]
    if row.later and not batched:
        return [said | {"turns": [row.text, *row.later]}]
    return [said | {"prompt": row.text}]
