"""Laws of recipes/tasks: items of the tasks from code, and rows that make_tasks.py writes."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.builders import PASS_ROUNDING, build
from helpers.small_files import write_rows
from lm_eval.tasks.hellaswag.utils import process_docs

from benchmarks.tiny_target import train_tokenizer
from draftlab.data import Document, documents
from draftlab.model.checkpoint import load_model, load_tokenizer
from draftlab.results.score import TaskResult
from draftlab.scoring.lm_eval import load_tasks

TASKS = Path(__file__).parents[2] / "recipes/tasks"
CPU = torch.device("cpu")
ITEMS = 12
HELLASWAG = [
    {
        "ind": n,
        "activity_label": "Coding",
        "ctx_a": f"def f{n}(self, x): [step] opens the file.",
        "ctx_b": "then it",
        "ctx": "both together",
        "endings": [f"return {n}", "  raise [title] an error", "pass", f"self.x{n} = x"],
        "label": str(n % 4),
        "split": "val",
    }
    for n in range(6)
]
ARC = [
    {
        "question": {
            "stem": "Which is a loop?",
            "choices": [{"text": "for", "label": "A"}, {"text": "if", "label": "B"}],
        },
        "answerKey": "A",
    },
    {
        "question": "Which is a test?",
        "choices": {"text": ["1", "if"], "label": ["1", "2"]},
        "answerKey": "2",
    },
]
GSM8K = [{"question": f"What is {n} + {n}?", "answer": f"It is {n} + {n}.\n#### {2 * n}"} for n in range(9)]
TOWER = "The {} tower number {}{} was built of old stone by a king who is long dead . "
WIKITEXT = "".join(  # as the data set is written: headings, a space before each full stop
    f" = {title} = \n \n"
    + "".join(
        " " + "".join(TOWER.format(part, title, n) for n in range(3)) + "\n"
        for part in ("north", "south", "east", "west")
    )
    for title in ("Alpha", "Beta", "Gamma", "Delta")
)


spec = importlib.util.spec_from_file_location("code_tasks", TASKS / "code_tasks.py")
code_tasks: Any = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = code_tasks  # dataclasses look their module up
spec.loader.exec_module(code_tasks)


@pytest.fixture(scope="module")
def docs() -> list[Document]:
    return documents("stdlib", "heldout")


@pytest.fixture(scope="module")
def items(docs) -> list[Any]:
    return code_tasks.next_line_items(docs, count=200, seed=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory, docs) -> Path:
    """Return a random model with a long window. Its tokenizer puts bos in front and joins ')' with a line break."""
    out = tmp_path_factory.mktemp("long")
    build("llama", max_position_embeddings=2048, vocab_size=600).save_pretrained(out)
    train_tokenizer([doc.text for doc in docs], 600, out)
    return out


def measured(model: Path, task: str, limit: int) -> dict[str, TaskResult]:
    asked = load_tasks([str(TASKS / f"{task}.yaml")], limit=limit, batch_size=2)
    return {result.metric: result for result in asked.of_checkpoint(model, torch.float32, CPU)}


def log_prob(model: Any, ids: list[int]) -> float:
    """Natural log-probability of all ids after the first, by one plain forward pass."""
    with torch.no_grad():
        log_probs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return float(log_probs.gather(-1, torch.tensor(ids[1:])[:, None]).sum())


def test_an_item_has_the_next_line_and_three_others_alike_in_indentation_and_length(items, docs):
    lines = {line + "\n" for doc in docs for line in doc.text.split("\n")}
    assert len(items) == 200
    for item in items:
        answer = item.choices[item.answer]
        assert any(item.context + answer in doc.text for doc in docs)
        assert len(set(item.choices)) == len(item.choices) == 4
        assert lines.issuperset(item.choices)
        for choice in item.choices:
            assert choice[: -len(choice.lstrip())] == answer[: -len(answer.lstrip())]
            assert 0.7 <= len(choice.strip()) / len(answer.strip()) <= 1.3
            assert choice is answer or choice.strip() not in item.context
    assert code_tasks.next_line_items(docs, count=30, seed=0) == items[:30]
    assert code_tasks.next_line_items(docs, count=30, seed=1) != items[:30]


def test_accuracy_is_the_share_of_items_whose_likeliest_text_has_the_answer(model, items):
    loaded, tokenizer, right = load_model(model, torch.float32).eval(), load_tokenizer(model), []
    for item in items[:ITEMS]:
        texts = [tokenizer(item.context + choice)["input_ids"] for choice in item.choices]
        likely = [log_prob(loaded, ids) for ids in texts]
        right.append(float(likely.index(max(likely)) == item.answer))
    acc = measured(model, "code_next_line", ITEMS)["acc"]
    assert acc.items == right
    assert 0 < sum(right) < ITEMS


def test_bits_per_byte_is_that_of_a_forward_pass(model, docs):
    loaded, tokenizer = load_model(model, torch.float32).eval(), load_tokenizer(model)
    texts = [doc.text[:1500] for doc in docs[:3]]
    bits = [-log_prob(loaded, tokenizer(text)["input_ids"]) / math.log(2) for text in texts]
    found = measured(model, "code_bits_per_byte", 3)
    assert found["bits_per_byte"].value == pytest.approx(
        sum(bits) / sum(len(text.encode()) for text in texts), rel=PASS_ROUNDING
    )
    assert found["answer_bits"].items == pytest.approx(bits, rel=PASS_ROUNDING)
    assert not found["bits_per_byte"].higher_is_better


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """Return the tasks of make_tasks.py, made of small files, by name."""
    out = tmp_path_factory.mktemp("tasks")
    for name, rows in (("hellaswag", HELLASWAG), ("arc", ARC), ("gsm8k", GSM8K)):
        write_rows(out / f"{name}.jsonl", rows)
    (out / "wiki.txt").write_text(WIKITEXT)
    for line in (
        "hellaswag hellaswag.jsonl",
        "arc arc.jsonl",
        "gsm8k gsm8k.jsonl --examples gsm8k.jsonl",
        "next-sentence wiki.txt",
        "which-article wiki.txt",
    ):
        command = [sys.executable, TASKS / "make_tasks.py", *line.split(), "--out", "."]
        subprocess.run(command, cwd=out, check=True, capture_output=True)
    for file in out.glob("*.yaml"):
        cached = f"dataset_kwargs: {{cache_dir: {out / 'cache'}, "
        file.write_text(file.read_text().replace("dataset_kwargs: {", cached))
    return {file.stem: file for file in out.glob("*.yaml")}


def rows(task: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in task.with_suffix(".jsonl").read_text().splitlines()]


def test_every_task_that_is_made_can_be_loaded(made):
    tasks = load_tasks([str(file) for file in made.values()], limit=2, batch_size=1)
    loaded = tasks.index.load(tasks.names)["tasks"]
    assert loaded.keys() == made.keys()
    assert all(len(task.eval_docs) for task in loaded.values())
    for item in rows(made["next_sentence"]):
        assert len(set(item["choices"])) == 4
        assert f"{item['query']} {item['choices'][item['label']]}" in WIKITEXT.replace(" .", ".")


def test_hellaswags_rows_are_those_of_lm_evals_task(made):
    expected = process_docs(Dataset.from_list(HELLASWAG))
    theirs = [(row["query"], row["choices"], row["gold"]) for row in expected]
    ours = [(row["query"], row["choices"], row["label"]) for row in rows(made["local_hellaswag"])]
    assert ours == theirs


def test_both_layouts_of_arc_are_read(made):
    first, second = rows(made["local_arc"])
    assert first == {"query": "Which is a loop?", "choices": ["for", "if"], "label": 0}
    assert second == {"query": "Which is a test?", "choices": ["1", "if"], "label": 1}
