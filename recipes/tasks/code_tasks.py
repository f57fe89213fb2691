"""Data of two lm-eval tasks from held-out code on this disk, for code_next_line.yaml and code_bits_per_byte.yaml.

data is a source of text as draftlab's --data takes it: a file, a folder, or the standard library. Both functions are
custom_dataset of their task. lm-eval passes them the task's dataset_kwargs, and arguments that they do not need: those
of the model, and the task's version.
"""

import itertools
import random
from dataclasses import dataclass

from datasets import Dataset

from draftlab.data import Document, documents, first_source
from draftlab.errors import UserError

CONTEXT_CHARACTERS = (200, 700)  # least and most before an answer; some 60 to 250 tokens of code
LINE_CHARACTERS = (12, 120)  # least and most of an answer without its indentation
LENGTH_RATIO = (0.7, 1.3)  # of a distractor to the answer
DISTRACTORS = 3
# of each document of code_bits_per_byte; fewer tokens than drafts are trained on at once
DOCUMENT_CHARACTERS = 1500


def next_line(data: str = "stdlib", items: int = 256, seed: int = 0, **_: object) -> dict[str, Dataset]:
    """Return questions: which of four lines of code comes next. A choice is the whole text that it ends.

    A tokenizer may join a line break with the character before it, so that a context and a line on their own have other
    tokens than the text that they make.
    """
    questions = next_line_items(documents(first_source(data), "heldout"), count=items, seed=seed)
    if not questions:
        raise UserError(f"data {data!r}: its held-out split is too short, or too uniform, for code_next_line")
    rows = [{"texts": [item.context + line for line in item.choices], "label": item.answer} for item in questions]
    return {"test": Dataset.from_list(rows)}


def texts(data: str = "stdlib", **_: object) -> dict[str, Dataset]:
    """Return the beginnings of documents, to predict."""
    heldout = documents(first_source(data), "heldout")
    return {"test": Dataset.from_list([{"answer": document.text[:DOCUMENT_CHARACTERS]} for document in heldout])}


@dataclass(frozen=True, slots=True, kw_only=True)
class LineItem:
    """One question of code_next_line; context and choices end with a line break."""

    context: str
    choices: list[str]
    answer: int


def next_line_items(docs: list[Document], *, count: int, seed: int) -> list[LineItem]:
    """Return up to count questions; the first n are the same for every count of at least n.

    A distractor is a line of these documents with the indentation of the answer and about its length that is not in
    the context.
    """
    rng = random.Random(seed)
    lines = [doc.text.split("\n") for doc in docs]
    places = [(document, number) for document, rows in enumerate(lines) for number in range(1, len(rows) - 1)]
    rng.shuffle(places)
    pool = _by_indentation(lines)
    items = (_item(lines[document], number, pool, rng) for document, number in places)
    return list(itertools.islice((item for item in items if item is not None), count))


def _by_indentation(lines: list[list[str]]) -> dict[str, list[str]]:
    """Return all distinct lines of a suitable length by indentation; last lines may be cut off and are left out."""
    fit = dict.fromkeys(line for rows in lines for line in rows[:-1] if _within(len(line.strip()), LINE_CHARACTERS))
    pool: dict[str, list[str]] = {}
    for line in fit:
        pool.setdefault(_indentation(line), []).append(line)
    return pool


def _item(lines: list[str], number: int, pool: dict[str, list[str]], rng: random.Random) -> LineItem | None:
    """Return the question for a line, or None if it is too short, too long, too early, or has too few distractors."""
    answer, context = lines[number], _context(lines[:number])
    if not _within(len(answer.strip()), LINE_CHARACTERS) or len(context) < CONTEXT_CHARACTERS[0]:
        return None
    least, most = (ratio * len(answer.strip()) for ratio in LENGTH_RATIO)
    as_long = [line for line in pool[_indentation(answer)] if least <= len(line.strip()) <= most]
    others = [line for line in as_long if line.strip() != answer.strip() and line.strip() not in context]
    if len(others) < DISTRACTORS:
        return None
    choices = rng.sample(others, DISTRACTORS)
    at = rng.randrange(DISTRACTORS + 1)
    choices.insert(at, answer)
    return LineItem(context=context, choices=[line + "\n" for line in choices], answer=at)


def _context(before: list[str]) -> str:
    """Return as many whole lines from the end of before as fit."""
    sizes = itertools.accumulate(len(line) + 1 for line in reversed(before))
    count = sum(1 for _ in itertools.takewhile(lambda size: size <= CONTEXT_CHARACTERS[1], sizes))
    return "".join(line + "\n" for line in before[len(before) - count :])


def _indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _within(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]
