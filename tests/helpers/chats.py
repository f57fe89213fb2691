"""Tokenizers with and without a chat template, and files of prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from draftlab.data.prompts import Prompts
from draftlab.model import checkpoint
from draftlab.runs import workspace
from helpers.builders import build

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = {"role": "user", "content": "def parse(line):"}
TALK = [
    USER,
    {"role": "assistant", "content": "return 1"},
    {"role": "user", "content": "class Reader:"},
]
BUILD = "outputs build --use replay --prompt-file prompts.jsonl --max-new-tokens 20"
SCORE = (
    "score --draft draft --prompt-file prompts.jsonl --k 1,3 --max-new-tokens 20 --repeats 1 "
    "--mode eager --dtype float32"
)


@pytest.fixture(name="plain")
def plain_fixture(tokenizer_dir: Path) -> PreTrainedTokenizerBase:
    return checkpoint.load_tokenizer(tokenizer_dir)


@pytest.fixture(name="chatty")
def chatty_fixture(tokenizer_dir: Path) -> PreTrainedTokenizerBase:
    tokenizer = checkpoint.load_tokenizer(tokenizer_dir)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def lines(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def ids_of(prompts: Prompts) -> list[list[int]]:
    return [prompt.ids for prompt in prompts.rows]


@pytest.fixture(name="space")
def space_fixture(tmp_path, monkeypatch, tokenizer_dir) -> Path:
    """Return a workspace of a chat model, with a draft and a prompt file."""
    models = {"target": build("llama", 1), "draft": build("llama", 1)}
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in models["draft"].parameters():
            parameter.add_(torch.randn_like(parameter) * 0.002)
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        for file in tokenizer_dir.iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        (tmp_path / name / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.chdir(tmp_path)
    workspace.write(workspace.Workspace(target="target", source="target", data="stdlib"))
    lines(
        tmp_path,
        {"messages": TALK},
        {"prompt": "return 1"},
        {"turns": ["if not line:"]},
        {"messages": [USER]},
    )
    return tmp_path
