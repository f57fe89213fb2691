"""Prompts, from a JSON-lines file or from the held-out text of a data source."""

import hashlib
import json
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftlab import data, provenance
from draftlab.config.shared import ChatMode
from draftlab.console import note
from draftlab.data.conversations import Message, chat_ids, read_messages
from draftlab.errors import UserError
from draftlab.reading import read_json_lines

FROM_DATA, FROM_DATA_TOKENS = 16, 64  # prompts of a data source, and tokens of each


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request. messages: what ids are of, as a chat. later: what its user says next, after each answer.

    conversation: number of the line in a file; the turns of a conversation share it.
    """

    ids: list[int]
    category: str = ""
    conversation: int = 0
    messages: tuple[Message, ...] = ()
    later: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts and their source.

    sha256: of the file; of the token ids where they are of a data source, or in the form of a chat template.
    """

    rows: list[Prompt]
    source: str
    sha256: str
    tokens: int | None  # each prompt was cut to this length
    chat: bool = False  # in the form of the tokenizer's chat template, ready for the assistant's answer

    @property
    def categories(self) -> tuple[str, ...]:
        return tuple(sorted({p.category for p in self.rows}))

    @property
    def requests(self) -> int:
        """Return how many requests the prompts are, one for each turn."""
        return sum(1 + len(p.later) for p in self.rows)

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
    chat: ChatMode = "auto",
    system_prompt: str | None = None,
) -> Prompts:
    """Return count prompts evenly spaced in a file (None: all), or of a data source.

    Of a source None means 16 prompts of 64 tokens each. A file of conversations gives its held-out ones up to the
    user's last turn, by default at most 16, if the tokenizer has a chat template.
    """
    if file is not None:
        return file_prompts(file, tokenizer, tokens=tokens, chat=chat, system_prompt=system_prompt).spread(count)
    if tokens is None and tokenizer.chat_template and data.is_chat_file(source):
        heldout = file_prompts(Path(source), tokenizer, chat=chat, split="heldout")
        note(f"{source}: {len(heldout.rows)} held-out conversations, which training leaves out, give prompts")
        return heldout.spread(count or min(FROM_DATA, len(heldout.rows)))
    return data_prompts(source, tokenizer, count=count or FROM_DATA, tokens=tokens or FROM_DATA_TOKENS, seed=seed)


def file_prompts(
    file: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int | None = None,
    tokens: int | None = None,
    chat: ChatMode = "off",
    system_prompt: str | None = None,
    split: data.Split | None = None,
) -> Prompts:
    """Read one prompt per JSON line: `messages`, `prompt`, `turns`, or another text column; `category`.

    Blank lines are skipped. Conversations that end with an answer are prompts up to the user's last turn. count: read
    the first prompts only. tokens: cut every prompt to this length. chat: apply the chat template; the first of several
    turns is then a prompt, which the later ones follow (turns.answered), and otherwise the only one used. split: read
    the lines that are in this split where the file is a data source, None: all.

    Raises:
        UserError: no such file, a line without text, an empty prompt, one of fewer tokens, or one that the chat
            template does not take; a chat without a template; no line in the split.
    """
    on = _has_chat(chat, tokenizer, system_prompt, tokens)
    numbered = list(islice(read_json_lines(file), count))
    chosen = [each for each in numbered if split is None or data.in_split(data.line_name(file, each[0]), split)]
    lines = [_read_line(row, f"{file}:{number}") for number, row in chosen]
    if not lines:
        few = f"; its {len(numbered)} lines have none in the {split} split, so add lines" if numbered else ""
        raise UserError(f"{file} has no prompts{few}")
    rows = [
        _chat_prompt(x, number, tokenizer, system_prompt) if on
        else Prompt(_ids(x, tokenizer, tokens), x.category, number)
        for number, x in enumerate(lines)
    ]  # fmt: skip
    if not on and (several := sum(bool(line.later) for line in lines)):
        note(f"{file.name}: {several} of {len(lines)} prompts have several turns; without a chat the first is used")
    sha256 = digest(rows) if on else provenance.file_sha256(file)
    return Prompts(rows=rows, source=file.name, sha256=sha256, tokens=tokens, chat=on)


def data_prompts(spec: str, tokenizer: PreTrainedTokenizerBase, *, count: int, tokens: int, seed: int) -> Prompts:
    """Return starts of held-out documents of a data source."""
    rows = [Prompt(ids) for ids in data.heldout_prompts(spec, tokenizer, count=count, length=tokens, seed=seed)]
    return Prompts(rows=rows, source=spec, sha256=digest(rows), tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line of a prompt file. text: None where it is a whole conversation. later: turns after the first."""

    where: str
    text: str | None
    messages: list[Message]
    later: tuple[str, ...] = ()
    category: str


def _read_line(row: Any, where: str) -> _Line:
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object with a prompt")
    category, turns = str(row.get("category", "")), row.get("turns")
    if "messages" in row:
        return _Line(where=where, text=None, messages=_messages(row["messages"], where), category=category)
    turns = turns if isinstance(turns, list) else []
    if not all(isinstance(turn, str) for turn in turns):
        raise UserError(f"{where}: turns must be a list of texts, each what the user says")
    texts = [row.get("prompt"), *turns[:1], *(row.get(c) for c in data.TEXT_COLUMNS)]
    text = turns[0] if len(turns) > 1 else next((t for t in texts if isinstance(t, str)), None)
    if text is None:
        columns = ", ".join(data.TEXT_COLUMNS)
        raise UserError(f"{where}: no text; it needs one of messages, prompt, turns, {columns}")
    if not text.strip():
        raise UserError(f"{where}: the prompt is empty")
    messages: list[Message] = [{"role": "user", "content": text}]
    return _Line(where=where, text=text, messages=messages, later=tuple(turns[1:]), category=category)


def _messages(value: object, where: str) -> list[Message]:
    """Return a conversation up to the user's last turn. Raises UserError: it has none."""
    messages = read_messages(value, where)
    while messages and messages[-1]["role"] != "user":
        messages = messages[:-1]
    if not messages:
        raise UserError(f"{where}: messages have no turn of the user")
    return messages


def _has_chat(
    chat: ChatMode, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None, tokens: int | None
) -> bool:
    """Raises UserError: what is asked for does not go with the tokenizer's chat template, or it has none."""
    if chat == "off":
        return False
    if not tokenizer.chat_template:
        if chat == "on" or system_prompt is not None:
            option = "--chat on" if chat == "on" else "--system-prompt"
            raise UserError(f"{option}: the tokenizer has no chat template; take a chat model, or leave it out")
        return False
    if tokens is not None:
        raise UserError(f"--prompt-tokens {tokens} would cut off the end of a conversation; add --chat off")
    return True


def _ids(line: _Line, tokenizer: PreTrainedTokenizerBase, tokens: int | None) -> list[int]:
    if line.text is None:
        reason = "--chat is off" if tokenizer.chat_template else "the tokenizer has no chat template"
        raise UserError(f"{line.where}: messages are for a chat, and {reason}")
    ids: list[int] = tokenizer(line.text, verbose=False)["input_ids"]
    if not ids:
        raise UserError(f"{line.where}: the prompt is empty")
    if tokens is not None and len(ids) < tokens:
        raise UserError(f"{line.where}: the prompt has {len(ids)} tokens, fewer than --prompt-tokens {tokens}")
    return ids[:tokens]


def _chat_prompt(line: _Line, number: int, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None) -> Prompt:
    system: list[Message] = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    if system and line.messages[0]["role"] == "system":
        raise UserError(f"{line.where}: the conversation has a system prompt of its own; drop --system-prompt")
    messages = (*system, *line.messages)
    return Prompt(chat_ids(messages, tokenizer, line.where), line.category, number, messages, line.later)


def digest(rows: list[Prompt]) -> str:
    return hashlib.sha256(json.dumps([p.ids for p in rows]).encode()).hexdigest()
