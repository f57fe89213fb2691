"""The fields of rows: what transformers renders for the complete messages, and a note of what is not read."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from helpers.chat_templates import CALL, CALLED, TOOL, family, rendered
from helpers.chats import chatty_fixture, plain_fixture, space_fixture  # noqa: F401
from helpers.errors import raises_option
from helpers.typed import call

from draftlab.data import open_batches, open_heldout
from draftlab.data.prompts import file_prompts
from draftlab.data.text import prompt_of, row_of, rows_of

ASKED, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
PAIR = [ASKED, SAID]


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"question": "q", "response": "a"}, PAIR),
        ({"system_prompt": "s", "question": "q", "response": "a"}, [SYSTEM, *PAIR]),
        ({"instruction": "q", "input": "", "output": "a"}, PAIR),
        (
            {"instruction": "q", "input": "more", "output": "a"},
            [{"role": "user", "content": "q\nmore"}, SAID],
        ),
        (
            {"instruction": "q", "context": "more", "response": "a"},
            [{"role": "user", "content": "q\nmore"}, SAID],
        ),
        ({"prompt": "q", "response": "a"}, PAIR),
        ({"system": "s", "messages": PAIR}, [SYSTEM, *PAIR]),
        ({"conversation": PAIR}, PAIR),
        ({"system": "s", "conversations": [{"from": "user", "value": "q"}]}, [SYSTEM, ASKED]),
        ({"prompt": [ASKED], "completion": [SAID], "system": "s"}, [SYSTEM, *PAIR]),
    ],
)
def test_a_question_with_its_answer_and_a_system_prompt_are_a_conversation(row, messages):
    read = row_of(row, "l:1")
    assert list(read.messages) == messages
    assert not read.unread


@pytest.mark.parametrize("asks", ["human", "user"])
@pytest.mark.parametrize("says", ["gpt", "assistant", "chatgpt", "bing", "bard", "model"])
def test_the_role_names_of_sharegpt_like_sets(asks, says):
    row = {"conversations": [{"from": asks, "value": "q"}, {"from": says, "value": "a"}]}
    assert list(row_of(row, "l:1").messages) == PAIR


@pytest.mark.parametrize("result", ["observation", "tool", "function", "ipython"])
@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), json.dumps([TOOL["function"]])])
def test_sharegpts_function_calls_and_tools_are_rendered_as_tool_calls(result, tools):
    made, _, _ = family("qwen2_5")
    row = {
        "tools": tools,
        "conversations": [
            {"from": "human", "value": "is it"},
            {"from": "function_call", "value": json.dumps(CALL["function"])},
            {"from": result, "value": "42"},
            {"from": "gpt", "value": "it is 42"},
        ],
    }
    read = row_of(row, "l:1")
    assert not read.unread
    assert read.tools == (TOOL,)
    assert rendered(made, list(read.messages), tools=list(read.tools)) == rendered(made, CALLED, tools=[TOOL])


def test_tables_pad_the_arguments_of_calls_and_tools_and_hold_lists_as_json(tmp_path):
    """Arrow gives all objects of a column the same fields (axolotl#2909, ms-swift#10110, maxtext#3559)."""
    made, _, _ = family("qwen2_5")

    def called(name: str) -> dict[str, Any]:
        function = {"name": name, "arguments": {name: 1}}
        schema = {"name": name, "parameters": {"properties": {name: {"type": "integer"}}}}
        messages = [ASKED, {"role": "assistant", "tool_calls": [{"function": function}]}, SAID]
        return {"messages": messages, "tools": [{"type": "function", "function": schema}]}

    rows = [called("f"), called("g")]
    Dataset.from_list(rows).to_parquet(tmp_path / "structs.parquet")
    texts = [{name: json.dumps(value) for name, value in row.items()} for row in rows]
    Dataset.from_list(texts).to_parquet(tmp_path / "texts.parquet")
    for file in ("structs", "texts"):
        for (_, read), row in zip(rows_of(tmp_path / f"{file}.parquet", row_of), rows, strict=True):
            found = rendered(made, list(read.messages), tools=list(read.tools))
            assert made.decode(found) == made.decode(rendered(made, **row))


def test_a_function_call_that_is_no_json_is_an_error_of_its_row():
    talk = [{"from": "human", "value": "q"}, {"from": "function_call", "value": "f(1)"}]
    with raises_option("l:7"):
        row_of({"conversations": talk}, "l:7")


@pytest.mark.parametrize("content", [None, ""])
def test_a_message_without_text_but_with_tool_calls_is_kept(content):
    messages = [ASKED, {"role": "assistant", "content": content, "tool_calls": [CALL]}]
    read = row_of({"messages": messages}, "l:1")
    assert read.messages[1]["tool_calls"] == [CALL]
    assert read.left_out == 0


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        ({"messages": PAIR, "id": 7, "images": ["x.png"], "tools": None}, {"id", "images"}),
        ({"messages": [SYSTEM, *PAIR], "system": "other"}, {"system"}),
        ({"messages": PAIR, "tools": "a search and a calculator"}, {"tools"}),
        ({"text": "t", "meta": {"url": "u"}, "empty": ""}, {"meta"}),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]},
                    SAID,
                ]
            },
            {"image parts"},
        ),
        ({"question": "q", "answer": 7}, {"answer"}),
    ],
)
def test_every_field_with_a_value_is_read_or_named(row, unread):
    assert row_of(row, "l:1").unread == unread


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"system_prompt": "s", "question": "q", "response": "a"}, [SYSTEM, ASKED]),
        ({"instruction": "q", "output": "a"}, [ASKED]),
        ({"prompt": "q", "system": "s"}, [SYSTEM, ASKED]),
        ({"turns": ["q"], "system": "s"}, [SYSTEM, ASKED]),
        ({"conversations": [{"from": "human", "value": "q"}], "system": "s"}, [SYSTEM, ASKED]),
    ],
)
def test_a_prompt_is_the_question_with_its_system_prompt(tmp_path, row, messages):
    made, _, _ = family("chatml")
    assert not prompt_of(row, "l:1").unread
    (prompt,) = file_prompts(written(tmp_path, [row]), made, chat="on").rows
    assert prompt.ids == rendered(made, messages, add_generation_prompt=True)


def test_the_tools_of_a_prompt_are_rendered(tmp_path):
    made, _, _ = family("qwen2_5")
    file = written(tmp_path, [{"prompt": "q", "tools": [TOOL]}, {"messages": CALLED[:1]}])
    first, second = file_prompts(file, made, chat="on").rows
    assert first.ids == rendered(made, [ASKED], add_generation_prompt=True, tools=[TOOL])
    assert second.ids == rendered(made, CALLED[:1], add_generation_prompt=True)


def test_fields_that_are_not_rendered_are_said_once_for_a_file_with_their_rows(tmp_path, capsys):
    made, _, _ = family("chatml")  # reads neither tools nor reasoning
    plain_rows = [{"messages": PAIR, "score": 1}] * 20
    rich = [
        {"messages": [ASKED, SAID | {"reasoning_content": "why"}], "tools": [TOOL]},
        {"messages": CALLED},
    ]
    # the first message of the user decides on the split
    rows = [
        row | {"messages": [ASKED | {"content": f"ask {number}"}, *row["messages"][1:]]}
        for number, row in enumerate([*plain_rows, *rich * 10])
    ]
    file = str(written(tmp_path, rows))
    how: dict[str, Any] = {"rows": 2, "seq_len": 60, "loss_on": "assistant"}
    capsys.readouterr()
    batches = open_batches(file, made, steps=1, seed=0, **how)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "not read" in line)
    total = len(batches.conversations[file].ids)
    for name in ("score", "tools", "reasoning_content", "tool_calls"):
        count = int(line.split(f"{name} (")[1].split(")")[0])
        assert 0 < count < total
    open_heldout(file, made, most_rows=4, **how)
    made, _, _ = family("qwen3")
    open_batches(file, made, steps=1, seed=0, **how)
    assert "tool_calls" not in capsys.readouterr().err


def test_prompts_name_the_fields_that_they_lack(tmp_path, capsys):
    made, _, _ = family("chatml")
    rows = [
        {"messages": [ASKED, SAID | {"reasoning_content": "why"}]},  # the answer is no part of the prompt
        {"system_prompt": "s", "question": "q", "response": "a", "url": "u"},
    ]
    file = written(tmp_path, rows)
    file_prompts(file, made, chat="on")
    (line,) = capsys.readouterr().err.splitlines()
    assert "url (1)" in line
    assert "reasoning" not in line
    assert "system" not in line
    file_prompts(written(tmp_path, rows[1:]), made, chat="off")
    assert "system (1)" in capsys.readouterr().err


def test_eos_follows_a_plain_text_once(tmp_path):
    made, _, _ = family("chatml")
    file = str(written(tmp_path, [{"text": f"it is {i}" + "<|im_end|>" * (i % 2)} for i in range(60)]))
    stream = open_batches(file, made, rows=1, seq_len=20, steps=1, seed=0).streams[file].tolist()
    eos = made.eos_token_id
    assert eos in stream
    assert all(pair != (eos, eos) for pair in pairwise(stream))


OTHER = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("template", [OTHER, None])
def test_training_text_has_the_targets_template_whatever_the_draft_has(space, template):
    rows = [
        {"messages": [{"role": "user", "content": f"return {i}"}, SAID | {"content": f"def {i}"}]} for i in range(60)
    ]
    written(space, rows)
    file = Path("draft") / "chat_template.jinja"
    file.unlink()
    if template:
        file.write_text(template)
    train = "distill --draft draft --target target --data rows.jsonl --steps 1 --batch-size 4"
    call(f"{train} --seq-len 60 --training-dtype float32 --out trained")
    logged = [json.loads(line) for line in Path("trained/log.jsonl").read_text().splitlines()]
    (tokens,) = (record["tokens"] for record in logged if "grad_norm" in record)
    made, ends = _tokenizer(Path("target")), ()
    batch = open_batches(
        "rows.jsonl",
        made,
        rows=4,
        seq_len=60,
        steps=1,
        seed=0,
        loss_on="assistant",
        stop_token_ids=ends,
    ).batch(0)
    assert tokens == batch.mask.sum()


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
