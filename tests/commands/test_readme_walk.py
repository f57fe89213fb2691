"""README's walk goes through as it is typed there, with one file of unanswered chats."""

import json
import re
import shlex
from pathlib import Path

import pytest
from small_files import with_template, write_rows
from typed import call

from draftlab.model import hub

README = Path(__file__).parents[2] / "README.md"
SMALL = {  # what keeps a command short here; the walk's own words stay as they are
    "prune": "--calibration-tokens 1024 --seq-len 128",
    "distill": "--steps 2 --batch-size 4 --max-new-tokens 8",
    "score": "--num-prompts 2 --max-new-tokens 8 --k 1,2 --repeats 1",
    "export": "",
}


def walk():
    """Return the commands that README has from `draftlab init --target` on, without their comments."""
    (block,) = re.findall(r"```\n(draftlab init --target.*?)```", README.read_text(), re.DOTALL)
    return [shlex.split(line, comments=True)[1:] for line in block.splitlines()]


def unanswered(number):
    """A question, with a system prompt or an earlier turn in some."""
    asked = f"How do I sort list number {number} of {number % 7} items in Python?"
    earlier = [("user", "How do I sort?"), ("assistant", f"def sort_{number}(items):\n    pass\n")]
    turns = [("system", "You are brief.")] * (number % 3 == 0) + earlier * (number % 4 == 0)
    return [{"role": role, "content": text} for role, text in (*turns, ("user", asked))]


@pytest.fixture
def chat_model(tmp_path):
    """The embedded target with a chat template."""
    return with_template(hub.locate("tiny"), tmp_path / "models" / "chatty")


def test_the_walk_goes_through(chat_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path(next(words[words.index("--data") + 1] for words in walk() if "--data" in words))
    write_rows(file, ({"messages": unanswered(number)} for number in range(240)))
    for words, following in zip(walk(), [*walk()[1:], None], strict=True):
        models = ["models/chatty" if "/" in word else word for word in words]
        typed = [*models, *SMALL.get(words[0], "").split()]
        done = call("", *typed)
        (then,) = re.findall(r"^next: (.*)$", done.stderr, re.MULTILINE)
        if (
            words[0] == "score"
        ):  # export is proposed for drafts that pay, as two steps of training make none
            assert then.startswith(("draftlab report ", "draftlab export "))
        else:
            assert following is None or then.startswith(f"draftlab {following[0]} ")
        assert words[0] != "prune" or "--text target" in then
    (script,) = Path("runs").rglob("serve.sh")
    (target,) = re.findall(r"vllm serve (\S+)", script.read_text())
    assert Path(target).is_absolute()
    assert Path(target).samefile(chat_model)
    (score,) = Path("runs").rglob("score.json")
    assert json.loads(score.read_text())["conditions"]["chat"]
