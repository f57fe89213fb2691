"""DSpark heads: what speculators computes, and the files that are refused."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import raises_option
from head_texts import T, draft_ids, random_text
from test_dflash import BLOCK, NATIVE, SPECULATORS, loaded, written

import draftlab
from draftlab.model import checkpoint, dspark

MARKOV: dict[str, Any] = {
    "markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True, "sample_from_anchor": True,
}  # fmt: skip
DSPARK = SPECULATORS | {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    **MARKOV,
}


@pytest.fixture(scope="module")
def target(family_dirs: dict[str, Path]) -> Path:
    return family_dirs["llama"]


@pytest.mark.slow
@pytest.mark.parametrize("anchor", [True, False], ids=["anchor", "masks"])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_speculators_computes_the_same_logits_and_confidence(target, tmp_path, kind, anchor):
    core = pytest.importorskip("speculators.models.dspark.core", reason="make peers installs it")
    content = DSPARK | {"markov_head_type": kind, "sample_from_anchor": anchor}
    folder, (ids, states) = written(tmp_path / "head", target, content, dspark), random_text(T)
    config = core.DSparkSpeculatorConfig.model_validate(content)
    config.transformer_layer_config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = core.DSparkDraftModel(config).float().eval()
    own = dict(checkpoint.Weights(folder))
    own["embed_tokens.weight"] = checkpoint.Weights(target)["model.embed_tokens.weight"]
    missing, unexpected = model.load_state_dict(own, strict=False)
    assert set(missing) <= {"t2d", "verifier_norm.weight", "verifier_lm_head.weight"}
    assert not unexpected
    kept, at = import_module("speculators.models.dflash.core"), 7
    original = kept.select_anchors
    kept.select_anchors = lambda *given: (torch.tensor([at]), torch.ones(1, dtype=torch.bool))
    try:
        with torch.no_grad():
            hidden, base, *_ = model._backbone_forward(
                states, ids, torch.ones(1, T), torch.zeros(1, T, 64), torch.zeros(1, T, dtype=torch.long),
                max_anchors=1,
            )  # fmt: skip
    finally:
        kept.select_anchors = original
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


@pytest.mark.parametrize("layout", ["speculators", "native"])
def test_a_head_is_scored_in_both_layouts(layout, target, tmp_path, monkeypatch):
    """With a floor of confidence fewer tokens are drafted, and the text stays the target's."""
    monkeypatch.chdir(tmp_path)
    native = {name: value for name, value in NATIVE.items() if name != "dflash_config"}
    native |= {"mask_token_id": 2, "target_layer_ids": [0, 1, 3], **MARKOV}
    written(tmp_path / "head", target, DSPARK if layout == "speculators" else native, dspark)
    Path("prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"def add_{i}(a, b):"}) + "\n" for i in range(4))
    )
    drafted = []
    for options in ("", ",least_confidence=0.2"):
        scored = draftlab.score(
            target=str(target), drafter=[f"dspark:heads=head{options}"], prompt_file="prompts.jsonl", k="4",
            max_new_tokens=12, repeats=1, batch="1,2", out=f"out{len(drafted)}",
        )  # fmt: skip
        assert all(score.identical for score in scored.scores)
        drafted.append(sum(sum(g.drafted) for s in scored.scores for g in s.generations(4)))
    assert drafted[1] < drafted[0]


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


def test_a_floor_of_confidence_needs_a_confidence_head(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "head", target, DSPARK | {"enable_confidence_head": False}, dspark)
    with raises_option("confidence"):
        draftlab.score(
            target=str(target), drafter=["dspark:heads=head,least_confidence=0.5"], data="stdlib", num_prompts=1,
            prompt_tokens=8, max_new_tokens=8, k="2", out="out",
        )  # fmt: skip
