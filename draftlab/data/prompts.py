"""Prompts, from a JSON-lines file or from the held-out text of a data source."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, compress
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from draftlab import data
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
FROM_DATA = 16
FROM_DATA_TOKENS = 64


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
        first: Token ids of the first turn, if the target has answered it. None: `ids` are those of the first turn.
        said: The user's messages after the first turn, if the target has answered it.
    """

    ids: list[int]
    category: str = ""
    conversation: int = 0
    messages: tuple[Message, ...] = ()
    later: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    first: list[int] | None = None
    said: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Return the content of the prompt that decides whether two prompts are the same (see data.split_key)."""
        return data.split_key(str(self.ids), self.messages)

    @property
    def known(self) -> list[tuple[list[int], tuple[str, ...]]]:
        """Return what is known of each request before the target answers: the first turn's ids, and what the user says
        in later turns up to this request."""
        first = self.ids if self.first is None else self.first
        return [(first, (*self.said, *self.later[:turn])) for turn in range(1 + len(self.later))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """A list of prompts and their source."""

    rows: list[Prompt]
    source: str
    tokens: int | None  # length to which prompts were cut
    # whether the prompts have the chat template, which ends with the start of the assistant's answer
    chat: bool = False

    @property
    def selection(self) -> str:
        """Return the hash of the requests, in their order. Two records with the same hash have the same requests.

        A later turn counts by what is known before the target answers, so the hash is the same before and after.
        """
        return selection(self.rows)

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
            by_row.setdefault(prompt.conversation, by_key.setdefault(prompt.key, prompt.conversation))
            for prompt in self.rows
        ]

    @property
    def longest(self) -> int:
        return max(len(p.ids) for p in self.rows)


def selection(prompts: Iterable[Prompt]) -> str:
    """Return the SHA-256 of what is known of the requests of prompts, see Prompts.selection."""
    digest = hashlib.sha256()
    for known in chain.from_iterable(prompt.known for prompt in prompts):
        digest.update(json.dumps(known).encode())
    return digest.hexdigest()


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
    from_data: int = FROM_DATA,
) -> Prompts:
    """Return prompts from a prompt file, or from the held-out text of a data source if `file` is None.

    A data source that is a file of conversations gives held-out conversations as prompts. This needs a tokenizer with a
    chat template, and `tokens` must be None. Every other source gives prompts of equal length.

    Args:
        count: Number of prompts, which are evenly spaced in a file. None: all prompts of a file, or `from_data` prompts
            of a source, or fewer if a source of conversations has no more.
        tokens: Number of tokens to which prompts are cut. None: prompts of a file are not cut, and prompts from a
            source have 64 tokens.
        chat: Whether to apply the chat template to the prompts of a file.

    Raises:
        UserError: There are fewer prompts than count, or a prompt cannot be used.
    """
    if file is not None:
        return file_prompts(file, tokenizer, count=count, tokens=tokens, chat=chat, system_prompt=system_prompt)
    if tokens is None and tokenizer.chat_template and data.is_chat_file(source):
        heldout = file_prompts(
            Path(source),
            tokenizer,
            count=count or from_data,
            or_fewer=count is None,
            chat=chat,
            split="heldout",
        )
        note(
            f"{source}: {len(heldout.rows)} prompts are taken from its held-out conversations, on which drafts "
            "are not trained"
        )
        return heldout
    return data_prompts(source, tokenizer, count=count or from_data, tokens=tokens or FROM_DATA_TOKENS, seed=seed)


def file_prompts(
    file: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int | None = None,
    or_fewer: bool = False,
    tokens: int | None = None,
    chat: ChatMode = "off",
    system_prompt: str | None = None,
    split: data.Split | None = None,
) -> Prompts:
    """Return the prompts in a file, whose rows have any of the formats of data/text.py.

    A conversation that ends with an answer of the assistant gives several prompts: the messages before each answer.
    Every command that takes a number of prompts from a file takes them here, so all commands have the same prompts.

    Args:
        count: Number of prompts, which are evenly spaced in the file. None: all prompts.
        or_fewer: Whether a file with fewer than `count` prompts is accepted.
        tokens: Number of tokens to which every prompt is cut. None: prompts are not cut.
        chat: Whether to apply the chat template. Without it, only the first turn of a row with several turns is used.
        split: Split of the rows to use, train or heldout. None: all rows are used.

    Raises:
        UserError: The file is missing, has no row in the split or fewer than `count` prompts, or too many rows are bad:
            empty, too short, or refused by the chat template. Or `chat` is "on", but the tokenizer has no chat
            template.
    """
    render = _Renderer.of(tokenizer, tokens, chat, system_prompt)
    every = _every(file, render, split) if count is None else _spread(file, render, split, count)
    found = list(every)
    documents: dict[str, int] = {}
    rows: list[Prompt] = []
    for row, prompts in found:
        for prompt in prompts:
            talk = prompt.conversation
            if row.document_id:
                talk = documents.setdefault(row.document_id, talk)
            rows.append(replace(prompt, conversation=talk))
    if not rows:
        where = "" if split is None else f" in its {split} split"
        raise UserError(f"{file} has no prompts{where}; add rows")
    if count is not None and len(rows) < count and not or_fewer:
        raise UserError(f"{file.name} has only {len(rows)} prompts, not {count}; lower --num-prompts, or add prompts")
    note_unread((f"{file}:{i}", render.unread(row)) for i, (row, _) in enumerate(found, 1))
    several = sum(bool(row.later) for row, _ in found)
    if several and not render.chat:
        note(
            f"{file.name}: {several} of {len(found)} prompts have several turns; without a chat template, only "
            "their first turn is used"
        )
    return Prompts(rows=rows, source=file.name, tokens=tokens, chat=render.chat)


def prompt_rows(
    file: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: ChatMode,
    split: data.Split | None = None,
) -> Iterator[TextRow]:
    """Yield each row of a file that has prompts for this tokenizer. Bad rows are left out.

    Raises:
        UserError: See file_prompts.
    """
    for row, _ in _every(file, _Renderer.of(tokenizer, None, chat, None), split):
        yield row


def data_prompts(spec: str, tokenizer: PreTrainedTokenizerBase, *, count: int, tokens: int, seed: int) -> Prompts:
    """Return `count` prompts of `tokens` tokens each, see data.numbered_prompts."""
    found = data.numbered_prompts(spec, tokenizer, count=count, length=tokens, seed=seed)
    rows = [Prompt(ids, conversation=document) for document, ids in found]
    return Prompts(rows=rows, source=spec, tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Renderer:
    """Turns rows of a file into prompts. The fields are arguments of file_prompts.

    chat: Whether to apply the chat template.
    """

    tokenizer: PreTrainedTokenizerBase
    tokens: int | None
    chat: bool
    system_prompt: str | None

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        tokens: int | None,
        chat: ChatMode,
        system_prompt: str | None,
    ) -> "_Renderer":
        """Return the renderer.

        Raises:
            UserError: The user asks for a chat template, but the tokenizer has none. Or --prompt-tokens would cut
                conversations.
        """
        on = chat != "off" and bool(tokenizer.chat_template)
        if chat != "off" and not on and (chat == "on" or system_prompt is not None):
            raise UserError(
                "--chat on, --system-prompt: the tokenizer has no chat template; use a chat model, or leave them out"
            )
        if on and tokens is not None:
            raise UserError(
                f"--prompt-tokens {tokens} would cut conversations before their end; leave --prompt-tokens out, or "
                "add --chat off"
            )
        return cls(tokenizer=tokenizer, tokens=tokens, chat=on, system_prompt=system_prompt)

    def count(self, row: TextRow) -> int:
        """Return the number of prompts of a row, without rendering them."""
        return len(self._asked(row)) if self.chat else 1

    def prompts(self, row: TextRow, where: str, conversation: int) -> list[Prompt]:
        """Return the prompts of a row.

        where: Name of the row for errors.

        Raises:
            UserError: The prompt is empty or too short, or the tokenizer or its chat template refuses it.
        """
        if not self.chat:
            return [Prompt(self._ids(row, where), row.category, conversation)]
        system: tuple[Message, ...] = ()
        if row.system:
            system = ({"role": "system", "content": row.system},)
        if self.system_prompt is not None:
            system = ({"role": "system", "content": self.system_prompt},)
            if row.system or (row.messages and row.messages[0]["role"] == "system"):
                raise UserError(f"{where}: the conversation has its own system prompt; leave --system-prompt out")
        prompts: list[Prompt] = []
        for asked in self._asked(row):
            messages = (*system, *asked)
            ids = chat_ids(messages, self.tokenizer, where, tools=row.tools)
            prompts.append(Prompt(ids, row.category, conversation, messages, row.later, row.tools))
        return prompts

    def unread(self, row: TextRow) -> frozenset[str]:
        """Return the names of the fields of a row that its prompts lack."""
        if self.chat:
            # the answers after the last prompt are no part of it
            asked = row.asked[-1] if row.messages else ()
            return row.unread | unread_fields(asked, row.tools, self.tokenizer)
        lacks = {"system": bool(row.system), "tools": bool(row.tools)}
        return row.unread | {name for name, given in lacks.items() if given}

    @staticmethod
    def _asked(row: TextRow) -> list[tuple[Message, ...]]:
        return row.asked or [({"role": "user", "content": row.text},)]

    def _ids(self, row: TextRow, where: str) -> list[int]:
        if row.messages:
            raise UserError(
                f"{where}: the row has messages, which need a tokenizer with a chat template and --chat auto; use a "
                "chat model, or rows of plain text"
            )
        ids = text_ids(row.text, self.tokenizer, where)
        if not ids:
            raise UserError(f"{where}: the prompt is empty; write a prompt, or remove this row")
        if self.tokens is not None and len(ids) < self.tokens:
            raise UserError(
                f"{where}: the prompt has {len(ids)} tokens, fewer than --prompt-tokens {self.tokens}; lower "
                "--prompt-tokens, or remove the prompt"
            )
        return ids[: self.tokens]


def _every(file: Path, render: _Renderer, split: data.Split | None) -> Iterator[tuple[TextRow, list[Prompt]]]:
    """Yield each row of a file that can be rendered, with its prompts."""
    bad = BadRows(str(file))
    for at, where, row in _rows(file, split, bad):
        prompts: list[Prompt] = []
        with bad.leaving_out(where):
            prompts = render.prompts(row, where, at)
        if prompts:
            yield row, prompts
    bad.settle()


def _spread(file: Path, render: _Renderer, split: data.Split | None, count: int) -> list[tuple[TextRow, list[Prompt]]]:
    """Return `count` evenly spaced prompts of a file with their rows, or all prompts if the file has fewer.

    Even spacing keeps all categories, because prompt sets list one category after another. A file may have millions of
    rows. It is therefore read twice, to count its prompts and to render the chosen ones, and only these are kept. A
    prompt of a bad row is replaced by the next prompt of the file, and after the last one by the first ones.
    """
    bad = BadRows(str(file))
    total = sum(render.count(row) for _, _, row in _rows(file, split, bad))
    count = min(count, total)
    wanted = {i * total // count for i in range(count)}
    chosen: dict[int, tuple[TextRow, dict[int, Prompt]]] = {}
    refused: set[int] = set()
    missing = 0  # number of prompts to replace
    for again in (False, True):
        if again and not missing:
            break
        place = 0
        # the rows that cannot be parsed are in the account already
        for at, where, row in _rows(file, split, BadRows(str(file))):
            places = range(place, place + render.count(row))
            place = places.stop
            _, taken = chosen.get(at, (row, {}))
            asked = wanted.intersection(places) - taken.keys()
            if at in refused or not (asked or missing):
                continue
            prompts: list[Prompt] = []
            with bad.leaving_out(where):
                prompts = render.prompts(row, where, at)
            if not prompts:
                refused.add(at)
                missing += len(asked)
                bad.check()
                continue
            for i, prompt in zip(places, prompts, strict=True):
                if i in asked:
                    taken[i] = prompt
                elif missing and i not in taken:
                    taken[i] = prompt
                    missing -= 1
            chosen[at] = row, taken
    bad.settle()
    ordered = (chosen[at] for at in sorted(chosen))
    return [(row, [taken[i] for i in sorted(taken)]) for row, taken in ordered]


def _rows(file: Path, split: data.Split | None, bad: BadRows) -> Iterator[tuple[int, str, TextRow]]:
    """Yield the position among the good rows of a split, the name FILE:NUMBER and the content of each row."""
    rows = rows_of(file, prompt_of, bad)
    if split is not None:
        every = list(rows)
        keys = [data.split_key(row.text, row.messages) for _, row in every]
        rows = compress(every, data.in_split(keys, split))
    for at, (number, row) in enumerate(rows):
        yield at, f"{file}:{number}", row
