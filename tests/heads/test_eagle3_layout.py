"""EAGLE-3 heads in the layouts of SpecForge, SafeAILab and speculators; heads that do not fit are refused."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers.errors import raises_option
from helpers.head_texts import draft_ids, random_weights
from helpers.plain_eagle import VARIANTS
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftlab.heads.base import TargetSizes
from draftlab.heads.eagle3 import layout
from draftlab.heads.eagle3.layout import Head, HeadShape
from draftlab.model import checkpoint


def random_head(config: HeadShape) -> Head:
    weights = random_weights(config.sizes())
    return Head(config=config, weights=weights, ids=draft_ids(), embedding=None)


@pytest.fixture(scope="module")
def head(target) -> Head:
    return random_head(layout.head_config(target, None, 40))


@pytest.fixture
def folder(head, target, tmp_path) -> Path:
    """Return a head in the native layout."""
    layout.write(tmp_path, head, "native", target=target, k=3)
    return tmp_path


def altered(folder: Path, **fields: object) -> None:
    """Change fields of config.json; a field of None is taken out."""
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("form", ["native", "speculators"])
def test_what_is_written_is_read_as_it_was(target, tmp_path, form, variant):
    head = random_head(layout.head_config(target, None, 40, **VARIANTS[variant]))
    layout.write(tmp_path, head, form, target=target, k=3)
    found = layout.read(tmp_path, target, torch.float32)
    assert found.config == head.config
    assert torch.equal(found.ids, head.ids)
    assert all(torch.equal(found.weights[name], weight) for name, weight in head.weights.items())


def test_speculators_layout_brings_an_embedding_that_is_the_targets_or_the_heads_own(head, target, tmp_path):
    """That library leaves the embedding at zero, without a word, where the file has none."""
    embedding = torch.randn(307, 64, generator=torch.Generator().manual_seed(5))
    own = Head(config=head.config, weights=head.weights, ids=head.ids, embedding=embedding)
    layout.write(tmp_path, head, "speculators", target=target, k=3)
    theirs = checkpoint.Weights(target)["model.embed_tokens.weight"]
    assert torch.equal(load_file(tmp_path / "model.safetensors")["embed_tokens.weight"], theirs)
    layout.write(tmp_path, own, "speculators", target=target, k=3)
    assert torch.equal(cast(Any, layout.read(tmp_path, target, torch.float32).embedding), embedding)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_of_all_ids_without_lm_head_has_the_targets(tied, family_dirs, tmp_path):
    """SGLang and vLLM load such heads so."""
    target = family_dirs["qwen2_tied" if tied else "llama"]
    shape = layout.head_config(target, None, 307)
    head = Head(config=shape, weights=random_weights(shape.sizes()), ids=torch.arange(307), embedding=None)
    layout.write(tmp_path, head, "native", target=target, k=3)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).lm_head.weight
    assert not stored.pop("lm_head.weight").equal(theirs)
    save_file(stored, file)
    assert layout.check(tmp_path, target) == shape
    read = layout.read(tmp_path, target, torch.float32)
    assert read.weights["lm_head.weight"].equal(theirs)
    assert read.weights["fc.weight"].equal(head.weights["fc.weight"])


def test_a_head_of_some_ids_needs_its_own_lm_head(folder, target):
    stored = load_file(folder / "model.safetensors")
    del stored["lm_head.weight"]
    save_file(stored, folder / "model.safetensors")
    with raises_option(folder, "lm_head.weight"):
        layout.check(folder, target)


def test_a_head_as_safeailab_writes_it(folder, target):
    """No layers, no target_hidden_size, no norm_before_residual; rope_theta by itself."""
    fields = (
        "eagle_config",
        "eagle_aux_hidden_state_layer_ids",
        "target_hidden_size",
        "rope_parameters",
    )
    altered(folder, **dict.fromkeys(fields), norm_before_residual=None)
    config = layout.check(folder, target)
    assert (config.layer_ids, config.target_hidden, config.norm_before_residual) == (
        (1, 2, 4),
        64,
        False,
    )
    assert config.rope["rope_theta"] == 10000.0


def test_layers_in_eagle_config_alone_are_counted_as_sglang_does(folder, target):
    """It captures the output of layer i, which is the residual stream after i + 1 layers."""
    altered(folder, eagle_aux_hidden_state_layer_ids=None)
    assert json.loads((folder / "config.json").read_text())["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [
        0,
        1,
        3,
    ]
    assert layout.check(folder, target).layer_ids == (1, 2, 4)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"target_hidden_size": 48}, "hidden size 48"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "1, 2, 6"),
        ({"intermediate_size": 44}, "(64, 44)"),
        ({"intermediate_size": 2**63}, "config.json"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2"),
        ({"fc_norm": True}, "fc_norm.0"),
        ({"model_type": "gemma3"}, "gemma3"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_their_configuration(folder, target, fields, named):
    altered(folder, **fields)
    with raises_option(named) as error:
        layout.check(folder, target)
    assert "\n" not in str(error.value)


def test_files_that_hold_something_else_are_refused(folder, target):
    tensors = load_file(folder / "model.safetensors")
    fewer = {name: tensor for name, tensor in tensors.items() if name != "fc.weight"}
    for changed, named in (
        (tensors | {"mask_hidden": torch.zeros(3)}, "mask_hidden"),
        (fewer, "fc.weight"),
    ):
        save_file(changed, folder / "model.safetensors")
        with raises_option(named):
            layout.check(folder, target)


def test_three_layers_of_every_target_that_has_four():
    def layers(n: int) -> tuple[int, ...]:
        return TargetSizes(name="t", layers=n, hidden=8, vocab=8).default_layer_ids()

    assert layers(32) == (2, 16, 29)  # what vLLM, SGLang and llama.cpp assume
    assert all(len(set(layers(n))) == 3 and max(layers(n)) < n for n in range(4, 100))
    with raises_option("3"):
        layers(3)
