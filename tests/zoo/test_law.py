"""Every command works on every checkpoint, or refuses in one line that names what and why."""

from pathlib import Path

import pytest
import torch

from draftlab.model import checkpoint

from .build import build, small
from .facts import YES, zoo
from .law import outcomes
from .table import page

QUICK = ("llama-1-7b", "qwen3-0.6b", "mistral-7b-v0.3", "gemma-3-1b-it")
FEW = [
    "prune depth",
    "prune width",
    "outputs build",
    "outputs info",
    "outputs to replay",
    "replay",
    "score compiled",
    "check",
    "export gguf",
    "export itself hf",
]
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def wrong(name: str, folder: Path, steps: list[str] | None = None) -> list[str]:
    return [found.line() for found in outcomes(zoo()[name], folder, steps) if not found.right]


@pytest.mark.parametrize("name", QUICK)
def test_some_commands_on_some_checkpoints(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert wrong(name, tmp_path, FEW) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo())
def test_every_command_on_every_checkpoint(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert wrong(name, tmp_path) == []


@pytest.mark.parametrize("name", [name for name, facts in zoo().items() if facts.prune == YES])
def test_a_small_one_has_the_ratios_of_the_real_one(name, tmp_path):
    facts = zoo()[name]
    have, real, made = small(facts), facts.sizes, build(facts, tmp_path / name)
    assert (have.heads * real.kv, have.hidden * real.heads * real.head) == (
        real.heads * have.kv,
        real.hidden * have.heads * have.head,
    )
    assert (have.vocab > have.tokens) == (real.vocab > real.tokens)
    if "bin" not in facts.files:
        shape = checkpoint.read_shape(made)
        assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads) == (
            have.layers,
            have.hidden,
            have.heads,
            have.kv,
        )
        assert (shape.head_dim, shape.ffn, shape.vocab) == (have.head, have.ffn, have.vocab)
        assert shape.tied == facts.tied
        assert checkpoint.stored_dtype(made) == getattr(torch, facts.dtype)


def test_the_table_says_what_is_expected():
    """python -m zoo.table > docs/models.md"""
    assert PAGE.read_text() == page()
