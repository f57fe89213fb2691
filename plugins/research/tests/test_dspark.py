"""DSpark heads: what speculators computes, and the files that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.builders import PASS_TERMS, assert_rounds, rounding
from helpers.dflash_heads import BLOCK, NATIVE, loaded, written
from helpers.errors import raises_option
from helpers.head_texts import T, at_anchors, draft_ids, random_text, speculators_model
from research_heads import DSPARK, MARKOV
from torch import Tensor

import draftlab
from draftlab_research import dspark

# speculators' probability of the first two ids of a head at each place of a block, in thousandths, by kind and anchor;
# the slow test below prints them
GOLDEN: dict[tuple[str, bool], list[list[float]]] = {
    ("vanilla", True): [
        [14.1, 10.04],
        [21.97, 16.15],
        [18.3, 16.2],
        [23.25, 16.78],
        [20.49, 12.93],
    ],
    ("vanilla", False): [[16.63, 11.62], [21.92, 16.14], [18.25, 16.18], [23.2, 16.76]],
    ("gated", True): [[9.7, 17.49], [11.53, 20.27], [10.33, 19.81], [12.16, 21.22], [11.13, 17.79]],
    ("gated", False): [[9.92, 17.17], [11.53, 20.27], [10.32, 19.82], [12.13, 21.26]],
    ("rnn", True): [[35.62, 23.59], [23.56, 22.28], [23.84, 21.76], [27.74, 26.93], [24.03, 22.13]],
    ("rnn", False): [[26.3, 26.4], [23.23, 21.41], [23.6, 20.89], [27.49, 25.82]],
}
AT = 7  # number of tokens before the block
CASES = [(kind, anchor) for kind in ("vanilla", "gated", "rnn") for anchor in (True, False)]


@pytest.mark.parametrize(("kind", "anchor"), CASES)
def test_a_block_has_the_probabilities_that_speculators_gives(target, tmp_path, kind, anchor):
    found, _ = block_of(dspark_head(tmp_path / "head", target, kind, anchor))
    printed = torch.tensor(GOLDEN[kind, anchor])
    allowed = 0.005 + rounding(torch.float32, PASS_TERMS, float(printed.max()))  # two digits are printed
    torch.testing.assert_close(found.softmax(-1)[:, :2] * 1000, printed, atol=allowed, rtol=0)


def dspark_head(folder: Path, target: Path, kind: str, anchor: bool) -> Any:
    content = DSPARK | {"markov_head_type": kind, "sample_from_anchor": anchor}
    return loaded(written(folder, target, content, dspark), target, dspark)


def block_of(head: Any) -> tuple[Tensor, list[float]]:
    """Return the logits of a block after AT tokens, [M, W], and the head's confidence at each position of the text."""
    ids, states = random_text(T)
    cache = head.new_cache(1, T)
    head.read(states[:, :AT], torch.arange(AT).unsqueeze(0), cache)
    cache.used = [AT]
    count = head.config.most
    logits = head.text_logits(ids[:, AT : AT + count], cache)[0][:, draft_ids()]
    block, confidence = head.block(ids[:, AT], count, cache), []
    for number in range(count):
        block.logits(ids[:, AT + number])
        confidence.append(float(block.confidence()[0]))
    return logits, confidence


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "anchor"), CASES)
def test_speculators_computes_the_same_logits_and_confidence(target, tmp_path, kind, anchor, monkeypatch):
    content = DSPARK | {"markov_head_type": kind, "sample_from_anchor": anchor}
    folder, (ids, states) = tmp_path / "head", random_text(T)
    found, confidence = block_of(dspark_head(folder, target, kind, anchor))
    model = speculators_model("dspark", "DSpark", folder, target, content)
    hidden, base = at_anchors(monkeypatch, model, ids, states, [AT])
    tokens, first = ids[:, AT : AT + BLOCK], 0 if anchor else 1
    before = tokens if anchor else torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
    with torch.no_grad():
        embedded, blocks = model.markov_head.prev_embeddings(before), hidden.view(1, BLOCK, -1)
        bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=blocks)
        chance = model.confidence_head(torch.cat([blocks, embedded], -1)).sigmoid()[0, first:]
    theirs = (base + bias)[0, first:]
    print(kind, anchor, (theirs.softmax(-1)[:, :2] * 1000).tolist())
    assert_rounds(found, theirs)
    assert_rounds(torch.tensor(confidence), chance.flatten())


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
    assert_rounds(added[:, draft_ids()], expected)


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
            target=str(target),
            drafter=[drafter],
            data="stdlib",
            num_prompts=1,
            out=tmp_path / "out",
        )
