"""Rows as people have them: bad rows, copies of rows, and folders of data sets."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from errors import raises_option
from test_chat_templates import family

from draftlab.data import documents, grouped_holdout, open_batches, open_heldout
from draftlab.data.sources import split_key
from draftlab.errors import UserError
from draftlab.prompts import file_prompts

REFUSED = {"messages": [{"role": "narrator", "content": "refused by the template"}]}
BAD: dict[str, str] = {
    "surrogate": '{"messages": [{"role": "user", "content": "a \\ud83d b"}]}',
    "unfinished": '{"messages": [{"role": "user", "content": "a',
    "null": '{"messages": null}',
    "list": "[1, 2]",
    "template": json.dumps(REFUSED),
}
HOW: dict[str, Any] = {"rows": 2, "seq_len": 60, "loss_on": "assistant"}


def chat(number: int, answer: str = "yes") -> dict[str, Any]:
    asked = {"role": "user", "content": f"is it {number}"}
    return {"messages": [asked, {"role": "assistant", "content": f"{answer} {number}"}]}


def write(file: Path, lines: list[str]) -> Path:
    file.write_text("".join(line + "\n" for line in lines))
    return file


@pytest.fixture
def made() -> Any:
    """Return a tokenizer whose chat template refuses roles that it does not know."""
    found, _, _ = family("chatml")
    check = (
        "{% for m in messages %}{% if m.role == 'narrator' %}{{ raise_exception('no such role') }}"
        "{% endif %}{% endfor %}"
    )
    found.chat_template = check + found.chat_template
    return found


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("count", [40, 300])
def test_a_bad_row_is_left_out_and_named_first_or_last(kind, at, count, made, tmp_path, capsys):
    lines = [json.dumps(chat(number)) for number in range(count - 1)]
    lines.insert(at % count, BAD[kind])
    file = write(tmp_path / "chats.jsonl", lines)
    number = 1 if at == 0 else count
    capsys.readouterr()
    prompts = file_prompts(file, made, chat="on")
    assert len(prompts.rows) == count - 1
    assert f"chats.jsonl:{number}" in capsys.readouterr().err
    batches = open_batches(str(file), made, steps=1, seed=0, **HOW)
    trained = len(batches.conversations[str(file)].ids)
    windows = open_heldout(str(file), made, most_rows=count, **HOW)
    assert trained + len(windows.ids) == count - 1


def test_too_many_bad_rows_are_counted_by_reason_with_their_first_rows(made, tmp_path):
    lines = [json.dumps(chat(number)) for number in range(90)]
    lines += [BAD["null"]] * 4 + [BAD["unfinished"]] * 2
    file = write(tmp_path / "chats.jsonl", lines)
    places = [f"chats.jsonl:{number}" for number in (91, 92, 93, 95, 96)]
    with raises_option("6 of 96", "4 x", "2 x", *places) as caught:
        file_prompts(file, made, chat="on")
    assert "chats.jsonl:94" not in str(caught.value)
    with raises_option("6 of 96", *places):
        open_batches(str(file), made, steps=1, seed=0, **HOW)
    write(file, lines[:-5])
    assert len(file_prompts(file, made, chat="on").rows) == 90


def test_rows_that_a_template_refuses_count_with_those_that_a_parser_refuses(made, tmp_path):
    lines = [json.dumps(chat(number)) for number in range(150)]
    file = write(tmp_path / "chats.jsonl", [BAD["null"], *lines, BAD["template"]])
    with raises_option("2 of 152", "chats.jsonl:1", "chats.jsonl:152"):
        file_prompts(file, made, chat="on")


def test_a_file_without_a_good_row_is_an_error(made, tmp_path):
    with raises_option("chats.jsonl:1"):
        file_prompts(write(tmp_path / "chats.jsonl", [BAD["null"]]), made, chat="on")


def asked(source: object, split: Any) -> set[str]:
    return {split_key(one.text, one.messages) for one in documents(str(source), split)}


def test_the_split_depends_on_content_alone(tmp_path):
    rows = [chat(number) for number in range(120)]
    again = [chat(number, answer="no") for number in range(120)]
    first = write(tmp_path / "a.jsonl", list(map(json.dumps, rows)))
    wanted = {split: asked(first, split) for split in ("train", "heldout")}
    assert wanted["train"] | wanted["heldout"] == {f"is it {number}" for number in range(120)}
    assert not wanted["train"] & wanted["heldout"]
    mixed = [*rows, *again, *rows[:30]]
    random.Random(0).shuffle(mixed)
    files = [write(tmp_path / "other-name.jsonl", list(map(json.dumps, mixed)))]
    files.append(write(tmp_path / "b.ndjson", list(map(json.dumps, mixed))))
    files.append(tmp_path / "c.jsonl.gz")
    files[-1].write_bytes(gzip.compress(files[0].read_bytes()))
    files.append(tmp_path / "d.json")
    files[-1].write_text(json.dumps({"version": 1, "data": mixed}))
    files.append(tmp_path / "e.parquet")
    Dataset.from_list(mixed).to_parquet(files[-1])
    for file in files:
        for split, keys in wanted.items():
            assert asked(file, split) == keys, (file, split)


def test_the_share_of_copies_is_said(tmp_path, capsys):
    rows = [json.dumps(chat(number)) for number in range(120)]
    capsys.readouterr()
    documents(str(write(tmp_path / "once.jsonl", rows)))
    assert "120 rows" not in capsys.readouterr().err
    documents(str(write(tmp_path / "often.jsonl", rows * 4)))
    assert "360 of 480" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(20))
def test_answers_to_a_prompt_are_held_out_together(seed):
    rng = random.Random(seed)
    keys = [str(rng.randrange(30)) for _ in range(rng.randrange(2, 200))]
    order = rng.sample(range(len(keys)), len(keys))
    wanted = max(1, len(keys) // 10)
    chosen = grouped_holdout(keys, order, wanted)
    apart = set(chosen)
    assert not {keys[i] for i in chosen} & {keys[i] for i in order if i not in apart}
    assert len(chosen) >= wanted or not chosen
    assert not grouped_holdout(["same"] * 9, range(9), 1)


def card(folder: Path, name: str) -> None:
    text = "This card describes the set. " * 40
    (folder / name).write_text(f"---\nlicense: mit\n---\n# A set\n\n{text}\n")


@pytest.mark.parametrize("name", ["README.md", "readme.md"])
def test_a_cloned_data_set_is_read_without_card_and_test_split(name, tmp_path, capsys):
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    card(folder, name)
    (folder / "LICENSE.txt").write_text("Permission is granted.\n" * 50)
    (folder / ".gitattributes").write_text("*.parquet filter=lfs\n")
    (folder / "dataset_infos.json").write_text(json.dumps({"default": {"splits": {}}}))
    train, test = [chat(i) for i in range(100)], [chat(i) for i in range(500, 540)]
    Dataset.from_list(train).to_parquet(folder / "data/train-00000-of-00001.parquet")
    Dataset.from_list(test).to_parquet(folder / "data/test-00000-of-00001.parquet")
    capsys.readouterr()
    keys = {split_key(one.text, one.messages) for one in documents(str(folder))}
    assert keys == {f"is it {number}" for number in range(100)}
    said = capsys.readouterr().err
    for part in ("100 rows", "data/train-", "data/test-", name):
        assert part in said


def test_a_folder_without_names_of_splits_is_read_whole(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "test.jsonl", [json.dumps({"text": f"a text {i}"}) for i in range(20)])
    write(tmp_path / "sub/more.jsonl", [json.dumps({"text": f"another {i}"}) for i in range(20)])
    assert len(documents(str(tmp_path))) == 40


def test_conversations_and_plain_text_in_one_folder_are_refused(tmp_path):
    write(tmp_path / "a.jsonl", [json.dumps(chat(number)) for number in range(60)])
    write(tmp_path / "b.jsonl", [json.dumps({"text": f"a plain text {i}"}) for i in range(60)])
    with pytest.raises(UserError, match=r"b\.jsonl:1"):
        documents(str(tmp_path))


def test_json_without_rows_in_a_folder_is_no_text(tmp_path):
    (tmp_path / "package.json").write_text(json.dumps({"scripts": {"build": "x"}}))
    write(tmp_path / "a.jsonl", [json.dumps({"text": f"a text {i}"}) for i in range(20)])
    assert len(documents(str(tmp_path))) == 20
