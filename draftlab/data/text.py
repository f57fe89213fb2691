"""Read rows of text, for training and as prompts, from JSON lines, JSON, Parquet files and the hub.

A row is a conversation (`messages`, ShareGPT's `conversations`, or TRL's `prompt` with `completion`), the turns of a
user (`turns`), or a plain text. The content of a message is a text or a list of parts, whose texts are joined. Messages
of tools and messages without text, such as tool calls, are left out. A chat template renders conversations, and the
assistant's tokens are marked. In shapes, n is the number of tokens.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftlab.config.shared import LossOn
from draftlab.console import note_once
from draftlab.data.bad_rows import BadRows
from draftlab.errors import UserError
from draftlab.model import hub
from draftlab.reading import open_bytes, parse_json, read_lines, reading

Message = dict[str, Any]  # role and content, as chat templates take them
TEXT_COLUMNS = ("text", "prompt", "question", "content")
PROMPT_COLUMNS = ("prompt", "text", "question", "content")
FORMS = (
    f"messages, conversations, prompt with completion, turns, or one of {', '.join(TEXT_COLUMNS)}"
)
SHARE_GPT = {"human": "user", "gpt": "assistant", "function_call": "tool", "observation": "tool"}
TOOLS = ("tool", "function")
CONVERSATION_FIELDS = ("messages", "conversations", "turns")
# the fields that hold the rows of a file whose JSON value is an object
ROW_KEYS = ("train", "data", "rows", "examples", "instances")
BOM = b"\xef\xbb\xbf"  # some editors begin a file with it


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRow:
    """The text of a row.

    Args:
        text: The text. For a conversation, the contents of its messages, joined by line breaks.
        messages: The messages, if the row is a conversation.
        later: Turns of the user after the first turn, if the row has `turns`. The first turn is `text`.
        left_out: Number of messages that are left out, because they have no text or come from a tool.
    """

    text: str
    messages: tuple[Message, ...] = ()
    later: tuple[str, ...] = ()
    category: str = ""
    left_out: int = 0

    @property
    def asked(self) -> list[tuple[Message, ...]]:
        """Return the prompts of the conversation, as prompts_of does."""
        return prompts_of(self.messages)


# takes the content of a row and its name for errors, and returns its text
Parse = Callable[[Any, str], TextRow]


def prompts_of(messages: tuple[Message, ...]) -> list[tuple[Message, ...]]:
    """Return the prompts of a conversation: the messages before each answer of the assistant to the user.

    A conversation that ends with the user is a single prompt.
    """
    if messages and messages[-1]["role"] == "user":
        return [messages]
    roles = [message["role"] for message in messages]
    return [
        messages[:at] for at, pair in enumerate(pairwise(roles), 1) if pair == ("user", "assistant")
    ]


def rows_of(file: Path, parse: Parse, bad: BadRows | None = None) -> Iterator[tuple[int, TextRow]]:
    """Yield the number and the parsed content of every row of a file. Blank lines and rows without text are skipped.

    Rows are numbered from 1; a row of JSON lines has the number of its line. Bad rows are left out, as in checked_rows.

    Raises:
        UserError: The file cannot be read, or too many rows are bad (see BadRows).
    """
    bad = bad or BadRows(str(file))
    if file.suffix == ".parquet":
        return checked_rows(enumerate(_parquet_rows(file), 1), parse, bad)
    if hub.has_suffix(file, hub.JSON_FILES) and (rows := json_rows(file)) is not None:
        return checked_rows(enumerate(rows, 1), parse, bad)

    def parse_line(line: bytes, where: str) -> TextRow:
        with reading(f"{where}: not JSON"):
            value = parse_json(line)
        return parse(value, where)

    lines = ((number, line) for number, _, line in read_lines(file))
    return checked_rows(lines, parse_line, bad)


def json_rows(file: Path) -> list[Any] | None:
    """Return the rows of a .json file, or None if it has JSON lines.

    Rows are the entries of an array, or of the first of ROW_KEYS in an object. Any other value is a single row.

    Raises:
        UserError: The file cannot be read.
    """
    with reading(f"{file} cannot be read"), open_bytes(file) as stream:
        data = stream.read()
        try:
            content = parse_json(data)
        except ValueError:
            if data.removeprefix(BOM).lstrip().startswith(b"{"):
                return None
            raise
    if isinstance(content, list):
        return content
    if not isinstance(content, dict) or content.keys() & {*CONVERSATION_FIELDS, *TEXT_COLUMNS}:
        return [content]
    for key in ROW_KEYS:
        rows = content.get(key)
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            others = [other for other in content if other != key]
            left_out = f"; left out: {', '.join(others)}" if others else ""
            note_once(f"{file}: its rows are the {len(rows):,} entries of {key}{left_out}")
            return rows
    return [content]


def _parquet_rows(file: Path) -> Iterator[Any]:
    from datasets import load_dataset

    with reading(file):
        yield from load_dataset("parquet", data_files=str(file), split="train", streaming=True)


def check_prompts(file: Path) -> None:
    """Check that the rows of a file have prompts.

    Raises:
        UserError: The file is missing, or too many of its rows have no prompt.
    """
    deque(rows_of(file, prompt_of), maxlen=0)


def checked_rows(
    values: Iterable[tuple[int, Any]], parse: Parse, bad: BadRows
) -> Iterator[tuple[int, TextRow]]:
    """Yield the number and the parsed content of each row of a source. Bad rows and rows without text are left out.

    Args:
        values: Number and raw content of each row.
        parse: Function that parses a row's content. Its second argument is the row's name for errors.
        bad: Account of the source's bad rows. The reader of the rows may add rows that it cannot use.

    Raises:
        UserError: Too many rows are bad, which is known after the last row.
    """
    left_out = empty = 0
    for number, value in values:
        bad.total += 1
        row: TextRow | None = None
        with bad.leaving_out(where := f"{bad.source}:{number}"):
            row = _checked_characters(parse(value, where), where)
        if bad.hopeless:
            break
        if row is None:
            continue
        left_out += row.left_out
        if row.messages or row.text.strip():
            yield number, row
        else:
            empty += 1
    bad.settle()
    if empty:
        note_once(f"{bad.source}: {empty:,} of {bad.total:,} rows have no text and are skipped")
    if left_out:
        note_once(
            f"{bad.source}: {left_out:,} messages are left out, because they come from tools or have no text (images, "
            "null)"
        )


def _checked_characters(row: TextRow, where: str) -> TextRow:
    """Return the row. Raises UserError: its text has half of a character, which no tokenizer can encode."""
    texts = json.dumps([row.text, row.later, row.messages], ensure_ascii=False, default=str)
    try:
        texts.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(texts[error.start]):04x}"
        raise UserError(
            f"{where}: the text has a lone surrogate, {half}, which is one half of a character; remove this row"
        ) from None
    return row


def row_of(value: Any, where: str, columns: tuple[str, ...] = TEXT_COLUMNS) -> TextRow:
    """Return the text of a row to train on. Plain text is read from the first of `columns` whose value is a text.

    value: Raw content of the row. where: Name of the row for errors.

    Raises:
        UserError: The row has none of the supported formats.
    """
    if not isinstance(value, dict):
        raise UserError(f"{where}: the row is not a JSON object; write an object with {FORMS}")
    category, turns = str(value.get("category", "")), value.get("turns")
    if (given := _messages(value)) is not None:
        messages = read_messages(given, where)
        text = "\n".join(message["content"] for message in messages)
        left_out = len(given) - len(messages)
        return TextRow(text=text, messages=tuple(messages), category=category, left_out=left_out)
    if turns and not (isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)):
        raise UserError(f"{where}: turns must be a list of texts, one for each turn of the user")
    if turns:
        return TextRow(text=turns[0], later=tuple(turns[1:]), category=category)
    text = next((value[column] for column in columns if isinstance(value.get(column), str)), None)
    if text is None:
        raise UserError(
            f"{where}: the row's columns ({', '.join(map(str, value))}) have no text; the row needs {FORMS}"
        )
    return TextRow(text=text, category=category)


def prompt_of(value: Any, where: str) -> TextRow:
    """Return the text of a row that must have a prompt: a plain text, or a conversation that asks for an answer.

    value: Raw content of the row. where: Name of the row for errors.

    Raises:
        UserError: The row has none of the supported formats, its text is empty, or no prompt can be taken from its
            conversation (see prompts_of).
    """
    row = row_of(value, where, PROMPT_COLUMNS)
    if row.messages and isinstance(value.get("prompt"), str):  # TRL's prompt with completion
        row = replace(row, text=value["prompt"], messages=())
    if row.messages and not row.asked:
        raise UserError(
            f"{where}: no message of the user asks for an answer; add a message with the role user before an answer "
            "of the assistant or at the end"
        )
    if not row.messages and not row.text.strip():
        raise UserError(f"{where}: the prompt is empty; write a prompt, or remove this row")
    return row


def read_messages(value: Any, where: str) -> list[Message]:
    """Return the messages that have text and do not come from a tool.

    Raises:
        UserError: `value` is not a list of messages, or all messages are left out.
    """
    messages: list[Message] = []
    with reading(f"{where}: the messages must be a list of objects with role and content"):
        for given in value:
            role = given.get("role", given.get("from"))
            role = SHARE_GPT.get(role, role)
            content = given.get("content", given.get("value"))
            if isinstance(content, list):
                parts = [part.get("text") for part in content if isinstance(part, dict)]
                content = "".join(part for part in parts if isinstance(part, str)) or None
            if not isinstance(role, str) or not isinstance(content, str | None):
                raise ValueError(f"a message has the role {role!r} or a content that is no text")
            if role not in TOOLS and content is not None:
                messages.append({"role": role, "content": content})
    if not messages:
        raise UserError(
            f"{where}: the row needs a list of messages, and at least one of them must have text and a role other than "
            "tool"
        )
    return messages


def _messages(value: dict[str, Any]) -> list[Any] | None:
    """Return the unchecked messages of a row, or None if the row is not a conversation."""
    for name in ("messages", "conversations"):
        if name in value:
            return value[name] if isinstance(value[name], list) else []
    if not {"prompt", "completion"} <= value.keys():
        return None
    if value["prompt"] is None or value["completion"] is None:
        return []
    messages: list[Any] = []
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        said = value[name]
        messages += said if isinstance(said, list) else [{"role": role, "content": said}]
    return messages


# the tag by which a chat template marks the assistant's text
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The n tokens of a conversation.

    ids: Token ids, [n]. counted: Whether each token counts in the loss, [n]. Either all tokens count, or only the
    assistant's tokens and the end-of-turn tokens after them.
    """

    ids: np.ndarray
    counted: np.ndarray

    def row(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids, cut or padded to [seq_len + 1], and a mask, [seq_len]. It is 1 where the next id counts."""
        ids, mask = np.zeros(seq_len + 1, np.int64), np.zeros(seq_len, np.float32)
        length = min(len(self.ids), seq_len + 1)
        ids[:length] = self.ids[:length]
        mask[: length - 1] = self.counted[1:length]
        return ids, mask


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    """Return the ids of a text. Raises UserError: the tokenizer cannot encode the text."""
    with reading(f"{where}: the tokenizer refuses the text"):
        return tokenizer(text, verbose=False)["input_ids"]


def chat_ids(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    reply: bool = True,
) -> list[int]:
    """Return the ids of a conversation. With `reply`, the ids end with the tokens that begin an answer.

    Raises:
        UserError: The chat template refuses the conversation, or renders nothing.
    """
    with reading(f"{where}: the chat template refuses the conversation"):
        ids: Any = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=reply, tokenize=True, return_dict=False
        )
    if not ids:
        raise UserError(
            f"{where}: the chat template renders no tokens for this conversation; remove this row"
        )
    return list(ids)


def render(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, where: str, loss_on: LossOn
) -> Conversation:
    """Return a conversation's tokens, and which of these tokens count in the loss.

    If the chat template has generation tags, they mark the assistant's tokens. Otherwise, each answer is found by
    rendering the conversation twice: up to the start of the answer, and up to its end.

    Raises:
        UserError: There is no chat template, the template refuses the conversation, or it renders a message differently
            if more messages follow.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"{where}: the row has messages, but the tokenizer has no chat template; use a chat "
            "model, or rows of plain text"
        )
    whole = chat_ids(messages, tokenizer, where, reply=False)
    if loss_on == "all":
        return Conversation(np.array(whole), np.ones(len(whole), dtype=bool))
    if GENERATION.search(str(tokenizer.chat_template)):
        rendered: Any = tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return Conversation(np.array(whole), np.array(rendered["assistant_masks"], dtype=bool))
    counted = np.zeros(len(whole), dtype=bool)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = chat_ids(messages[:number], tokenizer, where)
        after = chat_ids(messages[: number + 1], tokenizer, where, reply=False)
        if whole[: len(before)] != before or whole[: len(after)] != after:
            raise UserError(
                f"{where}: the chat template renders message {number + 1} differently if more messages follow, so "
                "the assistant's tokens cannot be found; use draftlab distill --loss-on all, or a template with "
                "generation tags"
            )
        counted[len(before) : _end_of_turn(after, len(before), tokenizer)] = True
    return Conversation(np.array(whole), counted)


def _end_of_turn(ids: list[int], start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the position after the last special token in ids[start:], or len(ids) if there is no special token."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    places = [place for place in range(start, len(ids)) if ids[place] in special]
    return places[-1] + 1 if places else len(ids)
