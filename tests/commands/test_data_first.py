"""Text that is missing or cannot be reached is said before any other work of a command."""

from typing import Any, NoReturn

import pytest
from helpers.errors import raises_option

from draftlab.commands import COMMANDS
from draftlab.commands.base import Command
from draftlab.runs import workspace

# settings with which each command reads the text of --data; init only writes the name of a source
ASKED: dict[str, dict[str, Any]] = {
    "auto": {"target": "tiny"},
    "check": {"draft": "tiny"},
    "distill": {"draft": "tiny"},
    "export": {"draft": "tiny", "to": "vllm", "verify_with": "vllm"},
    "outputs build": {"target": "tiny"},
    "prune": {"source": "tiny", "layers": 2},
    "score": {"draft": ["tiny"]},
    "search": {"layers": "1,2"},
}
READ_LESS = {
    "check": {"files_only": True},
    "distill": {"outputs": "store"},
    "export": {"verify_with": None},
    "outputs build": {"prompt_file": "prompts.jsonl"},
    "prune": {"outputs": "store"},
    "score": {"prompt_file": "prompts.jsonl"},
    "search": {"outputs": "store", "prompt_file": "prompts.jsonl"},
}


def loaded(command: Command) -> NoReturn:
    pytest.fail("the command was loaded before the text was checked")


def test_every_command_that_reads_text_is_here():
    named = {name for name, each in COMMANDS.items() if "data" in each.config.model_fields}
    assert named == {*ASKED, "init"}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("data", ["nope.txt", "hf:nosuch/ds", "stdlib=1,nope.txt=1"])
def test_wrong_text_is_said_before_anything_is_loaded(name, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workspace.write(workspace.PRESETS["tiny"])
    monkeypatch.setattr(Command, "loaded", loaded)
    with raises_option("--data"):
        COMMANDS[name](**ASKED[name], data=data)


@pytest.mark.parametrize("name", READ_LESS)
def test_text_that_is_not_read_is_not_checked(name, tmp_path, monkeypatch):
    """--data comes from draftlab.yaml then, and may be missing."""
    monkeypatch.chdir(tmp_path)
    workspace.write(workspace.PRESETS["tiny"])
    config = COMMANDS[name].config.build(ASKED[name])
    assert config.text_source is not None
    assert config.model_copy(update=READ_LESS[name]).text_source is None
