"""A head for fewer ids drafts less and loses nothing."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.builders import assert_rounds
from safetensors import safe_open

from draftlab.exporting import hf
from draftlab.latency.cost_model import active_params
from draftlab.latency.profiler import random_model
from draftlab.model import checkpoint, llama, trimmed_head
from draftlab.model.hf_files import write_head_ids
from draftlab.model.native_cpu import NativeLlama


@pytest.fixture
def halved(family_dirs, tmp_path) -> Path:
    """Return the small llama, of whose ids every second one counts."""
    return halve(family_dirs["llama"], tmp_path / "halved")


def halve(source: Path, out: Path) -> Path:
    shutil.copytree(source, out)
    write_head_ids(out, list(range(0, 307, 2)))
    return out


@pytest.mark.parametrize("mode", ["eager", "native", "int8"])
def test_logits_of_what_is_kept_are_what_they_were(mode, halved, family_dirs):
    whole, half = (llama.load(d, torch.float32) for d in (family_dirs["llama"], halved))
    assert half.head.shape == (154, 64)
    if mode != "eager":
        whole, half = (NativeLlama(model, int8=mode == "int8") for model in (whole, half))
    ids = torch.tensor([[0, 5, 9]])
    a, b = (m.forward(ids, m.new_cache(1, 3)) for m in (whole, half))
    torch.testing.assert_close(b[..., ::2], a[..., ::2])
    assert b[..., 1::2].isneginf().all()


@pytest.mark.parametrize("family", ["llama", "llama3_tied"])
def test_transformers_gives_the_same_logits(family, family_dirs, tmp_path):
    place, ids = halve(family_dirs[family], tmp_path / "halved"), torch.tensor([[0, 5, 9]])
    engine = llama.load(place, torch.float32)
    wanted = engine.forward(ids, engine.new_cache(1, 3))
    with torch.no_grad():
        found = checkpoint.load_model(place, torch.float32)(ids).logits
    assert_rounds(found, wanted)
    assert checkpoint.read_shape(place).draft_vocab == 154


@pytest.mark.parametrize("family", ["llama", "llama3_tied"])
def test_parameters_are_those_that_a_loss_changes_and_those_that_are_stored(family, family_dirs, tmp_path):
    place = halve(family_dirs[family], tmp_path / "halved")
    shape, model = checkpoint.read_shape(place), checkpoint.load_model(place, torch.float32)
    model.get_input_embeddings().padding_idx = None  # so that every row of the embedding has a gradient
    logits = model(torch.arange(307).unsqueeze(0)).logits
    logits[:, :, ::2].logsumexp(-1).sum().backward()
    rows = [p.grad.reshape(len(p), -1).any(1) * p[0].numel() for p in model.parameters()]
    assert shape.used_params() == sum(int(row.sum()) for row in rows)
    with safe_open(place / "model.safetensors", "pt") as file:
        sizes = [math.prod(file.get_slice(name).get_shape()) for name in file.offset_keys()]
    assert shape.params() == sum(sizes)


@pytest.mark.parametrize("family", ["llama", "llama3_tied"])
def test_an_export_has_every_row_and_its_other_ids_never_win(family, family_dirs, tmp_path):
    place, ids = halve(family_dirs[family], tmp_path / "halved"), torch.tensor([[0, 5, 9]])
    (tmp_path / "out").mkdir()
    changed = hf.write(place, tmp_path / "out", tokenizer_from=family_dirs[family], dtype=None)
    assert "154" in changed[0]
    assert not (tmp_path / "out/head_ids.json").exists()
    own, exported = (llama.load(d, torch.float32) for d in (place, tmp_path / "out"))
    a, b = (m.forward(ids, m.new_cache(1, 3))[0] for m in (own, exported))
    assert_rounds(b[:, ::2], a[:, ::2])
    others = b[:, ::2].mean(1, keepdim=True).expand(-1, 153)
    assert_rounds(b[:, 1::2], others)


def test_the_most_frequent_ids_stay():
    texts = [np.array([5, 5, 5, 6, 6, 7]), np.array([5, 6, 8, 9])]
    ids, coverage = trimmed_head.frequent_ids(texts, 4, 100, special=[1])
    assert ids == [1, 5, 6, 7]  # 7, 8 and 9 came once: the lowest
    assert coverage == 0.5  # of the second text: those of the first are 1, 5, 6, 7
    assert trimmed_head.frequent_ids(texts, 7, 100, special=[])[0] == [0, 1, 5, 6, 7, 8, 9]


def test_costs_are_of_the_rows_that_are_computed(halved, family_dirs):
    whole, half = (checkpoint.read_shape(d) for d in (family_dirs["llama"], halved))
    assert half.params() == whole.params()  # the embedding takes every id
    assert active_params(whole) - active_params(half) == (307 - 154) * 64
    assert whole.flops_per_token(9) - half.flops_per_token(9) == 2 * (307 - 154) * 64
    assert len(random_model(half, torch.float32, torch.device("cpu"), 16).head) == 154
