"""Two lm-eval tasks from held-out code on this disk.

``code_next_line``: which of four lines of real code comes next. ``code_bits_per_byte``: how well text is predicted.
"""

import itertools
import random
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from draftlab.data import Document, documents, first_source
from draftlab.errors import UserError

if TYPE_CHECKING:  # lm-eval takes seconds to import, and scores without tasks do not need it
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks.manager import TaskDict

NEXT_LINE = "code_next_line"
BITS_PER_BYTE = "code_bits_per_byte"
OWN_TASKS = (NEXT_LINE, BITS_PER_BYTE)
ITEMS = 256  # of code_next_line without a limit
CONTEXT_CHARACTERS = (200, 700)  # least and most before an answer; some 60 to 250 tokens of code
LINE_CHARACTERS = (12, 120)  # least and most of an answer without its indentation
LENGTH_RATIO = (0.7, 1.3)  # of a distractor to the answer
DISTRACTORS = 3
DOCUMENT_CHARACTERS = 4000  # of each document of code_bits_per_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class LineItem:
    """One question of code_next_line; context and choices end with a line break."""

    context: str
    choices: list[str]
    answer: int


def own_tasks(names: list[str], data: str, limit: int | None, seed: int) -> "TaskDict":
    if not names:
        return {"tasks": {}, "groups": {}}
    docs = documents(first_source(data), "heldout")
    makers = {
        NEXT_LINE: lambda: _next_line_task(next_line_items(docs, count=limit or ITEMS, seed=seed), data),
        BITS_PER_BYTE: lambda: _bits_per_byte_task(docs),
    }
    return {"tasks": {name: makers[name]() for name in names}, "groups": {}}


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


def _next_line_task(items: list[LineItem], data: str) -> "ConfigurableTask":
    if not items:
        raise UserError(f"data {data!r}: its held-out split is too short, or too uniform, for {NEXT_LINE}")
    config = {
        "task": NEXT_LINE,
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [_metric("acc", "mean", True), _metric("acc_norm", "mean", True)],
    }
    return _task(config, [asdict(item) for item in items])


def _bits_per_byte_task(docs: list[Document]) -> "ConfigurableTask":
    config = {
        "task": BITS_PER_BYTE,
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [
            _metric("bits_per_byte", "bits_per_byte", False),
            _metric("byte_perplexity", "weighted_perplexity", False),
        ],
    }
    return _task(config, [{"text": doc.text[:DOCUMENT_CHARACTERS]} for doc in docs])


def _metric(name: str, aggregation: str, higher_is_better: bool) -> dict[str, object]:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": higher_is_better}


def _task(config: dict[str, Any], rows: list[dict[str, object]]) -> "ConfigurableTask":
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    dataset = {"custom_dataset": lambda **_: {"test": Dataset.from_list(rows)}, "test_split": "test"}
    plain = {"target_delimiter": "", "num_fewshot": 0, "metadata": {"version": 1}}
    return ConfigurableTask(config=config | dataset | plain)
