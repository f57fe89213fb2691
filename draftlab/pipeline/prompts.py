"""Prompts of auto, in three parts: to train on, to choose by, and to measure with."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftlab import data
from draftlab.atomic import write_atomic
from draftlab.config.auto import AutoConfig
from draftlab.data.instructions import mixed
from draftlab.data.sources import unit_hash
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.prompts import FROM_DATA_TOKENS, file_prompts
from draftlab.reading import read_json_lines

CHOOSE, MEASURE, LEAST_TRAINED = 48, 24, 24  # search replays 48 texts
BUILT_IN = 12_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFiles:
    """The three parts on disk. train: None where the target continues parts of data instead."""

    about: str
    train: Path | None
    train_count: int | None
    data: str | None
    choose: Path
    measure: Path


def plan_prompts(config: AutoConfig, target: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return what the prompts are, and their rows; none where they are parts of config.text.

    Raises:
        UserError: a file that cannot be used or is too short, no text, or data that cannot be had.
    """
    if config.prompt_file is not None:
        return f"{config.prompt_file.name}", _of_file(config, config.prompt_file, target)
    if config.data is None and checkpoint.load_tokenizer(target).chat_template:
        return "draftlab's own for chat models; --prompts takes your users'", mixed(config.seed, BUILT_IN)
    if config.text is None:
        raise UserError(
            f"{config.target} has no chat template: name your users' prompts with --prompts FILE, or text that they "
            "resemble with --data SOURCE"
        )
    hub.check_data(config.text)
    data.documents(data.first_source(config.text), "heldout")
    return f"parts of {config.text}, which {hub.checkpoint_name(target)} continues; --prompts takes your users'", []


def write_prompts(config: AutoConfig, target: Path, folder: Path) -> PromptFiles:
    """Write the parts that are not there yet; the same settings give the same files."""
    about, rows = plan_prompts(config, target)
    choose, measure = sizes(config.streams)
    source = None if rows else config.text
    if source is not None:
        tokenizer = checkpoint.load_tokenizer(target)
        ids = data.heldout_prompts(source, tokenizer, count=choose + measure, length=FROM_DATA_TOKENS, seed=config.seed)
        texts: list[str] = tokenizer.batch_decode(ids, skip_special_tokens=True)
        rows = [{"prompt": text} for text in texts]
    parts = {"choose": rows[:choose], "measure": rows[choose : choose + measure], "train": rows[choose + measure :]}
    for name, part in parts.items():
        if part and not (folder / f"{name}.jsonl").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in part))
    return PromptFiles(
        about=about, train=None if source else folder / "train.jsonl", data=source,
        train_count=None if source else len(parts["train"]), choose=folder / "choose.jsonl",
        measure=folder / "measure.jsonl",
    )  # fmt: skip


def sizes(streams: Sequence[int]) -> tuple[int, int]:
    """Return how many prompts choose and measure: whole batches of every number of streams."""
    together = math.lcm(*streams)
    return -(-CHOOSE // together) * together, -(-MEASURE // together) * together


def _of_file(config: AutoConfig, file: Path, target: Path) -> list[dict[str, Any]]:
    """Return the rows of a file in an order of their own, each distinct; batches take the first turn of each."""
    file_prompts(file, checkpoint.load_tokenizer(target), chat="auto")  # each line is checked
    lines = dict.fromkeys(json.dumps(row, sort_keys=True) for _, row in read_json_lines(file))
    rows = [json.loads(line) for line in sorted(lines, key=lambda line: unit_hash(f"{config.seed}:{line}"))]
    if config.streams != [1]:
        rows = [row | {"turns": row["turns"][:1]} if isinstance(row.get("turns"), list) else row for row in rows]
    needed = sum(sizes(config.streams)) + LEAST_TRAINED
    if len(rows) < needed:
        choose, measure = sizes(config.streams)
        raise UserError(
            f"{file} has {len(rows)} different prompts; auto wants {needed} or more: {choose} to choose by, {measure} "
            f"to measure with, and {LEAST_TRAINED} or more to train on"
        )
    return rows
