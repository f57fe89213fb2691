"""Make prompts for chat models from templates and docstrings, in place of prompts that users wrote.

python -m draftlab.data.instructions COUNT prints prompts as JSON lines, each a conversation without an answer.
"""

import ast
import itertools
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PHRASES = Path(__file__).with_name("phrases.jsonl")


@cache
def _phrases(name: str) -> list[str]:
    """Return a list of phrases in phrases.jsonl. name: Name of the list: topics, tasks, questions, ..."""
    rows = map(json.loads, PHRASES.read_text(encoding="utf-8").splitlines())
    return [row["text"] for row in rows if row["list"] == name]


def instructions(rng: random.Random) -> Iterator[str]:
    while True:
        first, second = rng.sample(_phrases("topics"), 2)
        yield rng.choice(_phrases("tasks")).format(first, second)


def questions(rng: random.Random) -> Iterator[str]:
    while True:
        question = rng.choice(_phrases("questions"))
        country = rng.choice(_phrases("countries"))
        yield question.format(country=country, thing=rng.choice(_phrases("things")))


def code(rng: random.Random) -> Iterator[str]:
    """Yield prompts that ask for a function of the Python standard library, described by its docstring."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rng.shuffle(files)
    for file in files:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if not isinstance(node, ast.FunctionDef):
                continue
            text = ast.get_docstring(node) or ""
            if 40 < len(text) < 400:
                arguments = ", ".join(a.arg for a in node.args.args)
                yield f"Write a Python function {node.name}({arguments}) that does this:\n{text}"


def mixed(seed: int, count: int) -> list[dict[str, str]]:
    """Return at most `count` different prompts with their categories, in random order.

    Each category gives a third of the prompts, but fewer if it has too few different prompts.
    """
    rng = random.Random(seed)
    sources = {"instruction": instructions(rng), "question": questions(rng), "code": code(rng)}
    share = -(-count // len(sources))
    rows: list[dict[str, str]] = []
    for category, source in sources.items():
        distinct = dict.fromkeys(itertools.islice(source, 4 * share))
        for text in itertools.islice(distinct, share):
            rows.append({"prompt": text, "category": category})
    rng.shuffle(rows)
    return rows[:count]


if __name__ == "__main__":
    for row in mixed(0, int(sys.argv[1])):
        messages = [{"role": "user", "content": row["prompt"]}]
        print(json.dumps({"messages": messages, "category": row["category"]}))
