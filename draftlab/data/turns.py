"""Prompts with several turns, as in Spec-Bench: each turn is asked after the target's answers to the earlier turns."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, chain
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from draftlab.console import note
from draftlab.data.bad_rows import BadRows
from draftlab.data.prompts import Prompt, Prompts
from draftlab.data.text import Message, chat_ids, read_messages
from draftlab.errors import UserError
from draftlab.reading import read_json_lines, reading
from draftlab.runs import workspace
from draftlab.runs.atomic import write_atomic, writing
from draftlab.sampling import SamplingParams

FOLDER = "turns"  # folder under the workspace's runs
Messages = tuple[Message, ...]
# the token ids of an answer, or the error of a server that cannot answer this prompt
Answer = Callable[[list[Prompt], list[int]], Sequence[Sequence[int] | UserError]]


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
    place), so that all commands use the same requests. A conversation in which a server refuses a turn is a bad row.

    Args:
        target: Text that identifies the target.
        answer: Function that returns the token ids of the target's answers. Its arguments are the prompts, and a list
            with the number of each prompt, which seeds the sampling.

    Raises:
        UserError: The chat template rejects an answer, too many conversations are bad, or the file of answers is
            damaged or cannot be written.
    """
    file = place(prompts, target, sampling)
    if file is None:
        return prompts
    bad = BadRows(prompts.source, len(prompts.rows))
    if not file.exists():
        talks = _asked(prompts.rows, tokenizer, answer, bad)
        bad.settle()
        _write(file, talks)
    rows = _read(file)
    asked = _present(prompts.rows, rows, bad)
    bad.settle()
    if len(rows) != sum(1 + len(prompt.later) for prompt in asked):
        raise UserError(
            f"{file} has {len(rows)} requests, which are not those of the prompts; remove the file, and draftlab "
            "writes it again"
        )
    requests: list[Prompt] = []
    for prompt in asked:
        for turn in range(1 + len(prompt.later)):
            messages = rows[len(requests)]
            where = f"{file}:{len(requests) + 1}"
            ids = chat_ids(messages, tokenizer, where, tools=prompt.tools)
            requests.append(
                replace(
                    prompt,
                    ids=ids,
                    messages=messages,
                    later=(),
                    first=prompt.ids,
                    said=prompt.later[:turn],
                )
            )
    note(
        f"{prompts.source}: {len(asked)} conversations give {len(rows)} requests, one for each turn; the "
        f"target's answers to earlier turns are in {file}"
    )
    return replace(prompts, rows=requests)


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


def _write(file: Path, requests: list[Prompt]) -> None:
    """Write the messages of requests to a prompt file. Raises UserError: the file cannot be written."""
    lines = [{"category": prompt.category, "messages": prompt.messages} for prompt in requests]
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, "".join(json.dumps(line) + "\n" for line in lines))


def _present(prompts: Sequence[Prompt], rows: Sequence[Messages], bad: BadRows) -> list[Prompt]:
    """Return the prompts whose requests are among the rows of a file. Other prompts are left out as bad rows."""
    present = list[Prompt]()
    row = 0
    for number, prompt in enumerate(prompts, 1):
        if row < len(rows) and rows[row] == tuple(read_messages(list(prompt.messages), "")):
            present.append(prompt)
            row += 1 + len(prompt.later)
        elif f"conversation {number}" not in bad:
            bad.leave_out(f"conversation {number}", "the target could not answer an earlier turn")
    return present


def _asked(prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, answer: Answer, bad: BadRows) -> list[Prompt]:
    """Return the requests of conversations: all turns of the first conversation, then of the second, and so on.

    The number of a request seeds its sampling. A conversation in which a turn was refused is left out.
    """
    talks = [[prompt] for prompt in prompts]
    numbers = list(accumulate((1 + len(prompt.later) for prompt in prompts), initial=0))
    while waiting := [i for i, talk in enumerate(talks) if talk and talk[-1].later]:
        requests = [numbers[i] + len(talks[i]) - 1 for i in waiting]
        texts = answer([talks[i][-1] for i in waiting], requests)
        for i, ids in zip(waiting, texts, strict=True):
            if isinstance(ids, UserError):
                bad.leave_out(f"conversation {i + 1}", str(ids))
                talks[i] = []
                continue
            prompt = talks[i][-1]
            said = tokenizer.decode(list(ids), skip_special_tokens=True)
            reply = {"role": "assistant", "content": said}
            messages = (*prompt.messages, reply, {"role": "user", "content": prompt.later[0]})
            where = f"turn {len(talks[i]) + 1} after {said[:40]!r}"
            ids = chat_ids(messages, tokenizer, where, tools=prompt.tools)
            talks[i].append(replace(prompt, ids=ids, messages=messages, later=prompt.later[1:]))
    return list(chain.from_iterable(talks))


def _read(file: Path) -> list[Messages]:
    """Return the messages of each request in a file. Raises UserError: the file is damaged."""
    rows: list[Messages] = []
    with reading(f"{file} is damaged; remove the file, and draftlab writes it again"):
        for number, row in read_json_lines(file):
            rows.append(tuple(read_messages(row["messages"], f"{file}:{number}")))
    return rows
