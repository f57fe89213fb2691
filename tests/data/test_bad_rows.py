"""A row that a parser, a template or a tokenizer refuses is left out, first or last; more bad rows stop the command."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.chats import chatty_fixture, plain_fixture  # noqa: F401
from helpers.errors import raises_option

from draftlab.data import documents, heldout_prompts, open_batches, open_heldout
from draftlab.data.bad_rows import BadRows
from draftlab.data.batches import measure_source
from draftlab.data.prompts import file_prompts
from draftlab.data.text import prompt_of, rows_of
from draftlab.errors import UserError


def talk(number: int, first: str = "user") -> dict[str, Any]:
    """Return a conversation. The template of the tests refuses roles other than system, user and assistant."""
    said = (first, f"def parse{number}(line):"), ("assistant", f"return {number}")
    return {"messages": [{"role": role, "content": content} for role, content in said]}


TALKS = [json.dumps(talk(number)) for number in range(120)]
BAD = {
    "unfinished": '{"messages": [{"role": "user", "con',
    "null": "null",
    "null messages": '{"messages": null}',
    "no messages": '{"conversations": []}',
    "surrogate": json.dumps(talk(3) | {"messages": [{"role": "user", "content": "half \ud83d"}]}),
    "refused by the template": json.dumps(talk(3, first="judge")),
    "plain text": '{"text": "def parse(line):"}',
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}'.decode("latin-1"),
}


def written(folder: Path, rows: list[str], name: str = "rows.jsonl") -> Path:
    file = folder / name
    file.write_bytes("\n".join(rows).encode("latin-1"))
    return file


@pytest.mark.parametrize("place", [0, 60, 120])
@pytest.mark.parametrize("kind", list(BAD))
def test_everything_equals_the_file_without_its_bad_row(kind, place, tmp_path, chatty, capsys):
    (tmp_path / "clean").mkdir()
    clean = written(tmp_path / "clean", TALKS)
    file = written(tmp_path, [*TALKS[:place], BAD[kind], *TALKS[place:]])
    how: dict[str, Any] = {"rows": 4, "seq_len": 40}
    train, expected = (
        open_batches(str(each), chatty, steps=1, seed=0, loss_on="assistant", **how) for each in (file, clean)
    )
    assert np.array_equal(train.conversations[str(file)].ids, expected.conversations[str(clean)].ids)
    held, expected = (
        open_heldout(str(each), chatty, most_rows=40, loss_on="assistant", **how) for each in (file, clean)
    )
    assert np.array_equal(held.ids, expected.ids)
    # conversations as one stream, as prune reads them
    joined, expected = (
        open_batches(str(each), chatty, steps=10**6, seed=0, **how).streams[str(each)] for each in (file, clean)
    )
    assert np.array_equal(joined, expected)
    assert measure_source(str(file), chatty) == measure_source(str(clean), chatty)
    assert f"rows.jsonl:{place + 1}" in capsys.readouterr().err
    if kind != "plain text":  # which is a prompt
        prompts, expected = (file_prompts(each, chatty, chat="on").rows for each in (file, clean))
        assert prompts == expected


def test_a_lone_surrogate_is_named_as_such(tmp_path, chatty, capsys):
    file = written(tmp_path, [*TALKS, BAD["surrogate"]])
    file_prompts(file, chatty, chat="on")
    assert "surrogate, \\ud83d" in " ".join(capsys.readouterr().err.split())


def test_few_bad_rows_are_one_note_even_if_several_readers_meet_them(tmp_path, chatty, capsys):
    file = written(tmp_path, [BAD["unfinished"], *TALKS])
    for _ in range(2):
        open_heldout(str(file), chatty, rows=1, seq_len=9, most_rows=9, loss_on="all")
        open_batches(str(file), chatty, rows=1, seq_len=9, steps=1, seed=0, loss_on="all")
    assert capsys.readouterr().err.count("rows.jsonl:1)") == 1


@pytest.mark.parametrize(
    ("good", "bad", "stops"),
    [(1, 1, False), (98, 1, False), (98, 2, True), (297, 3, False), (296, 4, True), (0, 1, True)],
)
def test_one_row_or_one_in_a_hundred_may_be_bad(good, bad, stops, tmp_path):
    rows = [json.dumps({"prompt": f"p{i}"}) for i in range(good)]
    file = written(tmp_path, ["{", *rows[: good // 2], *["{"] * (bad - 1), *rows[good // 2 :]])
    if stops:
        with pytest.raises(UserError):
            list(rows_of(file, prompt_of))
    else:
        assert len(list(rows_of(file, prompt_of))) == good


def test_more_bad_rows_stop_with_counts_by_reason_and_the_first_three_rows_of_each(tmp_path, chatty):
    """Reasons that differ only in a value, such as a column of an unfinished line, are one reason."""
    unfinished = ['{"messages": [' + " " * i for i in range(5)]
    judged = [json.dumps(talk(i, first="judge")) for i in range(7)]
    file = written(tmp_path, [*unfinished, *TALKS, *judged])
    names = [f"rows.jsonl:{i}" for i in (1, 2, 3, 126, 127, 128)]
    with raises_option("12 of 132", "5 x", "7 x", *names) as caught:
        file_prompts(file, chatty, chat="on")
    assert not any(f"rows.jsonl:{i}," in str(caught.value) for i in (4, 5, 129, 130, 131, 132))
    assert len(str(caught.value).splitlines()) == 1


def test_prompts_after_a_limit_are_judged_by_the_whole_file(tmp_path, chatty, capsys):
    """Two bad rows among the first ten are few in 300."""
    judged = [json.dumps(talk(i, first="judge")) for i in range(2)]
    rows = [json.dumps(talk(i)) for i in range(298)]
    read = file_prompts(written(tmp_path, [*judged, *rows]), chatty, count=8, chat="on")
    assert [p.messages[0]["content"] for p in read.rows] == [f"def parse{i * 298 // 8}(line):" for i in range(8)]
    assert "2 of 300" in capsys.readouterr().err


def test_texts_without_a_character_are_skipped_however_many(tmp_path, capsys):
    """WikiText has a row for each blank line."""
    texts = [f"return {i}\n" * 20 if i % 3 else "" for i in range(300)]
    file = written(tmp_path, [json.dumps({"text": text}) for text in texts])
    assert {d.text for d in documents(str(file))} == set(texts) - {""}
    assert "100 of 300" in capsys.readouterr().err


def test_plain_text_is_cut_to_prompts_without_its_bad_row(tmp_path, plain):
    texts = [json.dumps({"text": f"def f{i}(line):\n    return line\n" * 20}) for i in range(150)]
    files = [
        written(tmp_path, texts, "clean.jsonl"),
        written(tmp_path, [json.dumps({"text": "half \udc00"}), *texts], "one.jsonl"),
    ]
    made, expected = (heldout_prompts(str(file), plain, count=5, length=16, seed=0) for file in reversed(files))
    assert made == expected


def test_a_hub_copy_that_was_cut_short_is_one_line(tmp_path):
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(TALKS).encode())[:-200])
    with raises_option("rows.jsonl.gz"):
        list(rows_of(file, prompt_of))


def test_rows_that_may_be_bad_in_any_number_do_not_count_for_the_limit(capsys):
    bad = BadRows("server", 300)
    for number in range(200):
        bad.leave_out(f"row {number}", "has no log-probabilities", limited=False)
    for number in range(200, 203):
        bad.leave_out(f"row {number}", f"request ({600 + number} tokens) is too long")
    bad.settle()
    assert "203 of 300" in " ".join(capsys.readouterr().err.split())
    bad.leave_out("row 203", "request (9 tokens) is too long")
    with raises_option("4 x", "200 x"):  # numbers make no other reason
        bad.check()
