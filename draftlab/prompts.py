"""Prompts, from a JSON-lines file or from the held-out text of a data source."""

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from draftlab import data, provenance
from draftlab.config.shared import ChatMode
from draftlab.console import note
from draftlab.data.bad_rows import BadRows
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
        conversation: Number of the conversation. All requests of one conversation have the same number, as have all
            prompts that are cut from one document.
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

    @property
    def key(self) -> str:
        """Return the content of the prompt that decides whether two prompts are the same (see data.split_key)."""
        return data.split_key(str(self.ids), self.messages)


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
    def conversations(self) -> list[int]:
        """Return for each prompt a number that all prompts of its conversation have.

        Prompts of one row, of one document or with the same first message depend on each other, so an interval counts
        them as one.
        """
        by_row: dict[int, int] = {}
        by_key: dict[str, int] = {}
        return [
            by_row.setdefault(
                prompt.conversation, by_key.setdefault(prompt.key, prompt.conversation)
            )
            for prompt in self.rows
        ]

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
        count: Largest number of prompts to return. None: no limit.
        tokens: Number of tokens to which every prompt is cut. None: prompts are not cut.
        chat: Whether to apply the chat template. Without it, only the first turn of a row with several turns is used.
        split: Split of the rows to use, train or heldout. None: all rows are used.

    Raises:
        UserError: The file is missing, no row is in the split, or too many rows are bad: empty, too short, or refused
            by the chat template. Or `chat` is "on", but the tokenizer has no chat template.
    """
    on = _has_chat(chat, tokenizer, system_prompt, tokens)
    rows: list[Prompt] = []
    unread: list[tuple[str, frozenset[str]]] = []
    several = 0
    read = prompt_rows(
        file,
        tokenizer,
        count=count,
        tokens=tokens,
        chat=chat,
        system_prompt=system_prompt,
        split=split,
    )
    for row, prompts in read:
        rows += prompts
        unread.append((f"{file}:{len(unread) + 1}", _unread(row, tokenizer, on)))
        several += bool(row.later)
    if not rows:
        where = "" if split is None else f" in its {split} split"
        raise UserError(f"{file} has no prompts{where}; add rows")
    note_unread(unread)
    if several and not on:
        note(
            f"{file.name}: {several} of {len(unread)} prompts have several turns; without a chat template, only "
            "their first turn is used"
        )
    rows = rows[:count]
    sha256 = digest(rows) if on else provenance.file_sha256(file)
    return Prompts(rows=rows, source=file.name, sha256=sha256, tokens=tokens, chat=on)


def prompt_rows(
    file: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int | None = None,
    tokens: int | None = None,
    chat: ChatMode = "off",
    system_prompt: str | None = None,
    split: data.Split | None = None,
) -> Iterator[tuple[TextRow, list[Prompt]]]:
    """Yield each row of a file that has prompts for this tokenizer, with the prompts. Bad rows are left out.

    The arguments are those of file_prompts. `count` is the number of prompts after which no more rows are yielded.

    Raises:
        UserError: See file_prompts.
    """
    on = _has_chat(chat, tokenizer, system_prompt, tokens)
    bad = BadRows(str(file))
    rows = rows_of(file, prompt_of, bad)
    if split is not None:
        every = list(rows)
        keys = [data.split_key(row.text, row.messages) for _, row in every]
        rows = compress(every, data.in_split(keys, split))
    conversation = written = 0
    for number, row in rows:
        where = f"{file}:{number}"
        prompts: list[Prompt] = []
        with bad.leaving_out(where):
            if on:
                prompts = _chat_prompts(row, where, conversation, tokenizer, system_prompt)
            else:
                prompts = [Prompt(_ids(row, where, tokenizer, tokens), row.category, conversation)]
        if prompts:
            yield row, prompts
            conversation += 1
            written += len(prompts)
        if count is not None and written >= count:
            break
    if bad.count:
        deque(rows, maxlen=0)  # the share of bad rows is that of the whole file
    bad.settle()


def data_prompts(
    spec: str, tokenizer: PreTrainedTokenizerBase, *, count: int, tokens: int, seed: int
) -> Prompts:
    """Return `count` prompts of `tokens` tokens each, see data.numbered_prompts."""
    found = data.numbered_prompts(spec, tokenizer, count=count, length=tokens, seed=seed)
    rows = [Prompt(ids, conversation=document) for document, ids in found]
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
        # the answers after the last prompt are no part of it
        asked = row.asked[-1] if row.messages else ()
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
