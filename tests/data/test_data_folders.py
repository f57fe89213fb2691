"""Folders of data as people clone or make them. The package datasets says which rows and splits they have."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset
from datasets.data_files import DataFilesDict, get_data_patterns
from helpers.chats import chatty_fixture, plain_fixture  # noqa: F401
from helpers.errors import raises_option
from helpers.small_files import write_rows

from draftlab.data import documents, loss_on_of, open_batches
from draftlab.data.prompts import file_prompts
from draftlab.data.sources import data_files

CARD = "---\nlicense: mit\n---\n# A data set\n\nIt has talks.\n"


def talks(start: int, count: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": f"answer {number}"},
            ]
        }
        for number in range(start, start + count)
    ]


@pytest.fixture(params=["README.md", "readme.md"])
def cloned(tmp_path, request) -> Path:
    """Return a data set as git clones it from the hub."""
    folder = tmp_path / "talks"
    (folder / "data").mkdir(parents=True)
    for name, start, count in (
        ("train-00000-of-00002", 0, 40),
        ("train-00001-of-00002", 40, 40),
        ("test-00000-of-00001", 80, 20),
        ("validation-00000-of-00001", 100, 20),
    ):
        Dataset.from_list(talks(start, count)).to_parquet(folder / f"data/{name}.parquet")
    (folder / request.param).write_text(CARD)
    (folder / "LICENSE.txt").write_text("MIT")
    (folder / ".gitattributes").write_text("*.parquet filter=lfs")
    (folder / ".git").mkdir()
    (folder / ".git/notes.txt").write_text("no text")
    (folder / "dataset_infos.json").write_text(json.dumps({"default": {"description": "talks"}}))
    return folder


def test_a_cloned_data_set_is_its_train_split(cloned, tmp_path, capsys, chatty):
    wanted = load_dataset(str(cloned), split="train", cache_dir=str(tmp_path / "cache"))
    read = documents(str(cloned))
    said = " ".join(capsys.readouterr().err.split())
    assert sorted(str(d.messages) for d in read) == sorted(str((*m,)) for m in wanted["messages"])
    for name in ("80 rows", "train-00001", "test-00000", "validation-00000", "LICENSE"):
        assert name in said
    assert "readme.md" in said.lower()
    assert ".git" not in said
    # each conversation is a row, and the answers alone count
    assert loss_on_of(str(cloned), None) == "assistant"
    how: dict[str, Any] = {"rows": 1, "seq_len": 60, "steps": 1, "seed": 0}
    batches = open_batches(str(cloned), chatty, loss_on="assistant", **how)
    assert len(batches.conversations[str(cloned)].ids) == len(documents(str(cloned), "train"))


@pytest.mark.parametrize(
    "names",
    [
        ["train.jsonl", "test.jsonl", "valid.jsonl"],
        ["train_sft.jsonl", "test_sft.jsonl", "train_gen.jsonl", "test_gen.jsonl"],
        ["data/train-00000-of-00001.jsonl", "data/dev-00000-of-00001.jsonl"],
        ["train/a.jsonl", "test/a.jsonl", "eval/a.jsonl"],
        ["en/train/0.jsonl", "de/train/0.jsonl", "en/testing/0.jsonl"],
        ["talks-training.jsonl", "talks-evaluation.jsonl"],
        ["talks.train.jsonl", "talks.val.jsonl"],
        ["all.jsonl", "more.jsonl"],
        ["latest.jsonl", "contest.jsonl", "devices.jsonl", "value.jsonl"],
    ],
)
def test_splits_are_those_of_the_package_datasets(names, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_rows(tmp_path / name, talks(0, 3))
    patterns = get_data_patterns(str(tmp_path))
    splits = DataFilesDict.from_patterns(patterns, base_path=str(tmp_path))
    found = data_files(tmp_path)
    assert {str(file) for file in found.read} == set(splits["train"])
    others = {name for split, files in splits.items() if split != "train" for name in files}
    assert {str(file) for file in found.other_splits} == others


def test_a_folder_of_a_single_split_is_read_whatever_it_is_called(tmp_path):
    """Many sets of questions have only a test split; a module test_x.py is no split."""
    write_rows(tmp_path / "test.jsonl", [{"text": f"row {number}"} for number in range(30)])
    assert len(documents(str(tmp_path))) == 30
    (tmp_path / "train.py").write_text("x = 1\n" * 9)
    (tmp_path / "test_x.py").write_text("y = 1\n" * 9)
    assert len(documents(str(tmp_path))) == 32


@pytest.mark.parametrize("other", ["notes.txt", "more.jsonl", "zzz.py"])
def test_conversations_and_plain_text_in_one_folder_are_an_error_that_names_the_file(other, tmp_path):
    write_rows(tmp_path / "a.jsonl", talks(0, 30))
    (tmp_path / other).write_text('{"text": "def f(x):"}\n{"text": "def g(x):"}\n')
    with raises_option(other):
        documents(str(tmp_path))
    with raises_option(other):
        documents(str(tmp_path), "train")


def test_json_files_of_a_folder_are_read_if_they_have_rows(tmp_path, capsys):
    for name, content in {
        "array.json": [{"text": "one"}, {"text": "two"}],
        "object.json": {"version": 2, "data": [{"text": "three"}]},
        "single.json": {"title": "a page", "content": "four"},
        "package.json": {"name": "x", "dependencies": {"y": "1"}},
        "numbers.json": [1, 2, 3],
        "empty.json": [],
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "tsconfig.json").write_text('{\n  // a comment\n  "include": []\n}\n')
    (tmp_path / "lines.json").write_text('{"text": "five"}\n{"text": "six"}\n')
    read = {document.text for document in documents(str(tmp_path))}
    assert read == {"one", "two", "three", "four", "five", "six"}
    said = " ".join(capsys.readouterr().err.split())
    assert all(name in said for name in ("package.json", "numbers.json", "empty.json"))
    (tmp_path / "cut.json").write_text('[{"text": "seven"}, {"te')
    with raises_option("cut.json"):
        documents(str(tmp_path))


def test_a_folder_without_text_is_refused(tmp_path):
    (tmp_path / "README.md").write_text(CARD)
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(b"x")  # of save_to_disk
    with raises_option(tmp_path, ".arrow", ".jsonl"):
        documents(str(tmp_path))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.json", "a.txt"])
def test_a_clone_without_git_lfs_is_named_as_such(name, tmp_path, plain):
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / name
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with raises_option(file, "git lfs pull"):
        documents(str(tmp_path))
    if name != "a.txt":
        with raises_option(file, "git lfs pull"):
            file_prompts(file, plain)


@pytest.mark.parametrize("at", ["folder", "snapshots/0123", "snapshots/0123/data"])
def test_a_link_out_of_a_folder_is_no_text_of_it_but_those_of_the_hubs_cache_are(at, tmp_path):
    folder = tmp_path / "set" / at
    folder.mkdir(parents=True)
    (tmp_path / "set/blobs").mkdir()
    (tmp_path / "set/blobs/77").write_text("a line of text\n" * 20)
    (folder / "n.txt").symlink_to(tmp_path / "set/blobs/77")
    (folder / "dangling.md").symlink_to("nowhere")
    (folder / "sub.md").mkdir()
    if "snapshots" in at:
        assert data_files(folder).read == [folder / "n.txt"]
    else:
        with raises_option(folder / "n.txt"):
            data_files(folder)


def test_odd_names_and_kinds_of_files(tmp_path):
    """Square brackets are no pattern, and a pipe is not waited for."""
    file = tmp_path / "a[1].parquet"
    Dataset.from_list(talks(0, 3)).to_parquet(file)
    assert len(documents(str(file))) == 3
    for name in ("pipe.txt", "pipe.jsonl"):
        os.mkfifo(tmp_path / name)
        with raises_option(tmp_path / name):
            documents(str(tmp_path / name))


def test_the_cost_of_blank_lines_grows_with_their_number(tmp_path):
    (tmp_path / "a.txt").write_text("\n" * 1_000_000 + "a line of text\n")
    assert [document.text.strip() for document in documents(str(tmp_path / "a.txt"))] == ["a line of text"]
