"""A draft that gains on unseen traffic replaces the old one, and a draft that does not is left out."""

import runpy
import shutil
from pathlib import Path

import pytest
import torch
from helpers.builders import build
from helpers.stores import (
    build_store,
    text_fixture,  # noqa: F401
)

follow = runpy.run_path(str(Path(__file__).parents[2] / "examples/follow_traffic.py"))["follow"]
FAST = {"steps": 30, "batch_size": 4, "training_dtype": "float32", "optimizer": "adamw"}


@pytest.fixture(scope="module")
def draft(family_dirs, tmp_path_factory) -> Path:
    """Return the target with noise on its weights: close, and with something to learn."""
    out = tmp_path_factory.mktemp("draft") / "noisy"
    model = build("llama")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.06)
    model.save_pretrained(out)
    for file in family_dirs["llama"].glob("tokenizer*"):
        shutil.copyfile(file, out / file.name)
    return out


@pytest.fixture(scope="module")
def traffic(family_dirs, text, tmp_path_factory) -> Path:
    """Return two days of what the target wrote."""
    root = tmp_path_factory.mktemp("traffic")
    sizes = {"num_sequences": 48, "seq_len": 40, "top_logprobs": 307}
    for number, day in enumerate(("day1", "day2")):
        build_store(family_dirs["llama"], text, root / day, text="target", seed=number, **sizes)
    return root


def test_a_draft_is_served_if_it_gains_on_unseen_traffic(traffic, draft, tmp_path):
    assert follow(traffic, draft, tmp_path / "new", lr=3e-3, **FAST) == tmp_path / "new"
    assert follow(traffic, draft, tmp_path / "same", lr=1e-9, **FAST) == draft
