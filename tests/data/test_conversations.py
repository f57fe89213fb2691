"""Conversations as training text: what counts is what the assistant says, found again in the text itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.chats import TEMPLATE, chatty_fixture, plain_fixture, space_fixture  # noqa: F401
from helpers.errors import raises_option
from helpers.typed import call

from draftlab.data import loss_on_of, open_batches, open_heldout
from draftlab.data.rendering import render
from draftlab.data.text import chat_ids
from draftlab.target_outputs.batches import StoredBatches
from draftlab.target_outputs.outputs import padded
from draftlab.target_outputs.store import read_store

CHATML = (  # SmolLM2's
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\n"
    "You are helpful<|im_end|>\n{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %} {{ m.content }}<eos>"
    "{% endgeneration %}{% else %} {{ m.content }}{% endif %}\n{% endfor %}"
)
LAST_ONLY = (  # as templates that drop the reasoning of earlier turns
    "{% for m in messages %}[{{ m.role }}] {{ m.content if loop.last or m.role == 'user' else m.content[:3] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
SAID = ["return None", "class Reader:\n    pass", "self.path", "not a line"]


def talk(number: int, turns: int = 2) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"def parse{number}(line{turn}):"})
        messages.append({"role": "assistant", "content": f"{SAID[(number + turn) % 4]} {number}"})
    return messages


def searched(text: str, messages: list[dict[str, str]], ends: str, offsets: list[tuple[int, int]]) -> np.ndarray:
    """Return which tokens lie within the assistant's messages, found by searching the rendered text."""
    said, at = np.zeros(len(offsets), dtype=bool), 0
    for message in messages:
        at = text.index(message["content"], at)
        end = at + len(message["content"]) + len(ends)
        if message["role"] == "assistant":
            said |= np.array([at <= first and last <= end and last > first for first, last in offsets])
        at = end
    return said


@pytest.mark.parametrize(("template", "ends"), [(CHATML, "<|im_end|>"), (MARKED, "<eos>")])
def test_what_counts_is_what_a_search_of_the_assistants_text_finds(chatty, template, ends):
    chatty.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<eos>"]})
    chatty.chat_template = template
    stops = [chatty.convert_tokens_to_ids(ends)]
    for number in range(8):
        messages = talk(number, turns=1 + number % 3)
        text = chatty.apply_chat_template(messages, tokenize=False)
        encoded = chatty(text, add_special_tokens=False, return_offsets_mapping=True)
        (found,) = render(messages, chatty, "l:1", "assistant", stop_token_ids=stops)
        assert found.ids.tolist() == encoded["input_ids"]
        wanted = searched(text, messages, ends, encoded["offset_mapping"])
        assert (found.counted == wanted).all() or (template == MARKED and found.counted.sum() >= wanted.sum())
        (every,) = render(messages, chatty, "l:1", "all")
        assert every.counted.all()


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(999999999) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    ],
)
def test_a_template_that_fails_is_an_error_of_its_prompt(chatty, template):
    chatty.chat_template = template
    with raises_option("p.jsonl:1"):
        chat_ids([{"role": "user", "content": "hi"}], chatty, "p.jsonl:1")


def test_a_template_that_changes_earlier_turns_makes_a_conversation_of_each_answer(chatty):
    chatty.chat_template = LAST_ONLY
    messages = talk(0)
    found = render(messages, chatty, "l:3", "assistant")
    for conversation, end in zip(found, (2, 4), strict=True):
        prompt, whole = (
            chatty.apply_chat_template(messages[:count], tokenize=True, return_dict=False, add_generation_prompt=reply)
            for count, reply in ((end - 1, True), (end, False))
        )
        assert conversation.ids.tolist() == whole
        assert conversation.counted.tolist() == [i >= len(prompt) for i in range(len(whole))]
    (every,) = render(messages, chatty, "l:3", "all")
    assert every.counted.all()
    assert len(render(talk(0, turns=1), chatty, "l:3", "assistant")) == 1


def conversations(folder: Path, count: int = 60) -> Path:
    file = folder / "chat.jsonl"
    file.write_text("".join(json.dumps({"messages": talk(i, 1 + i % 2)}) + "\n" for i in range(count)))
    return file


def test_every_conversation_is_a_row_once_an_epoch_and_a_function_of_seed_and_step(tmp_path, chatty):
    file = str(conversations(tmp_path))
    how: dict[str, Any] = {"rows": 5, "seq_len": 200, "steps": 3, "loss_on": "assistant"}
    batches, same, other = (open_batches(file, chatty, seed=seed, **how) for seed in (1, 1, 2))
    count = len(batches.conversations[file].ids)
    seen = np.concatenate([batches.batch(step).ids for step in range(-(-count // 5))])[:count]
    assert len(np.unique(seen, axis=0)) == count
    assert (batches.batch(7).mask == same.batch(7).mask).all()
    assert (batches.batch(0).ids != other.batch(0).ids).any()
    for ids, mask in zip(seen, batches.conversations[file].mask, strict=True):
        assert 0 < mask.sum() < np.count_nonzero(ids)
    every = open_batches(file, chatty, seed=1, **how | {"loss_on": "all"}).batch(0)
    assert (every.mask.sum(1) == np.count_nonzero(every.ids, axis=1) - 1 + (every.ids[:, :1] == 0).sum(1)).all()
    heldout = open_heldout(file, chatty, rows=2, seq_len=200, most_rows=4, loss_on="assistant")
    assert 0 < heldout.batches[0].mask.mean() < 0.6
    for start, ids, mask in zip(heldout.starts(4, 8), heldout.ids, heldout.subset(4).batches[0].mask, strict=False):
        assert (start == ids[: len(start)]).all()
        assert mask[len(start) - 1] == 1
        assert mask[: len(start) - 1].sum() == 0


def test_sources_without_conversations_take_no_loss_on(tmp_path, chatty):
    text = tmp_path / "text.txt"
    text.write_text("return 1\n" * 100)
    assert loss_on_of(str(text), None) is None
    with raises_option("--loss-on"):
        loss_on_of(str(text), "all")
    assert loss_on_of(f"{text},{conversations(tmp_path)}", None) == "assistant"
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text((tmp_path / "chat.jsonl").read_text() + (json.dumps({"text": "return 1"}) + "\n") * 30)
    with raises_option("mixed.jsonl"):
        open_batches(str(mixed), chatty, rows=1, seq_len=9, steps=1, seed=0, loss_on="all")


def test_a_store_keeps_the_mask_and_training_from_it_is_training_with_the_target(space):
    conversations(space)
    few = "--data chat.jsonl --seq-len 120"
    call(f"outputs build {few} --num-sequences 12 --top-logprobs 307 --out stored")
    store = read_store(space / "stored")
    assert store.manifest.loss_on == "assistant"
    for output in store.outputs:
        assert output.counted is not None
        assert len(output.top.ids) == output.counted.sum() < len(output.ids)
    assert (padded(store.outputs).mask.sum(1) == [o.counted.sum() for o in store.outputs]).all()
    batch = StoredBatches(space / "stored", 12).batch(0)
    assert (batch.top_logprobs.tail[batch.mask == 0] == 0).all()
    call("outputs info stored --verify --target target")
    # whatever the order
    train = "distill --draft draft --steps 1 --batch-size 12 --training-dtype float32 --lr 1e-5"
    call(f"{train} --outputs stored --out from-store")
    call(f"{train} {few} --out with-target")
    call(f"{train} {few} --loss ce --loss-on all --out trained")
    stored, live, trained = (
        [json.loads(line) for line in (Path(name) / "log.jsonl").read_text().splitlines()]
        for name in ("from-store", "with-target", "trained")
    )
    tokens = [[r["tokens"] for r in log if "grad_norm" in r] for log in (stored, live, trained)]
    assert tokens[0] == tokens[1]
    assert all(a < b for a, b in zip(tokens[1], tokens[2], strict=True))
    for one, other in zip(stored, live, strict=True):
        if "grad_norm" in one:
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-2)
