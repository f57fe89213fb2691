"""Prompts with several turns, as in Spec-Bench: each turn is asked after the target's answers to the earlier turns."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import chain, repeat
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from draftlab import workspace
from draftlab.atomic import write_atomic, writing
from draftlab.console import note
from draftlab.data.text import Message, chat_ids, read_messages
from draftlab.errors import UserError
from draftlab.prompts import Prompt, Prompts, digest
from draftlab.reading import read_json_lines
from draftlab.sampling import SamplingParams

FOLDER = "turns"  # folder under the workspace's runs
TOGETHER = 64  # number of conversations that are answered together
Messages = tuple[Message, ...]
Answer = Callable[[list[Prompt], list[int]], Sequence[Sequence[int]]]


def answered(
    prompts: Prompts,
    tokenizer: PreTrainedTokenizerBase,
    *,
    target: str,
    sampling: SamplingParams,
    answer: Answer,
) -> Prompts:
    """Return one prompt for each turn of each conversation, with the target's answers to the earlier turns.

    Prompts with one turn are unchanged. The target's answers are generated once and stored in a prompt file (see
    place), so that all commands use the same requests.

    Args:
        target: Text that identifies the target.
        answer: Function that returns the token ids of the target's answers. Its arguments are the prompts, and a list
            with the number of each prompt, which seeds the sampling.

    Raises:
        UserError: The chat template rejects an answer, or the file of answers is damaged or cannot be written.
    """
    file = place(prompts, target, sampling)
    if file is None:
        return prompts
    rows = _read(file) if file.exists() else _write(file, prompts.rows, tokenizer, answer)
    if len(rows) != prompts.requests:
        raise UserError(
            f"{file} has {len(rows)} requests, but the prompts need {prompts.requests}; remove the "
            "file, and draftlab writes it again"
        )
    first = list(
        chain.from_iterable(repeat(prompt, 1 + len(prompt.later)) for prompt in prompts.rows)
    )
    rows = [
        replace(
            prompt,
            ids=chat_ids(messages, tokenizer, f"{file}:{number}"),
            messages=messages,
            later=(),
        )
        for number, (messages, prompt) in enumerate(zip(rows, first, strict=True), 1)
    ]
    note(
        f"{prompts.source}: {len(prompts.rows)} conversations give {len(rows)} requests, one for each turn; the "
        f"target's answers to earlier turns are in {file}"
    )
    return replace(prompts, rows=rows, sha256=digest(rows))


def place(prompts: Prompts, target: str, sampling: SamplingParams) -> Path | None:
    """Return the path of the prompt file in which a target's answers are stored, or None if every prompt has one turn.

    The name depends on the prompts, the target and the sampling parameters.
    """
    if prompts.requests == len(prompts.rows):
        return None
    said = [(p.ids, p.later) for p in prompts.rows]
    settings = asdict(replace(sampling, stop_token_ids=()))
    key = hashlib.sha256(json.dumps([target, said, settings]).encode()).hexdigest()
    return workspace.load().runs / FOLDER / f"{Path(prompts.source).stem}-{key[:12]}.jsonl"


def _write(
    file: Path, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, answer: Answer
) -> list[Messages]:
    """Let the target answer the turns, and write the messages of all requests to a file. Return these messages."""
    asked: list[Prompt] = []
    for start in range(0, len(prompts), TOGETHER):
        asked += _asked(prompts[start : start + TOGETHER], len(asked), tokenizer, answer)
    lines = [{"category": prompt.category, "messages": prompt.messages} for prompt in asked]
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, "".join(json.dumps(line) + "\n" for line in lines))
    return [prompt.messages for prompt in asked]


def _asked(
    prompts: list[Prompt], first: int, tokenizer: PreTrainedTokenizerBase, answer: Answer
) -> list[Prompt]:
    """Return the requests of conversations: all turns of the first conversation, then of the second, and so on.

    first: Number of the first request. The number of a request seeds its sampling.
    """
    sizes = [1 + len(prompt.later) for prompt in prompts]
    talks = [[prompt] for prompt in prompts]
    numbers = [first + sum(sizes[:i]) for i in range(len(prompts))]
    while waiting := [i for i, talk in enumerate(talks) if talk[-1].later]:
        texts = answer(
            [talks[i][-1] for i in waiting], [numbers[i] + len(talks[i]) - 1 for i in waiting]
        )
        for i, ids in zip(waiting, texts, strict=True):
            prompt, said = talks[i][-1], tokenizer.decode(list(ids), skip_special_tokens=True)
            turn = (
                {"role": "assistant", "content": said},
                {"role": "user", "content": prompt.later[0]},
            )
            messages = (*prompt.messages, *turn)
            ids = chat_ids(messages, tokenizer, f"turn {len(talks[i]) + 1} after {said[:40]!r}")
            talks[i].append(replace(prompt, ids=ids, messages=messages, later=prompt.later[1:]))
    return list(chain.from_iterable(talks))


def _read(file: Path) -> list[Messages]:
    """Return the messages of each request in a file. Raises UserError: the file is damaged."""
    try:
        rows: list[Messages] = [
            tuple(read_messages(row["messages"], f"{file}:{number}"))
            for number, row in read_json_lines(file)
        ]
    except (UserError, KeyError, TypeError):
        rows = []
    if not rows:
        raise UserError(f"{file} is damaged; remove the file, and draftlab writes it again")
    return rows
