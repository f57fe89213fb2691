"""The fast decoder computes what transformers computes."""

import json
import shutil
from functools import lru_cache

import pytest
import torch
from helpers.builders import FAMILIES, OTHER_BLOCKS, assert_rounds
from helpers.errors import raises_option
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from draftlab.model import llama, modes
from draftlab.model.decoder import Tree
from draftlab.model.hf_decoder import HFDecoder

IDS = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[*FAMILIES, *OTHER_BLOCKS])
def pair(request, family_dirs):
    directory = family_dirs[request.param]
    return llama.load(directory, torch.float32), AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.mark.parametrize("widths", [[40], [7, 1, 1, 5, 1, 3, 22]])
@torch.inference_mode()
def test_logits_of_passes_of_any_width_equal_transformers(pair, widths):
    ours, theirs = pair
    cache = ours.new_cache(2, 64)
    parts = [ours.forward(part, cache) for part in IDS.split(widths, dim=1)]
    assert_rounds(torch.cat(parts, 1), theirs(IDS).logits)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.tuples(st.integers(0, 6), st.integers(0, 6))),
        min_size=2,
        max_size=8,
    )
)
def test_rollback_equals_fresh_prefill(family_dirs, steps):
    """Rows of two texts that keep as much of each pass as they like, one more or less than the other."""
    model = _model(family_dirs["qwen3"])
    cache = model.new_cache(2, 64)
    rng = torch.Generator().manual_seed(len(steps))
    for width, kept in steps:
        ids = torch.randint(3, 300, (2, width), generator=rng)
        for row in (
            0,
            1,
        ):  # what the text says is fed up to where the row is kept, and nonsense behind
            at = cache.used[row]
            right = IDS[row, at : at + min(width, kept[row])]
            ids[row, : len(right)] = right
        before = cache.used
        model.forward(ids, cache)
        cache.used = [at + min(width, k, 40 - at) for at, k in zip(before, kept, strict=True)]
    for row, used in enumerate(cache.used):
        fresh = model.new_cache(1, 64)
        if used:
            model.forward(IDS[row : row + 1, :used], fresh)
        for held, again in ((cache.keys, fresh.keys), (cache.values, fresh.values)):
            assert_rounds(held[:, row, :, :used], again[:, 0, :, :used])


@lru_cache
def _model(directory):
    return llama.load(directory, torch.float32)


@torch.inference_mode()
def test_a_tree_gives_what_each_of_its_paths_gives(family_dirs):
    """The rows have different lengths, and the cache keeps a path as if it had been alone."""
    model, parents = _model(family_dirs["qwen3"]), (0, 0, 1, 2, 2, 5, 0)
    tree = IDS[:, 20:28]
    cache = model.new_cache(2, 64)
    model.forward(IDS[:, :20], cache)
    cache.used = [20, 13]
    logits = model.forward(tree, cache, tree=Tree.from_parents(parents))
    for leaf in range(8):
        path = [leaf]
        while path[0]:
            path.insert(0, parents[path[0] - 1])
        for row, used in enumerate((20, 13)):
            text = torch.cat([IDS[row, :used], tree[row, path]]).unsqueeze(0)
            alone = model.new_cache(1, 64)
            expected = model.forward(text, alone, last=1)[0, -1]
            assert_rounds(logits[row, leaf], expected)
            kept = model.new_cache(2, 64)
            kept.keys[:], kept.values[:] = cache.keys, cache.values
            kept.keep(row, used, path)
            assert kept.used[row] == used + len(path)
            assert_rounds(kept.keys[:, row, :, : kept.used[row]], alone.keys[:, 0, :, : kept.used[row]])


def test_a_cache_longer_than_the_context_is_refused(family_dirs):
    with raises_option("256"):
        llama.load(family_dirs["llama"], torch.float32).new_cache(1, 257)


def test_a_full_cache_is_an_error(family_dirs):
    model = llama.load(family_dirs["llama"], torch.float32)
    with pytest.raises(ValueError, match=r"40 .* 39"):
        model.forward(IDS, model.new_cache(2, 39))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic",
        ),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_what_is_not_computed_is_known_before_weights_are_read(family_dirs, tmp_path, change, said):
    place = tmp_path / "model"
    shutil.copytree(family_dirs["llama"], place)
    assert llama.check_supported(place) == llama.load(place, torch.float32).shape
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | change))
    with raises_option(said):
        llama.check_supported(place)
    assert isinstance(modes.load(place, torch.float32, torch.device("cpu")), HFDecoder)


def test_rotary_tables_are_as_long_as_the_request(family_dirs):
    """A context of a million tokens costs nothing until a text needs it, and a longer text changes no value."""
    model = llama.load(family_dirs["llama"], torch.float32)
    model.context = model.rope.context = 1_000_000
    both = (model, modes.with_mode(model, "native"))
    before = [each.forward_uncached(IDS, 3) for each in both]
    short, cos = len(model.rope.cos), model.rope.cos
    assert short < 10_000
    model.new_cache(1, short + 1)
    assert len(model.rope.cos) > short
    assert torch.equal(model.rope.cos[:short], cos)
    for each, expected in zip(both, before, strict=True):
        assert torch.equal(each.forward_uncached(IDS, 3), expected)
