"""DSpark heads: what speculators computes, and the files that are refused."""

import json
from typing import Any

import pytest
import torch
from errors import raises_option
from head_texts import T, at_anchors, draft_ids, random_text, speculators_model
from test_dflash import BLOCK, NATIVE, SPECULATORS, loaded, written

import draftlab
from draftlab.model import dspark

MARKOV: dict[str, Any] = {
    "markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True, "sample_from_anchor": True,
}  # fmt: skip
DSPARK = SPECULATORS | {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    **MARKOV,
}


@pytest.mark.slow
@pytest.mark.parametrize("anchor", [True, False], ids=["anchor", "masks"])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_speculators_computes_the_same_logits_and_confidence(
    target, tmp_path, kind, anchor, monkeypatch
):
    content = DSPARK | {"markov_head_type": kind, "sample_from_anchor": anchor}
    folder, (ids, states), at = (
        written(tmp_path / "head", target, content, dspark),
        random_text(T),
        7,
    )
    model = speculators_model("dspark", "DSpark", folder, target, content)
    hidden, base = at_anchors(monkeypatch, model, ids, states, [at])
    tokens, first = ids[:, at : at + BLOCK], 0 if anchor else 1
    before = tokens if anchor else torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
    with torch.no_grad():
        embedded, blocks = model.markov_head.prev_embeddings(before), hidden.view(1, BLOCK, -1)
        bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=blocks)
        chance = model.confidence_head(torch.cat([blocks, embedded], -1)).sigmoid()[0, first:]
    head = loaded(folder, target, dspark)
    cache = head.new_cache(1, T)
    head.read(states[:, :at], torch.arange(at).unsqueeze(0), cache)
    cache.used = [at]
    count = head.config.most
    found = head.text_logits(ids[:, at : at + count], cache)[0][:, draft_ids()]
    torch.testing.assert_close(found, (base + bias)[0, first:], atol=1e-4, rtol=1e-4)
    block = head.block(ids[:, at], count, cache)
    for number in range(count):
        block.logits(ids[:, at + number])
        torch.testing.assert_close(block.confidence()[0], chance[number], atol=1e-5, rtol=1e-4)


def test_the_bias_of_the_token_before_is_added_to_the_blocks_logits(target, tmp_path):
    head = loaded(written(tmp_path / "head", target, DSPARK, dspark), target, dspark)
    ids, states = random_text(T)
    cache = head.new_cache(1, T)
    head.read(states[:, :4], torch.arange(4).unsqueeze(0), cache)
    cache.used = [4]
    tokens = ids[:, 4 : 4 + BLOCK]
    added = (head.text_logits(tokens, cache) - head.block_logits(tokens[:, 0], BLOCK, cache))[0]
    first, second = (head.weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    expected = first[tokens[0]] @ second.T
    torch.testing.assert_close(added[:, draft_ids()], expected, atol=1e-4, rtol=1e-4)


def test_both_layouts_are_the_same_head(target, tmp_path):
    native = {name: value for name, value in NATIVE.items() if name != "dflash_config"}
    native |= {"mask_token_id": 2, "target_layer_ids": [0, 1, 3], **MARKOV}
    theirs, own = (
        loaded(written(tmp_path / name, target, content, dspark), target, dspark)
        for name, content in (("theirs", DSPARK), ("native", native))
    )
    assert theirs.config == own.config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"markov_rank": 0}, "markov_rank"),
        ({"markov_head_type": "trigram"}, "markov_kind"),
        ({"sample_from_anchor": None}, "sample_from_anchor"),
    ],
)
def test_a_part_that_is_not_computed_is_refused_by_its_name(target, tmp_path, change, named):
    content = {name: value for name, value in (DSPARK | change).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with raises_option(named):
        dspark.check(tmp_path, target)


def test_a_floor_of_confidence_needs_a_confidence_head(target, tmp_path):
    written(tmp_path / "head", target, DSPARK | {"enable_confidence_head": False}, dspark)
    drafter = f"dspark:heads={tmp_path / 'head'},least_confidence=0.5"
    with raises_option("confidence"):
        draftlab.score(
            target=str(target), drafter=[drafter], data="stdlib", num_prompts=1, out=tmp_path / "out"
        )  # fmt: skip
