"""DFlash heads: what speculators computes, in both layouts; every part that is not computed is refused by its name."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import save_neox
from errors import raises_option
from head_texts import LAYERS, T, V, W, draft_ids, random_text
from safetensors.torch import save_file
from torch import Tensor

import draftlab
from draftlab.exporting.artifact import open_artifact
from draftlab.model import checkpoint, dflash, hub
from draftlab.model.dflash import DFlash

BLOCK = 5
LAYER: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 12, "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": V,
    "max_position_embeddings": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False, "layer_types": ["full_attention", "full_attention"], "sliding_window": None,
}  # fmt: skip
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "draft_vocab_size": W,
    "block_size": BLOCK, "aux_hidden_state_layer_ids": LAYERS, "mask_token_id": 2, "transformer_layer_config": LAYER,
    "sliding_window_non_causal": False, "sample_from_anchor": False,
}  # fmt: skip
NATIVE = LAYER | {
    "architectures": ["DFlashDraftModel"], "block_size": BLOCK, "draft_vocab_size": W,
    "dflash_config": {"mask_token_id": 2, "target_layer_ids": [i - 1 for i in LAYERS]},
}  # fmt: skip


def written(folder: Path, target: Path, content: dict[str, Any], kind: Any = dflash) -> Path:
    """A head of random weights. kind: The module of its kind, dflash or dspark."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    config = kind.check(folder, target)
    generator = torch.Generator().manual_seed(2)
    weights = {
        name: 0.2 * torch.randn(size, generator=generator) for name, size in config.sizes().items()
    }
    weights["lm_head.weight"] = 0.2 * torch.randn(W, 64, generator=generator)
    known = torch.zeros(V, dtype=torch.bool)
    known[draft_ids()] = True
    save_file(
        weights | {"d2t": draft_ids() - torch.arange(W), "t2d": known}, folder / "model.safetensors"
    )
    return folder


def loaded(folder: Path, target: Path, kind: Any = dflash) -> Any:
    weights = checkpoint.Weights(target)
    return kind.load(
        folder, target, weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    )


def drafted(head: DFlash, states: Tensor, text: Tensor, at: int) -> Tensor:
    """The logits of a whole block after the first tokens of a text, of which the token at a place is the last."""
    cache = head.new_cache(1, T)
    head.read(states[:, :at], torch.arange(at).unsqueeze(0), cache)
    cache.used = [at]
    return head.block_logits(text[:, at], head.config.most, cache)[0][:, draft_ids()]


@pytest.fixture(scope="module")
def target(family_dirs) -> Path:
    return family_dirs["llama"]


@pytest.fixture(scope="module")
def text() -> tuple[Tensor, Tensor]:
    """ids [1, T], and states [1, T, A E] of the target."""
    return random_text(T)


def test_both_layouts_are_the_same_head(target, text, tmp_path):
    theirs = loaded(written(tmp_path / "theirs", target, SPECULATORS), target)
    native = loaded(written(tmp_path / "native", target, NATIVE), target)
    assert theirs.config == native.config
    assert theirs.config == theirs.config.model_copy(
        update={"layer_ids": (1, 2, 4), "causal": (False, False)}
    )
    assert torch.equal(drafted(theirs, text[1], text[0], 9), drafted(native, text[1], text[0], 9))


def test_a_block_is_what_a_reading_of_the_whole_text_gives(target, text, tmp_path):
    """States that are read in parts, in any order of rows, give what states read at once give."""
    head = loaded(written(tmp_path / "head", target, SPECULATORS), target)
    cache = head.new_cache(2, T)
    states = text[1].expand(2, -1, -1)
    for start, end in ((0, 4), (3, 7), (5, 9)):
        head.read(states[:, start:end], torch.arange(start, end).expand(2, -1), cache)
    cache.used = [9, 6]
    last = torch.stack([text[0][0, 9], text[0][0, 6]])
    found = head.block_logits(last, head.config.most, cache)[..., draft_ids()]
    for row, at in enumerate((9, 6)):
        torch.testing.assert_close(
            found[row], drafted(head, text[1], text[0], at), atol=1e-5, rtol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [{}, {"sample_from_anchor": True}, {"sliding": True}],
    ids=["plain", "anchor", "slides"],
)
def test_speculators_computes_the_same_logits(target, text, tmp_path, fields):
    """Windows are wider than the text: speculators moves them with the block, servers with each token."""
    core = pytest.importorskip("speculators.models.dflash.core", reason="make peers installs it")
    content = SPECULATORS | {name: value for name, value in fields.items() if name != "sliding"}
    if "sliding" in fields:
        types = {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 64,
            "use_sliding_window": True,
        }
        content = content | {"transformer_layer_config": LAYER | types}
    folder = written(tmp_path / "head", target, content)
    config = core.DFlashSpeculatorConfig.model_validate(content)
    config.transformer_layer_config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = core.DFlashDraftModel(config).float().eval()
    own = dict(checkpoint.Weights(folder))
    own["embed_tokens.weight"] = checkpoint.Weights(target)["model.embed_tokens.weight"]
    missing, unexpected = model.load_state_dict(own, strict=False)
    assert set(missing) <= {"t2d", "verifier_norm.weight", "verifier_lm_head.weight"}
    assert not unexpected
    kept = import_module("speculators.models.dflash.core")
    anchors = torch.tensor([3, 7])
    original = kept.select_anchors
    kept.select_anchors = lambda *given: (anchors, torch.ones(2, dtype=torch.bool))
    try:
        with torch.no_grad():
            _, logits, *_ = model._backbone_forward(
                text[1], text[0], torch.ones(1, T), torch.zeros(1, T, 64), torch.zeros(1, T, dtype=torch.long),
                max_anchors=2,
            )  # fmt: skip
    finally:
        kept.select_anchors = original
    head = loaded(folder, target)
    first = 0 if "sample_from_anchor" in fields else 1
    for number, anchor in enumerate(anchors.tolist()):
        theirs = logits[0, number * BLOCK + first : (number + 1) * BLOCK]
        torch.testing.assert_close(
            drafted(head, text[1], text[0], anchor), theirs, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"transformer_layer_config": LAYER | {"attention_bias": True}}, "attention_bias"),
        ({"transformer_layer_config": LAYER | {"hidden_size": 32}}, "hidden size 32"),
        ({"aux_hidden_state_layer_ids": [1, 9]}, "9"),
    ],
)
def test_a_part_that_is_not_computed_is_refused_by_its_name(target, tmp_path, change, named):
    (tmp_path / "config.json").write_text(json.dumps(SPECULATORS | change))
    with raises_option(named):
        dflash.check(tmp_path, target)


def test_a_tensor_that_is_not_computed_is_refused_by_its_name(target, tmp_path):
    folder = written(tmp_path / "head", target, SPECULATORS)
    weights = dict(checkpoint.Weights(folder))
    save_file(weights | {"mask_embedding": torch.zeros(64)}, folder / "model.safetensors")
    with raises_option("mask_embedding"):
        loaded(folder, target)
    save_file(
        {name: weights[name] for name in weights if name != "fc.weight"},
        folder / "model.safetensors",
    )
    with raises_option("fc.weight"):
        loaded(folder, target)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_head_is_scored_on_every_kind_of_target(
    family, target, tokenizer_dir, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    target = (
        target
        if family == "llama"
        else save_neox(tmp_path / "target", tokenizer_dir, layers=5, hidden=64)
    )
    written(tmp_path / "head", target, NATIVE)
    Path("prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"def add_{i}(a, b):"}) + "\n" for i in range(4))
    )
    scored = draftlab.score(
        target=str(target), drafter=["dflash:heads=head"], prompt_file="prompts.jsonl", k="2,4", max_new_tokens=12,
        repeats=1, batch="1,2", out="out",
    )  # fmt: skip
    assert all(score.identical for score in scored.scores)
    assert {k for score in scored.scores for k in score.speculative} == {2, 4}


def test_a_k_beyond_the_block_is_refused(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "head", target, NATIVE)
    settings = {
        "target": str(target),
        "data": "stdlib",
        "num_prompts": 1,
        "prompt_tokens": 8,
        "max_new_tokens": 8,
    }
    with raises_option("--k", BLOCK - 1):
        draftlab.score(drafter=["dflash:heads=head"], k="5", out="out", **settings)


def test_a_head_is_no_whole_model_and_nothing_that_is_exported(target, tmp_path):
    folder = written(tmp_path / "head", target, NATIVE)
    for refused in (lambda: hub.locate_model(str(folder)), lambda: open_artifact(folder, target)):
        with raises_option(f"--drafter dflash:heads={folder}"):
            refused()
