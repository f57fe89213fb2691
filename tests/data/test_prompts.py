"""Prompt files: plain and as conversations. Expected ids are transformers' own, of a template written here."""

import hashlib
import itertools
import random

import pytest
from helpers.chats import (  # noqa: F401
    BUILD,
    SCORE,
    TALK,
    USER,
    chatty_fixture,
    ids_of,
    lines,
    plain_fixture,
    space_fixture,
)
from helpers.errors import raises_option
from helpers.typed import call
from transformers import PreTrainedTokenizerBase

from draftlab.config.shared import ChatMode
from draftlab.data import documents
from draftlab.data.instructions import instructions, questions
from draftlab.data.prompts import file_prompts, load_prompts
from draftlab.errors import UserError
from draftlab.model import checkpoint
from draftlab.results.score import read_score
from draftlab.scoring.replay import read_replay
from draftlab.target_outputs.store import read_store

SYSTEM = {"role": "system", "content": "return"}


@pytest.mark.parametrize(
    ("line", "conversation"),
    [
        ({"messages": TALK}, TALK),
        ({"messages": [SYSTEM, USER]}, [SYSTEM, USER]),
        ({"prompt": USER["content"]}, [USER]),
        ({"turns": [USER["content"]]}, [USER]),
        ({"question": USER["content"]}, [USER]),
    ],
)
def test_a_line_has_the_ids_that_transformers_gives_the_conversation(tmp_path, chatty, line, conversation):
    read = file_prompts(lines(tmp_path, line), chatty, chat="auto")
    assert ids_of(read) == [chatty.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]]
    assert read.chat
    # the tokenizer adds one, and so does the template
    assert read.rows[0].ids.count(chatty.bos_token_id) == 1


def test_an_answered_conversation_gives_a_prompt_for_each_answer(tmp_path, chatty):
    answered = [SYSTEM, *TALK, {"role": "assistant", "content": "pass"}]
    greeted = [
        {"role": "assistant", "content": "hi"},
        USER,
        {"role": "assistant", "content": "return 2"},
    ]
    file = lines(tmp_path, {"messages": answered, "category": "a"}, {"messages": greeted}, {"messages": TALK})
    read = file_prompts(file, chatty, chat="on")
    wanted = [answered[:2], answered[:4], greeted[:2], TALK]
    assert [list(prompt.messages) for prompt in read.rows] == wanted
    assert [prompt.conversation for prompt in read.rows] == [0, 0, 1, 2]
    assert ids_of(file_prompts(file, chatty, count=3, chat="on")) == ids_of(read)[:3]
    with raises_option("prompts.jsonl:1"):
        file_prompts(lines(tmp_path, {"messages": greeted[:1]}), chatty, chat="on")


def test_blank_lines_are_no_prompts(tmp_path, plain):
    file = tmp_path / "p.jsonl"
    file.write_text('\n{"prompt": "def f"}\n   \n{"prompt": "class"}\n\n')
    assert ids_of(file_prompts(file, plain)) == [plain(text)["input_ids"] for text in ("def f", "class")]
    assert len(file_prompts(file, plain, count=1).rows) == 1


def test_auto_needs_a_template_and_off_takes_none(tmp_path, plain, chatty):
    file = lines(tmp_path, {"prompt": "return 1"})
    expected = [plain("return 1")["input_ids"]]
    plainly: list[tuple[PreTrainedTokenizerBase, ChatMode]] = [
        (plain, "auto"),
        (plain, "off"),
        (chatty, "off"),
    ]
    for tokenizer, chat in plainly:
        read = file_prompts(file, tokenizer, chat=chat)
        assert (ids_of(read), read.chat) == (expected, False)
    assert file_prompts(file, chatty, chat="auto").chat


def test_the_lines_of_a_split_are_those_of_the_data_source(tmp_path, chatty):
    file = lines(tmp_path, *[{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(80)])
    train, heldout = (file_prompts(file, chatty, chat="on", split=split).rows for split in ("train", "heldout"))
    whole = file_prompts(file, chatty, chat="on").rows
    assert len(train) + len(heldout) == len(whole) == 80
    for split, rows in (("train", train), ("heldout", heldout)):
        texts = {document.text for document in documents(str(file), split)}
        assert {row.messages[-1]["content"] for row in rows} == texts
    read = load_prompts(None, str(file), chatty, count=None, tokens=None, seed=0)
    assert (read.rows, read.chat) == (
        heldout,
        True,
    )  # a file of conversations gives its held-out ones
    with pytest.raises(UserError):
        load_prompts(None, str(file), chatty, count=len(heldout) + 1, tokens=None, seed=0)


@pytest.mark.parametrize(
    ("line", "settings", "named"),
    [
        ({"messages": TALK}, {"chat": "off"}, "--chat"),
        ({"messages": [SYSTEM]}, {}, "prompts.jsonl:1"),
        ({"messages": [{"role": "judge", "content": "a"}, USER]}, {}, "judge"),
        ({"messages": [SYSTEM, USER]}, {"system_prompt": "a"}, "--system-prompt"),
        ({"prompt": "return 1"}, {"tokens": 2}, "--prompt-tokens"),
        ({"prompt": "half \ud800"}, {"chat": "off"}, "prompts.jsonl:1"),
    ],
)
def test_lines_that_are_no_conversation_are_refused(tmp_path, chatty, line, settings, named):
    with pytest.raises(UserError, match=named):
        file_prompts(lines(tmp_path, line), chatty, **({"chat": "on"} | settings))


def test_a_tokenizer_without_a_template_has_no_chat(tmp_path, plain):
    with raises_option("--chat"):
        file_prompts(lines(tmp_path, {"prompt": "a"}), plain, chat="on")
    with raises_option("prompts.jsonl:1"):
        file_prompts(lines(tmp_path, {"messages": TALK}), plain, chat="auto")


# through the commands


def test_replayed_conversations_are_accepted_as_live_ones(space):
    call(BUILD, "--dtype", "float32", "--out", "answers")
    call("replay answers --draft draft --out replayed")
    call(SCORE, "--out", "scored")
    stored = read_store(space / "answers")
    replay, score = read_replay(space / "replayed/draft"), read_score(space / "scored/draft")
    prompts = file_prompts(space / "prompts.jsonl", checkpoint.load_tokenizer(space / "target"), chat="on")
    assert [o.prompt.tolist() for o in stored.outputs] == ids_of(prompts)
    assert [len(ids) for ids in ids_of(prompts)] == [p.tokens for p in score.prompts]
    for k in (1, 3):
        assert replay.counts(k).acceptance() == score.acceptance(k)
    assert 0.1 < score.acceptance(3).draft_acceptance_rate < 0.95


@pytest.mark.parametrize(
    ("source", "sha256"),
    [
        (instructions, "4ebb9ae27c79f80cfe7a45d578d788503994645983eff033e32cec316bfe2fc1"),
        (questions, "5dfbd7e294fc932b72ebb561dfd71bfb4b4f5bc5ac49774eb9db675c9cb25aec"),
    ],
)
def test_a_seed_gives_the_prompts_that_it_gave_when_studies_were_run(source, sha256):
    """The hashes were recorded on 2026-11-28, when the phrases were still lists in a module."""
    rows = itertools.islice(source(random.Random(7)), 2000)
    assert hashlib.sha256("\n".join(rows).encode()).hexdigest() == sha256
