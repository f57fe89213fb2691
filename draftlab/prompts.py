"""Prompts, from a JSON-lines file or from the held-out text of a data source."""

import hashlib
import json
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from draftlab import data, provenance
from draftlab.config.shared import ChatMode
from draftlab.console import note
from draftlab.data.text import (
    Message,
    TextRow,
    Tool,
    chat_ids,
    note_unread,
    prompt_of,
    rows_of,
    text_ids,
    unread_fields,
)
from draftlab.errors import UserError

# default number of prompts from a data source, and their length
FROM_DATA, FROM_DATA_TOKENS = 16, 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one request to a model.

    Args:
        ids: Token ids.
        conversation: Number of the conversation. All requests of one conversation have the same number.
        messages: Messages that the chat template rendered to the ids. Empty without a chat template.
        later: The user's messages of later turns. Each is asked after the model has answered the previous turn.
        tools: Tools that the model may call.
    """

    ids: list[int]
    category: str = ""
    conversation: int = 0
    messages: tuple[Message, ...] = ()
    later: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """A list of prompts and their source.

    sha256: Hash of the prompt file. For prompts from a data source or with a chat template: hash of the ids.
    """

    rows: list[Prompt]
    source: str
    sha256: str
    tokens: int | None  # length to which prompts were cut
    # whether the prompts have the chat template, which ends with the start of the assistant's answer
    chat: bool = False

    @property
    def categories(self) -> tuple[str, ...]:
        return tuple(sorted({p.category for p in self.rows}))

    @property
    def requests(self) -> int:
        """Return the number of requests. Every turn of a conversation is a request."""
        return sum(1 + len(p.later) for p in self.rows)

    @property
    def longest(self) -> int:
        return max(len(p.ids) for p in self.rows)

    def spread(self, count: int | None) -> "Prompts":
        """Return `count` evenly spaced prompts, or all prompts if count is None.

        Even spacing keeps all categories, because prompt sets list one category after another.

        Raises:
            UserError: There are fewer than `count` prompts.
        """
        if count is None:
            return self
        if count > len(self.rows):
            raise UserError(
                f"{self.source} has only {len(self.rows)} prompts, not {count}; lower --num-prompts, or add "
                "prompts"
            )
        return replace(self, rows=[self.rows[i * len(self.rows) // count] for i in range(count)])


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
    """Return prompts from a prompt file, or from the held-out text of a data source if `file` is None.

    A data source that is a file of conversations gives held-out conversations as prompts. This needs a tokenizer with a
    chat template, and `tokens` must be None. Every other source gives prompts of equal length.

    Args:
        count: Number of prompts, which are evenly spaced in a file. None: all prompts of a file, or 16 from a source.
        tokens: Number of tokens to which prompts are cut. None: prompts of a file are not cut, and prompts from a
            source have 64 tokens.
        chat: Whether to apply the chat template to the prompts of a file.

    Raises:
        UserError: There are fewer prompts than count, or a prompt cannot be used.
    """
    if file is not None:
        return file_prompts(
            file, tokenizer, tokens=tokens, chat=chat, system_prompt=system_prompt
        ).spread(count)
    if tokens is None and tokenizer.chat_template and data.is_chat_file(source):
        heldout = file_prompts(Path(source), tokenizer, chat=chat, split="heldout")
        note(
            f"{source}: {len(heldout.rows)} prompts are taken from its held-out conversations, on which drafts "
            "are not trained"
        )
        return heldout.spread(count or min(FROM_DATA, len(heldout.rows)))
    return data_prompts(
        source, tokenizer, count=count or FROM_DATA, tokens=tokens or FROM_DATA_TOKENS, seed=seed
    )


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
    """Return the prompts in a file, whose rows have any of the formats of data/text.py.

    A conversation that ends with an answer of the assistant gives several prompts: the messages before each answer.

    Args:
        count: Largest number of rows to read, and of prompts to return. None: no limit.
        tokens: Number of tokens to which every prompt is cut. None: prompts are not cut.
        chat: Whether to apply the chat template. Without it, only the first turn of a row with several turns is used.
        split: Split of the rows to use, train or heldout. None: all rows are used.

    Raises:
        UserError: The file is missing, or no row is in the split. Or a prompt is empty, too short, or refused by the
            chat template. Or `chat` is "on", but the tokenizer has no chat template.
    """
    on = _has_chat(chat, tokenizer, system_prompt, tokens)
    chosen = list(islice(rows_of(file, prompt_of), count))  # each row has at least one prompt
    if split is not None:
        chosen = [row for row in chosen if data.in_split(data.line_name(file, row[0]), split)]
    if not chosen:
        where = "" if split is None else f" in its {split} split"
        raise UserError(f"{file} has no prompts{where}; add rows")
    note_unread((f"{file}:{number}", _unread(row, tokenizer, on)) for number, row in chosen)
    rows: list[Prompt] = []
    for conversation, (number, row) in enumerate(chosen):
        where = f"{file}:{number}"
        if on:
            rows += _chat_prompts(row, where, conversation, tokenizer, system_prompt)
        else:
            rows.append(Prompt(_ids(row, where, tokenizer, tokens), row.category, conversation))
    if not on and (several := sum(bool(row.later) for _, row in chosen)):
        note(
            f"{file.name}: {several} of {len(chosen)} prompts have several turns; without a chat template, only "
            "their first turn is used"
        )
    rows = rows[:count]
    sha256 = digest(rows) if on else provenance.file_sha256(file)
    return Prompts(rows=rows, source=file.name, sha256=sha256, tokens=tokens, chat=on)


def data_prompts(
    spec: str, tokenizer: PreTrainedTokenizerBase, *, count: int, tokens: int, seed: int
) -> Prompts:
    """Return `count` prompts of `tokens` tokens each, from held-out documents of a source (see heldout_prompts)."""
    rows = [
        Prompt(ids)
        for ids in data.heldout_prompts(spec, tokenizer, count=count, length=tokens, seed=seed)
    ]
    return Prompts(rows=rows, source=spec, sha256=digest(rows), tokens=tokens)


def _has_chat(
    chat: ChatMode,
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None,
    tokens: int | None,
) -> bool:
    """Return whether to apply the chat template.

    Raises:
        UserError: The user asks for a chat template, but the tokenizer has none. Or --prompt-tokens would cut
            conversations.
    """
    if chat == "off":
        return False
    if not tokenizer.chat_template:
        if chat == "on" or system_prompt is not None:
            raise UserError(
                "--chat on, --system-prompt: the tokenizer has no chat template; use a chat model, or leave them out"
            )
        return False
    if tokens is not None:
        raise UserError(
            f"--prompt-tokens {tokens} would cut conversations before their end; leave --prompt-tokens out, or "
            "add --chat off"
        )
    return True


def _ids(
    row: TextRow, where: str, tokenizer: PreTrainedTokenizerBase, tokens: int | None
) -> list[int]:
    if row.messages:
        raise UserError(
            f"{where}: the row has messages, which need a tokenizer with a chat template and --chat auto; use a chat "
            "model, or rows of plain text"
        )
    ids = text_ids(row.text, tokenizer, where)
    if not ids:
        raise UserError(f"{where}: the prompt is empty; write a prompt, or remove this row")
    if tokens is not None and len(ids) < tokens:
        raise UserError(
            f"{where}: the prompt has {len(ids)} tokens, fewer than --prompt-tokens {tokens}; lower "
            "--prompt-tokens, or remove the prompt"
        )
    return ids[:tokens]


def _unread(row: TextRow, tokenizer: PreTrainedTokenizerBase, chat: bool) -> frozenset[str]:
    """Return the names of the fields of a row that its prompts lack. chat: Whether a chat template renders them."""
    if chat:
        asked = (
            row.asked[-1] if row.messages else ()
        )  # the answers after it are no part of a prompt
        return row.unread | unread_fields(asked, row.tools, tokenizer)
    lacks = {"system": bool(row.system), "tools": bool(row.tools)}
    return row.unread | {name for name, given in lacks.items() if given}


def _chat_prompts(
    row: TextRow,
    where: str,
    conversation: int,
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None,
) -> list[Prompt]:
    system: tuple[Message, ...] = ()
    if row.system:
        system = ({"role": "system", "content": row.system},)
    if system_prompt is not None:
        system = ({"role": "system", "content": system_prompt},)
        if row.system or (row.messages and row.messages[0]["role"] == "system"):
            raise UserError(
                f"{where}: the conversation has its own system prompt; leave --system-prompt out"
            )
    prompts: list[Prompt] = []
    for asked in row.asked or [({"role": "user", "content": row.text},)]:
        messages = (*system, *asked)
        ids = chat_ids(messages, tokenizer, where, tools=row.tools)
        prompts.append(Prompt(ids, row.category, conversation, messages, row.later, row.tools))
    return prompts


def digest(rows: list[Prompt]) -> str:
    return hashlib.sha256(json.dumps([p.ids for p in rows]).encode()).hexdigest()
