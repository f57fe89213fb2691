"""Prompts of several turns: the requests of every command are those of a conversation held by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.chats import BUILD, SCORE, chatty_fixture, lines, plain_fixture, space_fixture  # noqa: F401
from helpers.loopback_servers import SmallVLLM, running
from helpers.typed import call

from draftlab.commands.score import prepare
from draftlab.commands.settings.score import ScoreConfig
from draftlab.data import turns
from draftlab.data.prompts import Prompt, file_prompts
from draftlab.engine.batch_generate import Batching, answer_turns, generate_batch
from draftlab.errors import UserError
from draftlab.exporting.trials import trial_prompts
from draftlab.model import checkpoint, llama
from draftlab.results.score import read_score
from draftlab.runs.provenance import read_record
from draftlab.sampling import SamplingParams
from draftlab.scoring import run as benchmark
from draftlab.scoring import servers
from draftlab.target_outputs.store import read_store

TALKS: list[dict[str, Any]] = [
    {"turns": ["def parse(line):", "return None", "class Reader:"], "category": "writing"},
    {"prompt": "return 1", "category": "math"},
    {"turns": ["if not line:", "self.path"], "category": "roleplay"},
]
GREEDY = SamplingParams(max_tokens=20)


def by_hand(target: Path, sampling: SamplingParams) -> list[list[int]]:
    """Return the requests, one conversation at a time, one turn at a time."""
    model, tokenizer = llama.load(target, torch.float32), checkpoint.load_tokenizer(target)
    requests: list[list[int]] = []
    for talk in TALKS:
        messages: list[dict[str, Any]] = []
        for said in talk.get("turns") or [talk["prompt"]]:
            messages.append({"role": "user", "content": said})
            ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            (written,) = generate_batch(model, [ids], sampling, Batching(vocab=307), numbers=[len(requests)])
            requests.append(list(ids))
            messages.append(
                {
                    "role": "assistant",
                    "content": tokenizer.decode(written.ids, skip_special_tokens=True),
                }
            )
    return requests


@pytest.fixture
def asked(space: Path) -> list[list[int]]:
    lines(space, *TALKS)
    return by_hand(space / "target", SamplingParams(max_tokens=20, stop_token_ids=(1,)))


def test_every_command_asks_the_same_requests(space, asked, monkeypatch):
    timed: list[Any] = []
    throughput = benchmark.measure_throughput
    monkeypatch.setattr(benchmark, "measure_throughput", lambda *a, **k: timed.append(a[2]) or throughput(*a, **k))
    said = call(SCORE, "--exhaustive", "--out", "scored").stderr
    assert "runs/turns/prompts-" in said
    (answers,) = Path("runs/turns").iterdir()
    call(BUILD, "--dtype", "float32", "--out", "answers")
    stored = read_store(space / "answers")
    prompts = file_prompts(Path("prompts.jsonl"), checkpoint.load_tokenizer(space / "target"), chat="auto")
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(1,))
    model = llama.load(space / "target", torch.float32)
    exported = answer_turns(prompts, space / "target", model, sampling)
    assert timed == [asked]
    assert [o.prompt.tolist() for o in stored.outputs] == asked
    assert [p.ids for p in exported.rows] == asked
    checked = trial_prompts(space / "target", "", Path("prompts.jsonl"))
    assert checked == [asked[0], asked[3], asked[4]]  # first turns: it has no target to answer them
    score, record = read_score(space / "scored/draft"), read_record(space / "scored")
    wanted = ["writing"] * 3 + ["math"] + ["roleplay"] * 2
    assert [p.category for p in score.prompts] == [o.category for o in stored.outputs] == wanted
    assert len({score.conditions.selection, stored.manifest.selection, exported.selection}) == 1
    assert prompts.selection == exported.selection  # it is known before the target answers
    assert record is not None
    assert str(answers) in record.inputs
    assert list(Path("runs/turns").iterdir()) == [answers]  # made once
    call(SCORE, "--exhaustive", "--out", "again", "--prompt-file", answers)  # the last --prompt-file counts
    assert timed == [asked, asked]


def test_a_server_is_asked_the_same_requests(space, asked):
    tokenizer = checkpoint.load_tokenizer(space / "target")
    model = checkpoint.load_model(space / "target", torch.float32).eval()
    with running(SmallVLLM(model, tokenizer, frozenset([1]))) as url:
        config = ScoreConfig(
            server=url,
            speculative_server=url,
            target="target",
            prompt_file=Path("prompts.jsonl"),
            max_new_tokens=20,
        )
        served = prepare(config, True)
        assert isinstance(served, servers.ServedComparison)
        found = servers.with_turns(served)
    assert [prompt.ids for prompt in found.requests.prompts.rows] == asked


def test_sampled_answers_are_sampled_as_asked(space):
    lines(space, *TALKS)
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=3, stop_token_ids=(1,))
    call(BUILD, "--dtype", "float32", "--temperature", 1, "--seed", 3, "--out", "answers")
    assert [o.prompt.tolist() for o in read_store(space / "answers").outputs] == by_hand(space / "target", sampling)
    call(BUILD, "--dtype", "float32", "--temperature", 1, "--seed", 4, "--out", "others")
    assert len(list(Path("runs/turns").iterdir())) == 2


def scripted(log: list[int], fail: int = 99) -> Callable:
    def answer(prompts: list[Prompt], numbers: list[int]) -> list[list[int]]:
        if len(log) >= fail:
            raise KeyboardInterrupt
        log.append(len(prompts))
        return [np.random.default_rng(number).integers(3, 300, 4).tolist() for number in numbers]

    return answer


def test_answers_are_stored_whole_and_read_again(tmp_path, chatty, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts = file_prompts(lines(tmp_path, *TALKS * 3), chatty, chat="on")
    how = {"target": "t", "sampling": GREEDY}
    whole = turns.answered(prompts, chatty, **how, answer=scripted([]))
    file = turns.place(prompts, "t", GREEDY)
    assert file is not None
    text = file.read_text()
    file.unlink()
    with pytest.raises(KeyboardInterrupt):
        turns.answered(prompts, chatty, **how, answer=scripted([], fail=1))
    assert not list(file.parent.iterdir())
    again = turns.answered(prompts, chatty, **how, answer=scripted([]))
    assert file.read_text() == text
    assert again.rows == whole.rows
    assert turns.answered(prompts, chatty, **how, answer=scripted([], fail=0)).rows == whole.rows
    assert [json.loads(line)["messages"][-1]["role"] for line in text.splitlines()] == ["user"] * 18
    file.write_text(text[:-30])
    with pytest.raises(UserError):
        turns.answered(prompts, chatty, **how, answer=scripted([]))
    file.write_text("".join(text.splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError):
        turns.answered(prompts, chatty, **how, answer=scripted([]))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_conversation_with_a_refused_turn_is_a_bad_row(place, tmp_path, chatty, monkeypatch, capsys):
    """Its requests are missing, whichever turn was refused; the others are those of a file without it."""
    monkeypatch.chdir(tmp_path)
    long = {"turns": ["class Reader:", "return None", "self.path"]}
    (tmp_path / "clean").mkdir()
    clean = file_prompts(lines(tmp_path / "clean", *TALKS), chatty, chat="on")
    prompts = file_prompts(lines(tmp_path, *TALKS[:place], long, *TALKS[place:]), chatty, chat="on")
    how: dict[str, Any] = {"target": "t", "sampling": GREEDY}
    # greedy answers depend on the text only
    expected = turns.answered(clean, chatty, **how, answer=refusing([]))
    for refused in ([1], [2]):  # the first or the second turn of the long conversation
        found = turns.answered(prompts, chatty, **how, answer=refusing(refused, "class Reader:"))
        assert [p.ids for p in found.rows] == [p.ids for p in expected.rows]
        assert found.selection == expected.selection
        assert f"conversation {place + 1}" in " ".join(capsys.readouterr().err.split())
        again = turns.answered(prompts, chatty, **how, answer=scripted([], fail=0))
        assert again.rows == found.rows
        file = turns.place(prompts, "t", GREEDY)
        assert file is not None
        file.unlink()


def refusing(refused: list[int], opening: str = "") -> Callable:
    """Answer with a fixed text, but refuse these turns of conversations that begin with `opening`."""

    def answer(prompts: list[Prompt], numbers: list[int]) -> list[list[int] | UserError]:
        return [
            UserError("too long")
            if p.messages[0]["content"] == opening and (len(p.messages) + 1) // 2 in refused
            else [40, 41, 42]
            for p in prompts
        ]

    return answer


def test_many_conversations_with_a_refused_turn_end_the_command(tmp_path, chatty, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts = file_prompts(lines(tmp_path, *TALKS * 2), chatty, chat="on")
    answer = refusing([1], "def parse(line):")
    with pytest.raises(UserError):
        turns.answered(prompts, chatty, target="t", sampling=GREEDY, answer=answer)
    assert not Path("runs/turns").exists()


def test_prompts_of_one_turn_are_unchanged(tmp_path, chatty, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts = file_prompts(lines(tmp_path, {"prompt": "return 1"}, {"turns": ["return"]}), chatty, chat="on")
    assert turns.answered(prompts, chatty, target="t", sampling=GREEDY, answer=scripted([], fail=0)) is prompts


def test_other_targets_sampling_and_prompts_have_answers_of_their_own(tmp_path, chatty, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts = file_prompts(lines(tmp_path, *TALKS), chatty, chat="on")
    other = file_prompts(lines(tmp_path, *TALKS), chatty, chat="on", system_prompt="return")
    places = {
        turns.place(given, target, SamplingParams(max_tokens=tokens, temperature=temperature))
        for given in (prompts, other)
        for target in "ab"
        for tokens in (4, 8)
        for temperature in (0.0, 1.0)
    }
    assert len(places) == 16
    assert turns.place(prompts, "a", SamplingParams(max_tokens=4, stop_token_ids=(1,))) in places
