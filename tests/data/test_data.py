"""Batches are a function of the step; splits are disjoint and stable; held-out text stays unseen."""

import json

import numpy as np
import pytest
from datasets import Dataset
from helpers.errors import raises_option

from draftlab import data
from draftlab.data import DynamicBatches, TokenBatches, sources
from draftlab.data.text import prompt_of, rows_of
from draftlab.model.checkpoint import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return load_tokenizer(tokenizer_dir)


def batches(rows=6, seed=0, **weights):
    streams = {name: np.arange(1000 * i, 1000 * i + 401, dtype=np.uint32) for i, name in enumerate(weights, 1)}
    total = sum(weights.values())
    return data.TokenBatches(streams, {n: w / total for n, w in weights.items()}, rows, 20, seed)


def test_a_step_is_a_pure_function_of_seed_and_index():
    assert np.array_equal(batches(a=1).batch(7).ids, batches(a=1).batch(7).ids)
    assert not np.array_equal(batches(a=1).batch(7).ids, batches(a=1, seed=1).batch(7).ids)


def test_an_epoch_shows_every_chunk_once():
    # 20 chunks
    starts = [int(row[0]) for step in range(5) for row in batches(a=1, rows=4).batch(step).ids]
    assert sorted(starts) == [1000 + 20 * i for i in range(20)]
    assert starts != sorted(starts)


def test_rows_follow_the_weights():
    assert batches(rows=16, a=0.45, b=0.15, c=0.4).rows_of() == {"a": 7, "b": 2, "c": 7}
    ids = batches(rows=16, a=0.45, b=0.15, c=0.4).batch(3).ids
    assert sorted((ids[:, 0] // 1000).tolist()) == [1] * 7 + [2] * 2 + [3] * 7


def test_rows_are_consecutive_and_overlap_by_the_predicted_token():
    batch = batches(a=1).batch(0)
    assert batch.ids.shape == (6, 21)
    assert (np.diff(batch.ids, axis=1) == 1).all()
    assert batch.mask.shape == (6, 20)


def test_splits_are_disjoint_complete_and_hold_no_tests():
    train, heldout = ({d.name for d in data.documents("stdlib", split)} for split in ("train", "heldout"))
    assert not train & heldout
    assert train | heldout == {d.name for d in data.documents("stdlib")}
    assert 0.03 < len(heldout) / len(train | heldout) < 0.15
    assert not any(sources._is_test(name) or "site-packages" in name for name in train | heldout)


def test_copies_of_heldout_text_are_dropped():
    heldout = [data.Document("a", "\n".join(f"this is a long enough line number {i}" for i in range(50)))]
    copy = data.Document("vendored", "import os\n" + heldout[0].text)
    other = data.Document("other", "\n".join(f"another sufficiently long line, number {i}" for i in range(50)))
    assert data.without_heldout_lines([copy, other], heldout) == [other]


def test_tokens_begin_and_end_every_document(tokenizer):
    stream = data.tokenize([data.Document("a", "def f():\n"), data.Document("b", "x = 1\n")], tokenizer)
    assert (stream == tokenizer.bos_token_id).sum() == 2
    assert stream[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(stream, skip_special_tokens=True)
    assert text == "def f():\nx = 1\n"


def test_heldout_windows_predict_every_token_but_one(tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"def f{i}(line):\n    return line\n" * 40 for i in range(60)))
    held = data.open_heldout(str(path), tokenizer, rows=3, seq_len=32, most_rows=7)
    assert [len(b.ids) for b in held.batches] == [3, 3, 1]
    joined = np.concatenate([row[:-1] for b in held.batches for row in b.ids])
    stream = data.tokenize(data.documents(str(path), "heldout"), tokenizer)
    assert np.array_equal(joined, stream[: 7 * 32])
    assert held.bits_per_byte(np.log(2) * held.bytes_per_token) == pytest.approx(1.0)


def test_json_lines_are_read_with_any_text_column(tmp_path):
    rows = [{"question": "q"}, {"text": "t"}, {"prompt": "p", "text": "t2"}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert {d.text for d in data.documents(str(tmp_path / "x.jsonl"))} == {"q", "t", "t2"}


SAID, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [SAID, ANSWER]},
        {"prompt": "q", "completion": "a"},
        {"prompt": [SAID], "completion": [ANSWER]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image"}]},
                ANSWER,
            ]
        },
        {
            "messages": [
                SAID,
                {"role": "assistant", "content": None},
                {"role": "tool", "content": "1"},
                ANSWER,
            ]
        },
    ],
)
def test_one_conversation_is_read_from_every_form(row, tmp_path):
    """It is text to train on with its answer, and a prompt without its answer."""
    files = [tmp_path / "chats.json"]
    files[0].write_text(json.dumps([row, row]))
    if row.get("messages") == [SAID, ANSWER]:  # a column of Parquet has one type
        files.append(tmp_path / "chats.parquet")
        Dataset.from_list([row, row]).to_parquet(files[1])
    for file in files:
        assert [d.messages for d in data.documents(str(file))] == [(SAID, ANSWER)] * 2
        prompts = [prompt for _, prompt in rows_of(file, prompt_of)]
        assert all(prompt.asked == [(SAID,)] or prompt.text == "q" for prompt in prompts)
        assert data.is_chat_file(str(file))


def test_few_bad_rows_are_left_out_and_named(tmp_path, capsys):
    good = [json.dumps({"prompt": f"p{i}"}) for i in range(200)]
    (tmp_path / "x.jsonl").write_text("\n".join([*good[:150], "{oops", *good[150:]]))
    assert len(list(rows_of(tmp_path / "x.jsonl", prompt_of))) == 200
    assert "x.jsonl:151" in capsys.readouterr().err
    (tmp_path / "x.jsonl").write_text("\n".join([*good[:50], "{oops", '{"prompt": ""}']))
    with raises_option("x.jsonl:51"):
        list(rows_of(tmp_path / "x.jsonl", prompt_of))


def dynamic(rows: int = 8) -> DynamicBatches:
    streams = {name: np.arange(2000, dtype=np.uint32) + start for name, start in (("a", 0), ("b", 10_000))}
    base = TokenBatches(streams, {"a": 0.5, "b": 0.5}, rows=rows, seq_len=10, seed=0)
    return DynamicBatches.start(base, {}, {"a": 1.0, "b": 1.0}, every=2)


def test_three_updates_are_those_of_the_paper_by_hand():
    """Algorithm 1 of Sheared LLaMA: w exp(max(0, loss - reference)), normalised; then LLM-Shearing's least share."""
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    streams = {name: np.arange(2000, dtype=np.uint32) for name in weights}
    base = TokenBatches(streams, weights, rows=10, seq_len=10, seed=0)
    batches = DynamicBatches.start(base, {}, {"a": 2.0, "b": 1.5, "c": 1.0}, every=50)
    # a lags by 1 and c by 0.2: 1.3591409, 0.3 and 0.2442806 of 1.9034215
    batches.reweigh(50, {"a": 3.0, "b": 1.5, "c": 1.2})
    # a lags by 0.5 and b by 0.3, c is ahead: 1.1772092, 0.2127752 and 0.1283581 of 1.5183425
    batches.reweigh(100, {"a": 2.5, "b": 1.8, "c": 0.9})
    batches.reweigh(150, {"a": 2.0, "b": 1.0, "c": 0.5})  # none lags
    expected = [
        {"a": 0.7140134, "b": 0.1576285, "c": 0.1283581},  # 0.9999 of each share, and 0.0001 / 3
        {"a": 0.7752805, "b": 0.1401564, "c": 0.0845631},
        {"a": 0.7752363, "b": 0.1401757, "c": 0.0845880},
    ]
    for (_, found, _), wanted in zip(batches.phases[1:], expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-7)


def test_a_column_names_the_domains_of_a_set(tmp_path, tokenizer):
    """A third of the text is of one domain; a dot reaches into SlimPajama's meta column."""
    rows = [{"text": f"row {i} " * 40, "meta": {"set_name": "books" if i % 3 == 0 else "web"}} for i in range(300)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"{file}#meta.set_name"
    books = data.documents(f"{source}:books", "train")
    assert {doc.domain for doc in books} == {"books"}
    assert len(books) + len(data.documents(f"{source}:web", "train")) == len(data.documents(str(file), "train"))
    batches = data.open_batches(f"{source}=3,stdlib=1", tokenizer, rows=8, seq_len=16, steps=2, seed=0)
    assert set(batches.weights) == {f"{source}:books", f"{source}:web", "stdlib"}
    assert batches.weights[f"{source}:books"] == pytest.approx(0.25, abs=0.04)
    assert sum(batches.weights.values()) == pytest.approx(1)
    with raises_option("rows.jsonl:1", "'meta.name'", "text, meta"):
        data.documents(f"{file}#meta.name")
    file.write_text("3\n")
    with raises_option("rows.jsonl:1"):
        data.documents(source)


def test_changing_the_weights_repeats_and_skips_no_row():
    batches = dynamic()
    starts = [tuple(row) for step in range(2) for row in batches.batch(step).ids]
    batches.reweigh(2, {"a": 2.1, "b": 1.0})
    starts += [tuple(row) for step in range(2, 5) for row in batches.batch(step).ids]
    assert len(set(starts)) == len(starts)
    fresh = dynamic()
    fresh.load_state_dict(batches.state_dict())
    assert all((fresh.batch(step).ids == batches.batch(step).ids).all() for step in range(5))


@pytest.mark.parametrize("between", ["\n\n", "\n \n", "\n"])
def test_a_long_text_file_is_split_at_lines_that_look_blank_or_at_any(between, tmp_path):
    """WikiText's blank lines hold a space; a file with one sentence a line has none."""
    lines = [f"line {i} " + "of some words " * 20 for i in range(400)]
    (tmp_path / "a.txt").write_text(between.join(lines))
    found = sorted(data.documents(str(tmp_path / "a.txt")), key=lambda d: int(d.name.split(":")[1]))
    assert len(found) > 20
    assert max(len(d.text) for d in found) < 5000
    assert [line for d in found for line in d.text.split("\n") if line] == lines


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "1e999", "much"])
def test_weights_of_a_mixture_are_finite_and_above_zero(weight):
    with raises_option(weight):
        sources.parse_mixture(f"stdlib=0.5,packages={weight}")
