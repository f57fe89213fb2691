"""DFlash heads: what speculators computes, in both layouts; every part that is not computed is refused by its name."""

import json

import pytest
import torch
from helpers.builders import assert_rounds
from helpers.dflash_heads import BLOCK, LAYER, NATIVE, SPECULATORS, loaded, written
from helpers.errors import raises_option
from helpers.head_texts import T, V, at_anchors, draft_ids, random_text, speculators_model
from safetensors.torch import save_file
from torch import Tensor

import draftlab
from draftlab.exporting.artifact import open_artifact
from draftlab.heads.dflash import layout
from draftlab.heads.dflash.decoder import DFlash
from draftlab.model import checkpoint, hub
from draftlab.model.checkpoint import Checkpoint

SLIDES = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 64,
    "use_sliding_window": True,
}


def drafted(head: DFlash, states: Tensor, text: Tensor, at: int) -> Tensor:
    """Return the logits of a whole block after the first tokens of a text, which end with a given token."""
    cache = head.new_cache(1, T)
    head.read(states[:, :at], torch.arange(at).unsqueeze(0), cache)
    cache.used = [at]
    return head.block_logits(text[:, at], head.config.most, cache)[0][:, draft_ids()]


@pytest.fixture(scope="module")
def text() -> tuple[Tensor, Tensor]:
    """ids [1, T], and states [1, T, A E] of the target."""
    return random_text(T)


def test_both_layouts_are_the_same_head(target, text, tmp_path):
    theirs = loaded(written(tmp_path / "theirs", target, SPECULATORS), target)
    native = loaded(written(tmp_path / "native", target, NATIVE), target)
    assert theirs.config == native.config
    assert (theirs.config.layer_ids, theirs.config.causal) == ((1, 2, 4), (False, False))
    assert torch.equal(drafted(theirs, text[1], text[0], 9), drafted(native, text[1], text[0], 9))


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"sample_from_anchor": True}, {"transformer_layer_config": LAYER | SLIDES}])
def test_speculators_computes_the_same_logits(target, text, tmp_path, fields, monkeypatch):
    """Windows are wider than the text: speculators moves them with the block, servers with each token."""
    content = SPECULATORS | fields
    folder = written(tmp_path / "head", target, content)
    model, anchors = speculators_model("dflash", "DFlash", folder, target, content), [3, 7]
    _, logits = at_anchors(monkeypatch, model, *text, anchors)
    head = loaded(folder, target)
    first = 0 if content["sample_from_anchor"] else 1
    for number, anchor in enumerate(anchors):
        theirs = logits[0, number * BLOCK + first : (number + 1) * BLOCK]
        assert_rounds(drafted(head, text[1], text[0], anchor), theirs)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"transformer_layer_config": LAYER | {"attention_bias": True}}, "attention_bias"),
        ({"transformer_layer_config": LAYER | {"hidden_size": 32}}, "hidden size 32"),
        ({"aux_hidden_state_layer_ids": [1, 9]}, "9"),
        ({"mask_token_id": V}, "mask_token_id"),
    ],
)
def test_a_part_that_is_not_computed_is_refused_by_its_name(target, tmp_path, change, named):
    (tmp_path / "config.json").write_text(json.dumps(SPECULATORS | change))
    with raises_option(named):
        layout.check(tmp_path, target)


def test_a_tensor_that_is_not_computed_is_refused_by_its_name(target, tmp_path):
    folder = written(tmp_path / "head", target, SPECULATORS)
    weights = dict(checkpoint.Weights(folder))
    for tensors, named in (
        (weights | {"mask_embedding": torch.zeros(64)}, "mask_embedding"),
        ({name: weights[name] for name in weights if name != "fc.weight"}, "fc.weight"),
    ):
        save_file(tensors, folder / "model.safetensors")
        with raises_option(named):
            loaded(folder, target)


def test_a_head_is_no_whole_model_and_drafts_no_more_than_its_block(target, tmp_path):
    folder = written(tmp_path / "head", target, NATIVE)
    name = f"dflash:heads={folder}"
    asked = {"target": str(target), "data": "stdlib", "num_prompts": 1, "out": tmp_path / "out"}
    for refused, named in (
        (lambda: hub.locate_model(str(folder)), f"--drafter {name}"),
        (lambda: open_artifact(folder, Checkpoint(target)), f"--drafter {name}"),
        (lambda: draftlab.score(drafter=[name], k="5", **asked), f"{BLOCK - 1}"),
    ):
        with raises_option(named):
            refused()
