"""The selection of prompts: the same file and number give the same prompts in every command, and records name it."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.chats import SCORE, chatty_fixture, ids_of, lines, plain_fixture, space_fixture  # noqa: F401
from helpers.typed import call

from draftlab.data import documents, open_heldout
from draftlab.data.prompts import Prompt, Prompts, file_prompts, load_prompts
from draftlab.errors import UserError
from draftlab.exporting.trials import trial_prompts
from draftlab.model import checkpoint
from draftlab.results.score import read_score
from draftlab.searching.prompts import PromptSplit
from draftlab.target_outputs.replay import read_replay
from draftlab.target_outputs.store import HELDOUT, read_manifest, read_store
from draftlab.training.checkpointer import load_or_make
from draftlab.training.evaluate import TargetTextEvaluator

WORDS = ["def", "return", "class", "self", "if", "for", "not", "None", "import", "line"]
JUDGED = {"messages": [{"role": "judge", "content": "a"}, {"role": "user", "content": "b"}]}


def asked(number: int) -> dict[str, Any]:
    return {"prompt": f"{WORDS[number % 10]} {number}", "category": "abcd"[number // 10]}


def questions(prompts: Prompts) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in prompts.rows]


# which prompts


@pytest.mark.parametrize("count", [1, 3, 5, 39, 40])
def test_prompts_are_spaced_evenly_over_the_file(count, tmp_path, chatty):
    """The i-th of N prompts is number floor(i 40 / N) of 40."""
    file = lines(tmp_path, *map(asked, range(40)))
    found = file_prompts(file, chatty, count=count, chat="on")
    assert questions(found) == [asked(i * 40 // count)["prompt"] for i in range(count)]
    assert len(found.categories) == min(count, 4)
    with pytest.raises(UserError):
        file_prompts(file, chatty, count=41, chat="on")
    every = file_prompts(file, chatty, count=41, or_fewer=True, chat="on")
    assert every == file_prompts(file, chatty, chat="on")


def test_prompts_of_conversations_are_spaced_like_rows(tmp_path, chatty):
    """Conversations of 3, 1 and 4 prompts are prompts 0 to 7. Of these, 4 are the prompts 0, 2, 4 and 6."""

    def talk(name: str, turns: int) -> dict[str, Any]:
        messages = []
        for turn in range(turns):
            messages.append({"role": "user", "content": f"{name}{turn}"})
            messages.append({"role": "assistant", "content": "return"})
        return {"messages": messages}

    file = lines(tmp_path, talk("a", 3), talk("b", 1), talk("c", 4))
    found = file_prompts(file, chatty, count=4, chat="on")
    assert questions(found) == ["a0", "a2", "c0", "c2"]
    assert len(set(found.conversations)) == 2


@pytest.mark.parametrize(("bad", "wanted"), [(0, [1, 25, 50, 75]), (50, [0, 25, 51, 75]), (75, [0, 25, 50, 76])])
def test_the_next_prompt_replaces_one_that_the_template_refuses(bad, wanted, tmp_path, chatty):
    rows: list[dict[str, Any]] = [{"prompt": str(i)} for i in range(100)]
    rows[bad] = JUDGED
    found = file_prompts(lines(tmp_path, *rows), chatty, count=4, chat="on")
    assert questions(found) == list(map(str, wanted))


def test_the_first_prompts_replace_the_last_ones(tmp_path, chatty):
    """Prompts 0, 1 and 3 of 5 are wanted, then 0 to 4 without the last, which is refused."""
    file = lines(tmp_path, *[{"prompt": str(i)} for i in range(4)], JUDGED)
    assert questions(file_prompts(file, chatty, count=3, chat="on")) == ["0", "1", "3"]
    assert questions(file_prompts(file, chatty, count=4, chat="on")) == ["0", "1", "2", "3"]
    with pytest.raises(UserError):
        file_prompts(file, chatty, count=5, chat="on")
    many = lines(tmp_path, *[{"prompt": str(i)} for i in range(3)], JUDGED, JUDGED)
    with pytest.raises(UserError):
        file_prompts(many, chatty, count=4, chat="on")


def mixed(folder: Path) -> Path:
    """Return a file with categories, a row that no template takes, and a line that is no JSON."""
    rows: list[dict[str, Any]] = list(map(asked, range(40)))
    rows[17] = {
        "messages": [
            {"role": "user", "content": "class A:"},
            {"role": "assistant", "content": "return"},
            {"role": "user", "content": "self.path"},
            {"role": "assistant", "content": "None"},
        ]
    }
    rows[20] = JUDGED
    return lines(folder, *rows)


def test_every_command_has_the_same_prompts(space):
    file = mixed(space)
    tokenizer = checkpoint.load_tokenizer(space / "target")
    wanted = file_prompts(file, tokenizer, count=12, chat="on")
    ids = ids_of(wanted)
    many = "--prompt-file prompts.jsonl --num-prompts 12 --max-new-tokens 4"
    call(f"{SCORE} --num-prompts 12 --max-new-tokens 4 --out scored")
    call(f"outputs build --use replay {many} --out replayed")
    call(f"outputs build {many} --top-logprobs 4 --out distilled")
    call("replay replayed --draft draft --out acceptance")
    score, store = read_score(space / "scored/draft"), read_store(space / "replayed")
    replay = read_replay(space / "acceptance/draft")
    assert [output.prompt.tolist() for output in store.outputs] == ids
    parts = [read_store(space / "distilled"), read_store(space / "distilled" / HELDOUT)]
    outputs = sorted((o for part in parts for o in part.outputs), key=lambda o: o.number)
    assert [output.prompt.tolist() for output in outputs] == ids
    assert trial_prompts(space / "target", "", file, count=12) == ids
    assert [prompt.tokens for prompt in score.prompts] == list(map(len, ids))
    recorded = {score.conditions.selection, store.manifest.selection, replay.selection}
    assert recorded == {wanted.selection}
    assert parts[0].manifest.selection != wanted.selection  # some prompts are held out


def test_a_trial_of_a_model_takes_what_little_text_there_is(space, plain):
    """Text: pieces of documents, shorter than asked for. Conversations: those that are held out."""
    texts = [f"def {word}(self): return None" for word in WORDS] * 30
    (space / "few.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pieces = trial_prompts(space / "target", "few.jsonl", None, count=3, length=96)
    held_out = [plain(document.text).input_ids for document in documents("few.jsonl", "heldout")]
    assert [len(piece) > 1 for piece in pieces] == [True] * 3
    assert all(piece[: len(ids)] == ids for piece, ids in zip(pieces, held_out[:3], strict=True))
    talks = [{"messages": [{"role": "user", "content": f"class {i}"}]} for i in range(90)]
    (space / "asked.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    tokenizer = checkpoint.load_tokenizer(space / "target")
    wanted = file_prompts(Path("asked.jsonl"), tokenizer, count=8, or_fewer=True, chat="on", split="heldout")
    assert trial_prompts(space / "target", "asked.jsonl", None) == [prompt.ids for prompt in wanted.rows]


def test_commands_have_the_same_heldout_conversations_of_data(space):
    talks = [
        {
            "messages": [
                {"role": "user", "content": f"{WORDS[i % 10]} {i}"},
                {"role": "assistant", "content": "return"},
            ]
        }
        for i in range(300)
    ]
    (space / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    call("outputs build --use replay --data talks.jsonl --num-prompts 3 --max-new-tokens 4 --out a")
    tokenizer = checkpoint.load_tokenizer(space / "target")
    found = load_prompts(None, "talks.jsonl", tokenizer, count=3, tokens=None, seed=0)
    assert [o.prompt.tolist() for o in read_store(space / "a").outputs] == ids_of(found)
    heldout = {document.key for document in documents("talks.jsonl", "heldout")}
    assert set(questions(found)) <= heldout


# its record


def test_the_selection_is_that_of_the_prompts_and_of_their_order():
    rows = [Prompt([i, i + 1]) for i in range(24)]

    def of(*chosen: int) -> str:
        return Prompts(rows=[rows[i] for i in chosen], source="set", tokens=None).selection

    first, spread = range(12), range(0, 24, 2)
    assert len({of(*first), of(*spread), of(*first[::-1]), of(*first[:-1])}) == 4
    renamed = Prompts(rows=[Prompt([i, i + 1], "x", 7) for i in first], source="f", tokens=2)
    assert renamed.selection == of(*first)


def test_later_turns_count_by_what_the_user_says():
    def of(*prompts: Prompt) -> str:
        return Prompts(rows=list(prompts), source="set", tokens=None).selection

    before = Prompt([1], later=("a", "b"))
    after = [Prompt([1, 9, i], first=[1], said=("a", "b")[:i]) for i in range(3)]
    other = [Prompt([1, 8, i], first=[1], said=("a", "b")[:i]) for i in range(3)]
    assert of(before) == of(*after) == of(*other)
    assert len({of(before), of(Prompt([1], later=("a", "c"))), of(Prompt([1])), of(*after[:2])}) == 4


def test_a_replay_of_other_prompts_is_named(space):
    lines(space, *map(asked, range(40)))
    for name, count in (("some", 4), ("more", 5), ("again", 4)):
        built = f"--prompt-file prompts.jsonl --num-prompts {count} --max-new-tokens 4 --out {name}"
        call(f"outputs build --use replay {built}")
        call(f"replay {name} --draft draft --out replay-{name}")
    call(f"{SCORE} --num-prompts 4 --max-new-tokens 4 --out scored")
    older = json.loads((space / "replay-some/draft/replay.json").read_text())
    del older["selection"]
    (space / "older.json").write_text(json.dumps(older))

    def noted(*acceptance: str) -> list[str]:
        chosen = " ".join(f"--acceptance {each}" for each in acceptance)
        drafts = "--draft-profile wide-796m@a100-80gb,eager " * len(acceptance)
        typed = f"predict {drafts} --target-profile llama-65b@4xa100-80gb,eager {chosen} --k 1"
        predictions = json.loads(call(f"{typed} --json").stdout)["predictions"]
        assert len({tuple(p["notes"]) for p in predictions}) == 1
        return predictions[0]["notes"]

    alone = noted("replay-some/draft")
    for same in ("replay-again/draft", "scored/draft"):
        assert noted("replay-some/draft", same) == alone
    for other in ("replay-more/draft", "older.json"):
        assert len(noted("replay-some/draft", other)) == len(alone) + 1
    assert noted("older.json") == alone


def test_a_store_with_another_selection_is_not_resumed(space):
    lines(space, *map(asked, range(40)))
    build = "outputs build --use replay --prompt-file prompts.jsonl --max-new-tokens 4"
    call(f"{build} --num-prompts 4 --out store")
    file = space / "store/manifest.json"
    manifest = json.loads(file.read_text())
    (space / "older").mkdir()
    shutil.copytree(space / "store", space / "older", dirs_exist_ok=True)
    del manifest["selection"]
    (space / "older/manifest.json").write_text(json.dumps(manifest | {"data_sha256": "0" * 64}))
    assert read_manifest(space / "older").finished  # it is still read
    call("replay older --draft draft --out replayed")
    assert read_replay(space / "replayed/draft").selection is None
    for folder in ("older", "store"):
        count = 4 if folder == "older" else 5
        assert folder in call(f"{build} --num-prompts {count} --out {folder}", code=1).stderr
    call(f"{build} --num-prompts 4 --out store")


# prompts of one document


def test_prompts_of_one_document_are_one_conversation(space):
    rows = [asked(i) | ({"document_id": i // 2} if i < 8 else {}) for i in range(12)]
    lines(space, *rows)
    call("outputs build --use replay --prompt-file prompts.jsonl --max-new-tokens 4 --out store")
    call("replay store --draft draft --out replayed")
    call(f"{SCORE} --max-new-tokens 4 --out scored")
    replay, score = read_replay(space / "replayed/draft"), read_score(space / "scored/draft")
    talks = [prompt.conversation for prompt in score.prompts]
    assert [talks.index(talk) for talk in talks] == [0, 0, 2, 2, 4, 4, 6, 6, 8, 9, 10, 11]
    assert replay.conversations == talks
    assert score.conversations == score.speedup(1).n == 8


def test_autos_prompts_of_one_document_are_one_conversation(space):
    """Six or so of 60 texts are held out, so each gives several of 12 prompts."""
    texts = ["\n".join(f"def f{i}_{j}(line): return line" for j in range(60)) for i in range(60)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (space / "text.jsonl").write_text(rows)
    split = PromptSplit(about="", rows=[], data="text.jsonl", choose=8, measure=4)
    split.write(space / "prompts", space / "target")
    tokenizer = checkpoint.load_tokenizer(space / "target")
    cut = load_prompts(None, "text.jsonl", tokenizer, count=12, tokens=None, seed=0)
    expected = cut.conversations[:8]
    assert len(set(expected)) < 8
    chosen = file_prompts(space / "prompts/choose.jsonl", tokenizer, chat="on").conversations
    pairs = set(zip(expected, chosen, strict=True))
    assert len(pairs) == len(set(expected)) == len(set(chosen))


def test_heldout_windows_of_one_document_are_one_conversation(tmp_path, plain):
    """A window belongs to the document in which it begins; an interval over its text counts documents."""
    file = tmp_path / "text.jsonl"
    rows = [{"text": f"document {i}\n" + "def f(line): return line\n" * (i % 7)} for i in range(200)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = open_heldout(str(file), plain, rows=4, seq_len=16, most_rows=20)
    docs = documents(str(file), "heldout")
    starts = [i for i, doc in enumerate(docs) for _ in [*plain(doc.text)["input_ids"], "eos"]]
    wanted = [starts[16 * i] for i in range(len(found.ids))]
    assert found.documents == wanted
    assert len(set(wanted)) < len(wanted)
    subset = found.subset(5)
    assert subset.documents == [wanted[i * len(wanted) // 5] for i in range(5)]
    rng = np.random.default_rng(0)
    texts = {"prompts": [[1]] * 8, "ids": [[2] * 5] * 8, "log_p": [[0.0] * 5] * 8}
    for documents_of, n in ((None, 8), ([0, 0, 1, 1, 2, 2, 3, 3], 4)):
        evaluator = TargetTextEvaluator(**texts, state=tmp_path / str(n), documents=documents_of)
        for step in (0, 1):
            chances = [torch.from_numpy(rng.random(4)) for _ in range(8)]
            load_or_make(evaluator.state, f"acceptance-{step:08d}.pt", lambda c=chances: {"chances": c})
        assert {row.gain.n for row in evaluator.compare(0, 1)} == {n}


def test_no_document_is_both_held_out_and_trained_on(space):
    lines(space, *[asked(i) | {"document_id": f"d{i // 2}"} for i in range(40)])
    many = "--prompt-file prompts.jsonl --max-new-tokens 4 --top-logprobs 4"
    call(f"outputs build {many} --out store")
    trained, heldout = (
        {output.number // 2 for output in read_store(part).outputs}
        for part in (space / "store", space / "store" / HELDOUT)
    )
    assert heldout
    assert not trained & heldout
    assert len(trained | heldout) == 20
    assert read_manifest(space / "store" / HELDOUT).selection is None
