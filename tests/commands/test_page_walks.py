"""The commands of README, tutorial and serving go through as they are typed there, in the order of the page."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.loopback_servers import SmallVLLM, running
from helpers.small_files import with_template, write_rows
from helpers.typed import call

from draftlab.commands import COMMANDS
from draftlab.model import checkpoint, hub

ROOT = Path(__file__).parents[2]
SMALL = {  # what keeps a command short here; the page's own words stay as they are
    "prune": "--calibration-tokens 1024 --seq-len 128",
    "distill": "--steps 2 --batch-size 4",
    "outputs build": "--num-prompts 12 --max-new-tokens 8",
    "score": "--num-prompts 2 --max-new-tokens 8 --repeats 1",
}
ANSWERS = "--max-new-tokens 8"  # of distill, where the target writes them


def typed(page: str, until: str = "") -> Iterator[list[str]]:
    """Yield the words behind `draftlab` of the commands in a page's blocks of shell, without comments.

    until: Heading at which to stop.
    """
    text = (ROOT / page).read_text()
    text = text.partition(f"\n{until}\n")[0] if until else text
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in [] if language else block.replace("\\\n", " ").splitlines():
            words = line.removeprefix("$ ")
            if words.startswith("draftlab "):
                yield shlex.split(words, comments=True)[1:]


def command(words: list[str]) -> str:
    """Return the name of a command, which has one word or two."""
    return next(name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS)


def small(words: list[str]) -> list[str]:
    answers = ANSWERS.split() if "--text" in words and words[0] == "distill" else []
    return [*words, *SMALL.get(command(words), "").split(), *answers]


def unanswered(number: int) -> list[dict[str, str]]:
    """A question, with a system prompt or an earlier turn in some."""
    asked = f"How do I sort list number {number} of {number % 7} items in Python?"
    earlier = [("user", "How do I sort?"), ("assistant", f"def sort_{number}(items):\n    pass\n")]
    turns = [("system", "You are brief.")] * (number % 3 == 0) + earlier * (number % 4 == 0)
    return [{"role": role, "content": text} for role, text in (*turns, ("user", asked))]


@pytest.fixture
def chat_model(tmp_path, monkeypatch) -> Path:
    """The embedded target with a chat template, in the folder in which the test types."""
    monkeypatch.chdir(tmp_path)
    return with_template(hub.locate("tiny"), tmp_path / "models" / "chatty")


def test_the_readmes_walk_goes_through(chat_model):
    """Each `next:` line names the command that follows on the page."""
    walk = [words for words in typed("README.md") if words != ["env"]]
    assert [words[0] for words in walk] == ["init", "prune", "distill", "score", "export"]
    file = Path(walk[0][walk[0].index("--data") + 1])
    write_rows(file, ({"messages": unanswered(number)} for number in range(240)))
    for words, following in zip(walk, [*walk[1:], None], strict=True):
        models = ["models/chatty" if "/" in word else word for word in words]
        done = call("", *small(models))
        (then,) = re.findall(r"^next: (.*)$", done.stderr, re.MULTILINE)
        if words[0] == "score":
            # export is proposed for drafts that pay, and two steps of training make none
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


@pytest.mark.slow
def test_the_tutorials_laptop_walk_goes_through(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in typed("docs/tutorial.md", until="## The first hour"):
        call("", *small(words))
    config = json.loads(Path("runs/distill-3x128/config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (3, 128)
    scores = [json.loads(file.read_text()) for file in Path("runs").rglob("score.json")]
    assert len(scores) == 4
    assert {score["conditions"]["threads"] for score in scores} == {1}
    assert Path("report.html").exists()
    assert Path("runs/export-distill-3x128-transformers/assist.py").exists()


@pytest.mark.slow
def test_servings_commands_go_through(chat_model):
    """The page's names stand for small models, and its servers for small ones; auto shows its plan."""
    chatty, sibling, head = "models/chatty", "models/sibling", "models/head"
    write_rows(Path("prompts.jsonl"), ({"messages": unanswered(n)} for n in range(120)))
    few = "--data stdlib --seq-len 64"
    call(f"prune --source {chatty} --layers 2 --calibration-tokens 512 {few} --out {sibling}")
    call(f"distill --student eagle --target {chatty} --steps 2 --batch-size 4 {few} --out {head}")
    tokenizer = checkpoint.load_tokenizer(chat_model)
    target, draft = (checkpoint.load_model(Path(path), torch.float32).eval() for path in (chatty, sibling))
    plain = SmallVLLM(target, tokenizer, frozenset(), longest=512)
    drafting = SmallVLLM(target, tokenizer, frozenset(), draft=draft, longest=512)
    with running(plain) as url, running(drafting) as drafting_url:
        names = {
            "MODEL": chatty,
            "SMALLER": chatty,
            "SIBLING": sibling,
            "DRAFT": sibling,
            "HEAD": head,
            "replay/SIBLING": "replay/sibling",
            "http://localhost:8000": url,
            "http://localhost:8001": drafting_url,
        }
        for words in typed("docs/serving.md"):
            if words[0] == "auto" and "--dry-run" not in words:
                continue
            done = call("", *small([names.get(word, word) for word in words]))
            assert "Traceback" not in done.output
    (script,) = Path("runs").rglob("serve.sh")
    assert '"method\\": \\"draft_model' in script.read_text()
