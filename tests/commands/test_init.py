"""init reads the text that is here, and counts what the commands after it will use."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.errors import raises_option
from helpers.small_files import with_template, write_rows
from helpers.typed import call

import draftlab
from draftlab import data
from draftlab.config.shared import newest_draft
from draftlab.data.text import chat_ids
from draftlab.model import checkpoint
from draftlab.runs import workspace


@pytest.fixture
def chat_target(family_dirs, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return with_template(family_dirs["llama"], Path("target"))


def chat(number: int, *, answered: bool) -> list[dict[str, str]]:
    asked = [{"role": "user", "content": f"What is {number} and {number}?"}]
    return [*asked, {"role": "assistant", "content": f"{2 * number}."}] if answered else asked


@pytest.mark.parametrize("answered", [True, False])
def test_conversations_are_counted_as_they_will_be_split(answered, chat_target):
    rows = [chat(number, answered=answered) for number in range(60)]
    write_rows(Path("chats.jsonl"), ({"messages": row} for row in rows))
    printed = json.loads(call("init --target target --data chats.jsonl --json").stdout)
    train, heldout = (printed["text"]["chats.jsonl"][split] for split in ("train", "heldout"))
    held_out = len(data.documents("chats.jsonl", "heldout"))
    assert (train["rows"], heldout["rows"]) == (60 - held_out, held_out)
    for part in (train, heldout):
        assert part["rows"] == part["conversations"] == part["questions"]
        assert part["answers"] == answered * part["rows"]
    tokenizer = checkpoint.load_tokenizer(chat_target)
    assert train["tokens"] + heldout["tokens"] == sum(len(chat_ids(row, tokenizer, "", reply=False)) for row in rows)
    assert printed["next"] == "draftlab prune --layers 1"  # a third of five layers


def test_a_ready_draft_counts_until_a_draft_is_made(chat_target, family_dirs):
    made = draftlab.init(target="target", draft=str(family_dirs["llama_mha"]))
    assert made.next == f"draftlab auto target --draft {family_dirs['llama_mha']} --dry-run"
    assert newest_draft() == family_dirs["llama_mha"]
    draftlab.prune(layers=1, data="stdlib", calibration_tokens=256, seq_len=32, out="runs/cut")
    assert newest_draft() == Path("runs/cut")
    draftlab.init(target="target", overwrite=True)
    assert workspace.load().draft is None
    shutil.rmtree("runs")
    with raises_option("runs"):
        newest_draft()
