"""Read rows of text, for training and as prompts, from JSON lines, JSON, Parquet files and the hub.

A row is a conversation (`messages`, ShareGPT's `conversations`, or TRL's `prompt` with `completion`), a question with
its answer (Alpaca, Orca), the turns of a user (`turns`), or a plain text. The content of a message is a text or a list
of parts, whose texts are joined. All other fields of a message go to the chat template as they are. Messages without
text and without tool calls are left out. data/rendering.py renders conversations to train on.
"""

import glob
import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftlab.console import note_once
from draftlab.data.bad_rows import BadRows
from draftlab.dates import with_date
from draftlab.errors import UserError
from draftlab.model import hub
from draftlab.model.tokenizer import check_embedded
from draftlab.reading import check_downloaded, open_bytes, parse_json, read_lines, reading

Message = dict[str, Any]  # role, content and further fields, as chat templates take them
Tool = dict[str, Any]  # JSON schema of a function, as chat templates take it
TEXT_COLUMNS = ("text", "prompt", "question", "content")
PROMPT_COLUMNS = ("prompt", "text", "question", "content")
CONVERSATIONS = ("messages", "conversations", "conversation")
QUESTIONS = ("instruction", "prompt", "question", "query")
ANSWERS = ("completion", "output", "response", "answer")
FORMS = (
    "messages, conversations, prompt with completion, instruction with output, question with response, turns, or one "
    f"of {', '.join(TEXT_COLUMNS)}"
)
# names of roles in ShareGPT and in sets of its form (loaders of FastChat, axolotl and LLaMA-Factory)
ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),  # becomes a message with tool calls
}
# names of the role of a tool's result; some templates read observation (GLM) or ipython (Llama)
RESULTS = ("tool", "function", "observation", "ipython", "function_response", "tool_response")
# names of reasoning; transformers gives it to a template under the name that the template reads
REASONING = ("reasoning_content", "reasoning", "thinking")
# the fields that hold the rows of a file whose JSON value is an object
ROW_KEYS = ("train", "data", "rows", "examples", "instances")
# an object with one of these columns is a row
ROW_COLUMNS = {*CONVERSATIONS, *QUESTIONS, *TEXT_COLUMNS, "turns"}
BOM = b"\xef\xbb\xbf"  # some editors begin a file with it


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRow:
    """The text of a row.

    Args:
        text: The text. For a conversation, the contents of its messages, joined by line breaks.
        messages: The messages, if the row is a conversation.
        later: Turns of the user after the first turn, if the row has `turns`. The first turn is `text`.
        system: System prompt of a row without messages. It is part of a prompt, and not of a plain text.
        tools: Tools that the assistant may call.
        document_id: Name of the document from which the row is cut. Rows of one document count as one conversation.
        left_out: Number of messages that are left out, because they have no text.
        unread: Names of the fields of the row that have a value, but are neither in the text nor in the messages.
    """

    text: str
    messages: tuple[Message, ...] = ()
    later: tuple[str, ...] = ()
    category: str = ""
    system: str = ""
    tools: tuple[Tool, ...] = ()
    document_id: str = ""
    left_out: int = 0
    unread: frozenset[str] = frozenset()

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
    return [messages[:at] for at, pair in enumerate(pairwise(roles), 1) if pair == ("user", "assistant")]


def rows_of(file: Path, parse: Parse, bad: BadRows | None = None) -> Iterator[tuple[int, TextRow]]:
    """Yield the number and the parsed content of every row of a file. Blank lines and rows without text are skipped.

    Rows are numbered from 1; a row of JSON lines has the number of its line. Bad rows are left out, as in checked_rows.

    Raises:
        UserError: The file cannot be read, or too many rows are bad (see BadRows).
    """
    bad = bad or BadRows(str(file))
    check_downloaded(file)
    if hub.has_suffix(file, (".parquet",)):
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
    if not isinstance(content, dict) or content.keys() & ROW_COLUMNS:
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
        rows = load_dataset("parquet", data_files=glob.escape(str(file)), split="train", streaming=True)
        yield from map(without_padding, rows)


def without_padding(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table without the null fields by which Arrow gives all objects of a column the same fields.

    A chat template would write them, as in the arguments of a tool call.
    """
    return {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nulls(v) for name, v in value.items() if v is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def check_prompts(file: Path) -> None:
    """Check that the rows of a file have prompts.

    Raises:
        UserError: The file is missing, or too many of its rows have no prompt.
    """
    deque(rows_of(file, prompt_of), maxlen=0)


def checked_rows(values: Iterable[tuple[int, Any]], parse: Parse, bad: BadRows) -> Iterator[tuple[int, TextRow]]:
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
        note_once(f"{bad.source}: {left_out:,} messages are left out, because they have no text (images, null)")


def _checked_characters(row: TextRow, where: str) -> TextRow:
    """Return the row. Raises UserError: its text has half of a character, which no tokenizer can encode."""
    parts = [row.text, row.later, row.messages, row.system, row.tools]
    texts = json.dumps(parts, ensure_ascii=False, default=str)
    try:
        texts.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(texts[error.start]):04x}"
        raise UserError(
            f"{where}: the text has a lone surrogate, {half}, which is one half of a character; remove this row"
        ) from None
    return row


def row_of(value: object, where: str, columns: tuple[str, ...] = TEXT_COLUMNS) -> TextRow:
    """Return the text of a row to train on. Plain text is read from the first of `columns` whose value is a text.

    value: Raw content of the row. where: Name of the row for errors.

    Raises:
        UserError: The row has none of the supported formats.
    """
    if not isinstance(value, dict):
        raise UserError(f"{where}: the row is not a JSON object; write an object with {FORMS}")
    row, read = _read(value, where, columns)
    document = value.get("document_id")
    row = replace(
        row,
        category=str(value.get("category", "")),
        tools=tuple(_tools(value)),
        document_id="" if document is None else str(document),
    )
    read |= {"category", "document_id"} | ({"tools", "functions"} if row.tools else set())
    unread = {name for name, field in value.items() if field not in (None, "", [], {})} - read
    return replace(row, unread=row.unread | unread)


def _read(value: dict[str, Any], where: str, columns: tuple[str, ...]) -> tuple[TextRow, set[str]]:
    """Return the text of a row, without category and tools, and the names of the columns that it was read from."""
    system = _system(value)
    if (given := _messages(value)) is not None:
        unchecked, read = given
        messages = read_messages(unchecked, where)
        unread = frozenset(_parts(unchecked))
        left_out = len(unchecked) - len(messages)
        if system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": value[system]})
            read |= {system}
        text = "\n".join(message.get("content") or "" for message in messages)
        return TextRow(text=text, messages=tuple(messages), left_out=left_out, unread=unread), read
    turns = value.get("turns")
    said = value[system] if system else ""
    if turns and not (isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)):
        raise UserError(f"{where}: turns must be a list of texts, one for each turn of the user")
    if turns:
        return TextRow(text=turns[0], later=tuple(turns[1:]), system=said), {"turns"}
    column = next((column for column in columns if isinstance(value.get(column), str)), None)
    if column is None:
        raise UserError(
            f"{where}: the row's columns ({', '.join(map(str, value))}) have no text; the row needs {FORMS}"
        )
    return TextRow(text=value[column], system=said), {column}


def prompt_of(value: object, where: str) -> TextRow:
    """Return the text of a row that must have a prompt: a plain text, or a conversation that asks for an answer.

    value: Raw content of the row. where: Name of the row for errors.

    Raises:
        UserError: The row has none of the supported formats, its text is empty, or no prompt can be taken from its
            conversation (see prompts_of).
    """
    row = row_of(value, where, PROMPT_COLUMNS)
    assert isinstance(value, dict)  # row_of refuses other values
    system = _system(value)
    pair = _pair(value)
    if row.messages and not any(name in value for name in CONVERSATIONS):
        question = value["prompt"] if pair is None else pair[0]
        if isinstance(question, str):  # the prompt is the question alone, without its answer
            said = value[system] if system else ""
            row = replace(row, text=question, messages=(), system=said)
    elif not row.messages and system:
        row = replace(row, unread=row.unread - {system})
    if row.messages and not row.asked:
        raise UserError(
            f"{where}: no message of the user asks for an answer; add a message with the role user before an answer "
            "of the assistant or at the end"
        )
    if not row.messages and not row.text.strip():
        raise UserError(f"{where}: the prompt is empty; write a prompt, or remove this row")
    return row


def read_messages(value: Iterable[Any], where: str) -> list[Message]:
    """Return the messages that have a text or tool calls, under the names of roles and fields that templates read.

    Results of tools are left out with the message before them.

    Raises:
        UserError: `value` is not a list of messages, or all messages are left out.
    """
    messages: list[Message] = []
    silent = False  # whether the message before the results of tools is left out
    with reading(f"{where}: the messages must be a list of objects with role and content"):
        for given in value:
            role = given.get("role", given.get("from"))
            content = given.get("content", given.get("value"))
            if isinstance(content, list):
                parts = [part.get("text") for part in content if isinstance(part, dict)]
                content = "".join(part for part in parts if isinstance(part, str)) or None
            if not isinstance(role, str) or not isinstance(content, str | None):
                raise ValueError(f"a message has the role {role!r} or a content that is no text")
            silent = not _says(given) or (silent and role in RESULTS)
            if silent:
                continue
            role = ROLES.get(role, role)
            if "from" in given and role in RESULTS:  # ShareGPT's names
                role = "tool"
            message: Message = {"role": role, "content": content}
            message |= {name: given[name] for name in given if name not in CONTENT}
            if role == "call":
                message |= {"role": "assistant", "content": "", "tool_calls": _calls(content)}
            messages.append({name: field for name, field in message.items() if field is not None})
    if not messages:
        raise UserError(
            f"{where}: the row needs a list of messages, and at least one of them must have text or tool calls"
        )
    return messages


CONTENT = ("role", "from", "content", "value")  # the fields of a message that read_messages renames


def _says(given: Mapping[str, Any]) -> bool:
    """Return whether an unchecked message has a text or tool calls."""
    content = given.get("content", given.get("value"))
    if isinstance(content, list):
        content = next((part for part in content if isinstance(part, dict) and _text_of(part)), None)
    return content is not None or bool(given.get("tool_calls"))


def _text_of(part: Mapping[str, Any]) -> str:
    """Return the text of a part of a message, or an empty text."""
    text = part.get("text")
    return text if isinstance(text, str) else ""


def _parts(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the types of the parts of messages that are no text, such as image."""
    for message in messages:
        content = message.get("content", message.get("value"))
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else None
                yield f"{kind or 'other'} parts"


def _calls(text: str | None) -> list[dict[str, Any]]:
    """Return the tool calls in the text of ShareGPT's role function_call: a JSON object, or a list of objects.

    Raises:
        ValueError: The text is not JSON, or an object has no name.
    """
    calls = parse_json(text or "")
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError(f"a function call must be a JSON object with a name, not {call!r}")
    return [{"type": "function", "function": call} for call in calls]


def _messages(value: dict[str, Any]) -> tuple[list[Any], set[str]] | None:
    """Return the unchecked messages of a row and the names of their columns, or None if it is not a conversation."""
    if names := [name for name in CONVERSATIONS if name in value]:
        name = next((name for name in names if value[name]), names[0])
        given = _from_json(value[name])
        return (given if isinstance(given, list) else []), {name}
    if (pair := _pair(value)) is not None:
        question, answer, read = pair
        return [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ], read
    read = {"prompt", "completion"}
    if not read <= value.keys():
        return None
    if value["prompt"] is None or value["completion"] is None:
        return [], read
    messages: list[Any] = []
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        said = value[name]
        messages += said if isinstance(said, list) else [{"role": role, "content": said}]
    return messages, read


def _pair(value: dict[str, Any]) -> tuple[str, str, set[str]] | None:
    """Return the question and the answer of a row that has both as texts, and the names of their columns.

    The texts `input` (Alpaca) and `context` (Dolly) belong to an instruction.
    """
    if any(name in value for name in CONVERSATIONS):
        return None
    for names in product(QUESTIONS, ANSWERS):
        question, answer = (value.get(name) for name in names)
        if not (isinstance(question, str) and question and isinstance(answer, str) and answer):
            continue
        more: list[str] = []
        if names[0] == "instruction":
            given = [name for name in ("input", "context") if value.get(name)]
            more = [name for name in given if isinstance(value[name], str)]
        return "\n".join([question, *(value[name] for name in more)]), answer, {*names, *more}
    return None


def _system(value: dict[str, Any]) -> str | None:
    """Return the name of the column with the system prompt of a row, or None."""
    names = ("system", "system_prompt")
    return next((n for n in names if isinstance(value.get(n), str) and value[n]), None)


def _tools(value: dict[str, Any]) -> list[Tool]:
    """Return the tools of a row: a list of schemas, or its JSON text. A bare function becomes a schema with a type."""
    given = _from_json(value.get("tools") or value.get("functions"))
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        return []
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in given]


def _from_json(value: object) -> object:
    """Return the content of a JSON text. Tables have such texts in place of lists. Other values are returned as is."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError:
        return value


def supported(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[list[Message], set[str]]:
    """Return the messages that a chat template can render, and the names of the fields that it does not read.

    A template that reads no tool calls would render an empty answer in place of a call, so such turns are left out with
    the results of their tools. Whether a template reads a field is taken from its source.
    """
    template = str(tokenizer.chat_template)
    rendered: list[Message] = []
    unread: set[str] = set()
    uncalled = False  # whether the call before the results of tools is left out
    for message in messages:
        result = message["role"] in RESULTS
        uncalled = (uncalled and result) or (bool(message.get("tool_calls")) and not _names("tool_calls", template))
        if result and (uncalled or message["role"] not in template):
            unread.add(f"messages of the role {message['role']}")
        elif uncalled:
            unread.add("tool_calls")
        else:
            rendered.append(message)
            for name in message.keys() - set(CONTENT):
                aliases = REASONING if name in REASONING else (name,)
                if message[name] and not any(_names(alias, template) for alias in aliases):
                    unread.add(name)
    return rendered, unread


def _names(field: str, template: str) -> bool:
    return re.search(rf"\b{re.escape(field)}\b", template) is not None


def unread_fields(messages: Sequence[Message], tools: Sequence[Tool], tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the names of the fields of a conversation that are not rendered."""
    if not tokenizer.chat_template:
        return {"tools"} if tools else set()
    unread = supported(messages, tokenizer)[1]
    return unread | ({"tools"} if tools and not _names("tools", str(tokenizer.chat_template)) else set())


def note_unread(rows: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Print a note for each file with fields that are not read, with the number of rows that have each field.

    rows: Name of each row, FILE:NUMBER, with the names of its unread fields.
    """
    files: dict[str, Counter[str]] = {}
    total = Counter[str]()
    for name, fields in rows:
        file = name.rpartition(":")[0]
        total[file] += 1
        files.setdefault(file, Counter()).update(fields)
    for file, counts in files.items():
        if counts:
            listed = ", ".join(f"{field} ({count:,})" for field, count in counts.most_common())
            note_once(f"{file}: of {total[file]:,} rows, these fields are not read: {listed}")


def text_ids(
    text: str, tokenizer: PreTrainedTokenizerBase, where: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Return the ids of a text. Raises UserError: the tokenizer cannot encode the text, or an id has no embedding."""
    with reading(f"{where}: the tokenizer refuses the text"):
        encoded = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    ids: list[int] = encoded["input_ids"]
    check_embedded(ids, tokenizer, where)
    return ids


def chat_text(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    reply: bool = True,
    tools: Sequence[Tool] = (),
) -> str:
    """Return a conversation as the chat template renders it. With `reply`, it ends with the start of an answer.

    Raises:
        UserError: The chat template refuses the conversation.
    """
    with reading(f"{where}: the chat template refuses the conversation"):
        rendered: Any = tokenizer.apply_chat_template(
            supported(messages, tokenizer)[0],
            tools=list(tools) or None,
            chat_template=with_date(tokenizer.get_chat_template(tools=list(tools) or None)),
            add_generation_prompt=reply,
            tokenize=False,
        )
    return rendered


def chat_ids(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    reply: bool = True,
    tools: Sequence[Tool] = (),
) -> list[int]:
    """Return the ids of a conversation. With `reply`, the ids end with the tokens that begin an answer.

    Raises:
        UserError: The chat template refuses the conversation, or renders nothing. Or an id has no embedding.
    """
    text = chat_text(messages, tokenizer, where, reply=reply, tools=tools)
    if not (ids := text_ids(text, tokenizer, where, add_special_tokens=False)):
        raise UserError(f"{where}: the chat template renders no tokens for this conversation; remove this row")
    return ids
