"""Held-out text is unseen: copies, several answers to a prompt, another order, name or format change no split."""

import gzip
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from helpers.builders import build
from helpers.chats import chatty_fixture, plain_fixture  # noqa: F401
from helpers.errors import raises_option
from helpers.small_files import write_rows
from hypothesis import given
from hypothesis import strategies as st

from draftlab import data
from draftlab.commands import OUTPUTS_BUILD
from draftlab.data import documents, grouped_holdout
from draftlab.data.prompts import file_prompts, prompt_rows
from draftlab.model import checkpoint
from draftlab.searching.prompts import find_prompts
from draftlab.target_outputs.batches import open_stored
from draftlab.target_outputs.build import ServerLog
from draftlab.target_outputs.outputs import heldout_numbers
from draftlab.target_outputs.store import HELDOUT, MANIFEST, read_store, read_texts

Rows = list[dict[str, Any]]


def asked(number: int, answer: str = "yes") -> dict[str, Any]:
    question = {"role": "user", "content": f"question {number}"}
    return {"messages": [question, {"role": "assistant", "content": answer}]}


def hashed_out(text: str) -> bool:
    """Return whether the first 7 bytes of a text's SHA-256 are a number below 8 % of the largest (docs/formats.md)."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:14], 16) < 0.08 * 2**56


def questions(source: Path, split: data.Split) -> list[str]:
    return [document.messages[0]["content"] for document in documents(str(source), split)]


def in_every_format(folder: Path, rows: Rows) -> list[Path]:
    """Return the same rows in all formats and under several names."""
    folder.mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "a.jsonl").write_text(lines)
    (folder / "b.ndjson").write_text(lines)
    (folder / "C.JSONL").write_text(lines)
    (folder / "lines.json").write_text(lines)
    (folder / "array.json").write_text(json.dumps(rows))
    (folder / "object.json").write_text(json.dumps({"version": "1.0", "data": rows}))
    (folder / "splits.json").write_text(json.dumps({"train": rows, "test": [asked(-1)]}))
    for name in ("d.jsonl.gz", "e.json.gz", "f.ndjson.gz"):
        (folder / name).write_bytes(gzip.compress(lines.encode()))
    Dataset.from_list(rows).to_parquet(folder / "g.parquet")
    return sorted(folder.iterdir())


def test_the_first_message_decides_whatever_the_file(tmp_path, chatty):
    rows = [asked(number) for number in range(60)]
    copies = [*rows, *(asked(number, answer="no") for number in range(60)), *rows[:30]]
    random.Random(0).shuffle(copies)
    wanted = {f"question {number}" for number in range(60) if hashed_out(f"question {number}")}
    assert 0 < len(wanted) < 20
    for folder, given_rows in (("once", rows), ("copies", copies)):
        for file in in_every_format(tmp_path / folder, given_rows):
            train, heldout = (questions(file, split) for split in ("train", "heldout"))
            assert set(heldout) == wanted
            assert not set(train) & wanted
            assert len(train) + len(heldout) == len(given_rows)
            prompts = file_prompts(file, chatty, chat="on", split="heldout").rows
            assert sorted(p.messages[0]["content"] for p in prompts) == sorted(heldout)


def test_the_whole_text_decides_without_a_conversation(tmp_path):
    """This holds for rows and for the parts of a text file; a copy under another name is in the same split."""
    texts = [f"def f{i}(line):\n" + "    return line  # " + "x" * 4000 for i in range(50)]
    random.Random(1).shuffle(texts)
    (tmp_path / "one.txt").write_text("\n\n".join(texts))
    write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in reversed(texts * 2)])
    for name in ("one.txt", "rows.jsonl"):
        heldout = {d.text for d in documents(str(tmp_path / name), "heldout")}
        assert heldout == {text for text in texts if hashed_out(text)}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Q"}]},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "a"}]},
        {"system": "s", "conversations": [{"from": "human", "value": "Q"}]},
        {"prompt": "Q", "completion": "a"},
        {"prompt": [{"role": "user", "content": "Q"}], "completion": [asked(0)["messages"][1]]},
        {"instruction": "Q", "input": "", "output": "a"},
        {"system_prompt": "s", "question": "Q", "response": "a"},
        {"turns": ["Q", "more"]},
        {"text": "Q"},
    ],
)
def test_a_row_is_in_one_split_as_text_and_as_prompt(row, tmp_path, chatty):
    file = tmp_path / "rows.jsonl"
    asked_for = [f"question {number}" for number in range(60)]
    text = json.dumps(row)
    file.write_text("".join(text.replace('"Q"', json.dumps(q)) + "\n" for q in asked_for))
    wanted = set(filter(hashed_out, asked_for))
    splits: dict[data.Split, set[str]] = {"heldout": wanted, "train": set(asked_for) - wanted}
    for split, those in splits.items():
        found = [document.key for document in documents(str(file), split)]
        prompts = prompt_rows(file, chatty, chat="on", split=split)
        assert set(found) == {data.split_key(row.text, row.messages) for row in prompts} == those


@pytest.mark.parametrize("count", range(2, 9))
def test_a_small_source_has_both_splits(count, tmp_path, chatty):
    rows = [asked(number) for number in range(count)] * 2
    parts: list[dict[data.Split, set[str]]] = []
    for name in ("a.jsonl", "b.jsonl"):
        random.Random(count).shuffle(rows)
        file = write_rows(tmp_path / name, rows)
        parts.append({split: set(questions(file, split)) for split in ("train", "heldout")})
        assert not parts[-1]["train"] & parts[-1]["heldout"]
        prompts = file_prompts(file, chatty, chat="on", split="heldout").rows
        assert {p.messages[0]["content"] for p in prompts} == parts[-1]["heldout"]
    assert parts[0] == parts[1]
    assert all(parts[0].values())


def test_rows_that_are_all_the_same_cannot_be_held_out(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", [asked(1)] * 30)
    assert len(documents(str(file), "train")) == 30
    with raises_option(file):
        documents(str(file), "heldout")


@pytest.mark.parametrize(("copies", "said"), [(0, False), (1, False), (4, True)])
def test_many_copies_are_said_once(tmp_path, capsys, copies, said):
    rows = [asked(number) for number in range(300)]
    write_rows(tmp_path / "rows.jsonl", [*rows, *rows[:copies]])
    for split in ("train", "heldout"):
        documents(str(tmp_path / "rows.jsonl"), split)
    assert capsys.readouterr().err.count(f"{copies} of {300 + copies} rows") == said


def test_python_modules_keep_the_split_by_names_of_the_embedded_models():
    for document in documents("stdlib", "heldout"):
        assert hashed_out(document.name) or document.key != document.name


def test_copies_of_a_python_module_are_in_one_split(plain):
    """Packages hold copies of each other's modules; no held-out one is trained on."""
    train, heldout = (documents("packages", split) for split in ("train", "heldout"))
    assert not {d.text for d in train} & {d.text for d in heldout}


@given(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=40), st.randoms(), st.data())
def test_rows_with_one_key_stay_together(keys, rng, drawn):
    order = rng.sample(range(len(keys)), len(keys))
    count = drawn.draw(st.integers(1, len(keys)))
    chosen = grouped_holdout(keys, order, count)
    assert not {keys[i] for i in chosen} & {keys[i] for i in range(len(keys)) if i not in chosen}
    assert len(chosen) == len(set(chosen))
    assert bool(chosen) == (len(set(keys)) > 1)
    if len(set(keys)) == len(keys) > 1:  # without copies, the first of the order
        assert chosen == order[:count]
    assert len(chosen) < count + len(keys) / 2


def test_a_prompt_with_many_answers_is_not_held_out_whole():
    keys = [*(["greeting"] * 200), *map(str, range(800))]
    order = random.Random(0).sample(range(1000), 1000)
    chosen = grouped_holdout(keys, order, 64)
    assert len(chosen) == 64
    assert not any(keys[i] == "greeting" for i in chosen)


# stores of the target's outputs


@pytest.fixture(scope="module")
def target(tmp_path_factory, tokenizer_dir) -> Path:
    folder = tmp_path_factory.mktemp("target")
    build("llama", 1).save_pretrained(folder)
    for file in tokenizer_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def prompts_in(directory: Path) -> set[tuple[int, ...]]:
    return {tuple(output.prompt.tolist()) for output in read_store(directory).outputs}


@pytest.fixture(scope="module")
def answers(target, tmp_path_factory) -> Path:
    """Answers to 20 prompts, four to each."""
    folder = tmp_path_factory.mktemp("answers")
    rows = [{"prompt": f"def f{number}(x):"} for number in range(20)] * 4
    file = write_rows(folder / "prompts.jsonl", rows)
    how: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.0, "top_logprobs": 3}
    OUTPUTS_BUILD(
        target=str(target),
        prompt_file=file,
        use="distill",
        out=folder / "store",
        device="cpu",
        **how,
    )
    return folder / "store"


def test_heldout_answers_share_no_prompt_with_training(answers, target):
    train, heldout = prompts_in(answers), prompts_in(answers / HELDOUT)
    assert (len(train), len(heldout)) == (18, 2)
    assert len(read_store(answers / HELDOUT).outputs) == 8
    assert not train & heldout


def test_a_store_without_a_heldout_part_is_split_by_its_prompts(answers):
    """prune compares draft and source on these texts, and heads are trained on them."""
    texts = read_texts(answers)
    chosen = set(heldout_numbers(texts, share=1 / 15))
    prompts: list[set[tuple[int, ...]]] = [set(), set()]
    for number, text in enumerate(texts):
        prompts[number in chosen].add(tuple(text.prompt.tolist()))
    assert not prompts[0] & prompts[1]
    assert (len(texts), len(chosen)) == (
        72,
        4,
    )  # at most a fifteenth, 4.8, and a prompt has four answers


def test_a_store_of_an_earlier_version_is_read_and_keeps_its_split(answers, target, tmp_path, capsys):
    """Its manifests say nothing of the split."""
    old = tmp_path / "old"
    for part in (answers, answers / HELDOUT):
        folder = old if part == answers else old / HELDOUT
        folder.mkdir()
        for file in part.iterdir():
            if file.is_file() and file.name != MANIFEST:
                (folder / file.name).symlink_to(file)
        manifest = json.loads((part / MANIFEST).read_text())
        assert manifest.pop("split") == "content"
        (folder / MANIFEST).write_text(json.dumps(manifest))
    (vocabulary,) = (file for file in answers.iterdir() if file.is_dir() and file.name != HELDOUT)
    (old / vocabulary.name).symlink_to(vocabulary)
    (_, heldout), (_, same) = (open_stored(store, target, batch_size=4, temperature=1.0) for store in (answers, old))
    assert np.array_equal(heldout.ids, same.ids)
    said = " ".join(capsys.readouterr().err.split())
    assert f"{old}:" in said
    assert f"{answers}:" not in said


def test_prompts_that_are_all_the_same_cannot_be_held_out(target, tmp_path):
    file = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "def f(x):"}] * 12)
    with raises_option("prompts.jsonl"):
        OUTPUTS_BUILD(target=str(target), prompt_file=file, use="distill", out=tmp_path / "o", device="cpu")


def test_lines_of_a_log_with_one_prompt_are_on_one_side(tmp_path):
    line = {"ids": [7], "top_ids": [[7, 9]], "top_logprobs": [[-0.5, -1.5]], "logprobs": [-0.5]}
    rows = [line | {"prompt_ids": [0, number // 4]} for number in range(120)]
    log = ServerLog.open(write_rows(tmp_path / "a.jsonl", rows), vocab=307, seq_len=8, top_logprobs=2)
    train, heldout = log.split()
    assert sorted(train + heldout) == list(range(120))
    assert len(heldout) == 8  # at most a twelfth, 10, and a prompt has four lines
    assert not {i // 4 for i in train} & {i // 4 for i in heldout}
    # another order holds out the same prompts
    random.Random(0).shuffle(rows)
    other = ServerLog.open(write_rows(tmp_path / "b.jsonl", rows), vocab=307, seq_len=8, top_logprobs=2)
    assert {log.keys[i] for i in heldout} == {other.keys[i] for i in other.split()[1]}


@pytest.mark.parametrize("turns", [1, 3])
def test_auto_chooses_measures_and_trains_on_different_first_messages(turns, tmp_path, tokenizer_dir):
    """The turns of a conversation are prompts that share a beginning."""
    rows: Rows = []
    for number in range(150):
        messages = [
            {"role": role, "content": f"{role} {number} {turn}"}
            for turn in range(turns)
            for role in ("user", "assistant")
        ]
        rows.append({"messages": messages})
    file = write_rows(tmp_path / "prompts.jsonl", rows)
    tokenizer = checkpoint.load_tokenizer(tokenizer_dir)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "target")
    split = find_prompts(file, None, None, tmp_path / "target", [1])
    ends = [split.choose, split.choose + split.measure]
    parts = split.rows[: ends[0]], split.rows[ends[0] : ends[1]], split.rows[ends[1] :]
    firsts = [{row["messages"][0]["content"] for row in part} for part in parts]
    assert sum(map(len, firsts)) == len(set().union(*firsts))
    assert (len(parts[0]), len(parts[1])) == (48, 24)
    assert 150 * turns - 2 * (turns - 1) <= len(split.rows) <= 150 * turns
