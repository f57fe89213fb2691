"""The prompts of auto, in three groups: for the choice of a draft, for the final measurement, and for training."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from draftlab import data
from draftlab.data.instructions import mixed
from draftlab.data.prompts import FROM_DATA_TOKENS, prompt_rows
from draftlab.data.sources import split_key, unit_hash
from draftlab.data.text import TextRow
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.runs.atomic import write_atomic

# numbers of prompts for the choice, for the measurement and, at least, for training; search replays at most 48
CHOOSE = 48
MEASURE = 24
LEAST_TRAINED = 24
BUILT_IN = 12_000  # number of draftlab's own prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSplit:
    """The prompts of auto, in three groups.

    The first `choose` prompts are for the choice of a draft. The next `measure` prompts are for the final measurement,
    and all later prompts are for training.

    Attributes:
        about: Source of the prompts, as text for the user.
        rows: The prompts, as rows of a prompt file. Empty if the prompts are cut from `data`.
        data: Text source from which the prompts are cut, or None.
    """

    about: str
    rows: list[dict[str, Any]]
    data: str | None
    choose: int
    measure: int

    @property
    def train(self) -> int | None:
        """Return the number of training prompts, or None if drafts are trained on `data`."""
        return None if self.data else len(self.rows) - self.choose - self.measure

    def write(self, folder: Path, target: Path) -> None:
        """Write the groups to choose.jsonl, measure.jsonl and train.jsonl. Files that exist are not changed.

        target: Checkpoint of the target, whose tokenizer cuts prompts from data.
        """
        rows = self.rows
        count = self.choose + self.measure
        if self.data is not None:
            tokenizer = checkpoint.load_tokenizer(target)
            found = data.numbered_prompts(self.data, tokenizer, count=count, length=FROM_DATA_TOKENS, seed=0)
            texts: list[str] = tokenizer.batch_decode([ids for _, ids in found], skip_special_tokens=True)
            rows = [
                {"prompt": text, "document_id": str(document)} for text, (document, _) in zip(texts, found, strict=True)
            ]
        parts = {
            "choose": rows[: self.choose],
            "measure": rows[self.choose : count],
            "train": rows[count:],
        }
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            if part and not (folder / f"{name}.jsonl").exists():
                write_atomic(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in part))


def find_prompts(
    file: Path | None,
    text: str | None,
    default_text: str | None,
    target: Path,
    streams: Sequence[int],
    *,
    trains: bool = True,
) -> PromptSplit:
    """Return the prompts of auto: those of a file, draftlab's own prompts for chat models, or passages of text.

    Args:
        file: Prompt file of the user.
        text: Text source from which prompts are cut, if there is no file.
        default_text: Text source for a target without a chat template, if there is neither file nor text.
        target: Checkpoint of the target.
        streams: Numbers of concurrent requests. The sizes of the first two groups are multiples of each number.
        trains: Whether the file needs prompts for training.

    Raises:
        UserError: The file cannot be used or is too short, or there is no text.
    """
    together = math.lcm(*streams)
    choose, measure = (-(-count // together) * together for count in (CHOOSE, MEASURE))
    prompts = PromptSplit(about="", rows=[], data=None, choose=choose, measure=measure)
    if file is not None:
        least = {"to choose the draft": choose, "to measure its speed-up": measure}
        least |= {"or more to train drafts": LEAST_TRAINED} if trains else {}
        return replace(prompts, about=file.name, rows=_of_file(file, target, least, batched=together > 1))
    if text is None and checkpoint.load_tokenizer(target).chat_template:
        about = "draftlab's own prompts for chat models; name your users' prompts by --prompts FILE"
        return replace(prompts, about=about, rows=mixed(0, BUILT_IN))
    text = text or default_text
    if text is None:
        raise UserError(
            f"--prompts: {target.name} has no chat template, so draftlab's own prompts do not suit it; give your "
            "users' prompts (--prompts FILE) or similar text (--data SOURCE)"
        )
    hub.check_data(text)
    data.documents(data.first_source(text), "heldout")
    about = (
        f"passages of {text}, which {hub.checkpoint_name(target)} continues; name your users' prompts by --prompts FILE"
    )
    return replace(prompts, about=about, data=text)


def _of_file(file: Path, target: Path, least: Mapping[str, int], *, batched: bool) -> list[dict[str, Any]]:
    """Return the distinct prompts of a file, in an order that depends only on their text.

    Prompts of one document or with the same first message, such as the turns of a conversation, serve only one use (see
    _apart).

    Args:
        least: Number of prompts that each use needs. The keys name the uses in the error message.
        batched: Whether prompts are decoded in batches. Later turns are then left out.

    Raises:
        UserError: The file cannot be used, or has too few prompts.
    """
    groups: dict[tuple[str, str], set[str]] = {}
    for row in prompt_rows(file, checkpoint.load_tokenizer(target), chat="auto"):
        key = "" if row.document_id else split_key(row.text, row.messages)
        lines = groups.setdefault((row.document_id, key), set())
        lines.update(json.dumps(prompt, sort_keys=True) for prompt in _prompts(row, batched))
    rows = [json.loads(line) for line in _apart(groups.values(), list(least.values())[:2])]
    needed = sum(least.values())
    if len(rows) < needed:
        uses = ", ".join(f"{count} {use}" for use, count in least.items())
        raise UserError(
            f"--prompts: {file} has {len(rows)} different prompts, but auto needs {needed} or more: {uses}; add "
            f"{needed - len(rows)} prompts"
        )
    return rows


def _apart(groups: Iterable[set[str]], sizes: list[int]) -> list[str]:
    """Return the lines of groups in an order in which no group lies on both sides of a boundary.

    The boundaries are after the first sizes[0] lines, after the next sizes[1] lines, and so on. The rest of a group
    that is cut by a boundary is left out. A hash of the lines decides on the order.
    """
    ordered = [sorted(group, key=lambda line: unit_hash(f"0:{line}")) for group in groups]
    ordered.sort(key=lambda group: unit_hash(f"0:{group[0]}"))
    ends = list(accumulate(sizes))
    lines: list[str] = []
    for group in ordered:
        end = next((end for end in ends if end > len(lines)), math.inf)
        lines += group if len(lines) + len(group) <= end else group[: int(end) - len(lines)]
    return lines


def _prompts(row: TextRow, batched: bool) -> list[dict[str, Any]]:
    """Return the prompts of a row, as rows of a prompt file. batched: Whether to leave out later turns."""
    given = {"category": row.category, "system": row.system, "tools": list(row.tools)}
    given |= {"document_id": row.document_id}
    prompt: dict[str, Any] = {name: value for name, value in given.items() if value}
    if row.messages:
        return [prompt | {"messages": list(messages)} for messages in row.asked]
    if row.later and not batched:
        return [prompt | {"turns": [row.text, *row.later]}]
    return [prompt | {"prompt": row.text}]
