"""Architectures beyond the four that the engine runs: recognised by structure, cut exactly, or refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from helpers.builders import GRANITE, PASS_ROUNDING, SIZES, random_model
from helpers.errors import raises_option
from helpers.masks import both, error, masks_for, smaller
from helpers.walks import IDS, opened, random_rotation, walk_logits

from draftlab.errors import UserError
from draftlab.model import checkpoint, saving
from draftlab.model.shape import Shape
from draftlab.pruning.choose import choose, random_scores
from draftlab.pruning.cut import Cut, Rotated
from draftlab.pruning.source import check_buildable, check_prunable

CPU = torch.device("cpu")
CONFIGS = {
    "smollm3": lambda: hf.SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1, 1, 0]),
    "granite": lambda: hf.GraniteConfig(**SIZES | GRANITE),
    "ministral": lambda: hf.MinistralConfig(**SIZES, sliding_window=128),
    "seed_oss": lambda: hf.SeedOssConfig(**SIZES),
    "helium": lambda: hf.HeliumConfig(**SIZES | {"head_dim": 8}),
    "ernie4_5": lambda: hf.Ernie4_5Config(**SIZES),
    "hunyuan_v1_dense": lambda: hf.HunYuanDenseV1Config(**SIZES),
}
REFUSED = {
    "mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=2),
    "phi3": lambda: hf.Phi3Config(**SIZES),
    "stablelm": lambda: hf.StableLmConfig(**SIZES),
    "cohere": lambda: hf.CohereConfig(**SIZES),
    "gemma2": lambda: hf.Gemma2Config(**SIZES),
    "glm4": lambda: hf.Glm4Config(**SIZES),
}


def smaller_of(name: str, have: Shape) -> Shape:
    """Helium takes heads x head_dim to be the width."""
    shape = smaller(have)
    hidden = shape.heads * shape.head_dim if name == "helium" else shape.hidden
    return shape.model_copy(update={"hidden": hidden})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("more")
    for name, config in CONFIGS.items():
        random_model(config()).save_pretrained(root / name)
    return {name: root / name for name in CONFIGS}


@pytest.mark.parametrize("name", CONFIGS)
def test_masked_equals_extracted(name, saved):
    have, model = (
        checkpoint.read_shape(saved[name]),
        checkpoint.load_model(saved[name], torch.float32),
    )
    assert have.params() == sum(p.numel() for p in model.parameters())
    check_prunable(checkpoint.read_config(saved[name]), have)
    masks = masks_for(have, smaller_of(name, have))
    if "no_rope_layers" in checkpoint.read_config(saved[name]):
        assert masks.keep().layers != list(range(3))  # else the list need not be sliced
    assert error(*both(saved[name], model, masks)) < PASS_ROUNDING


@pytest.mark.parametrize("name", CONFIGS)
def test_walking_and_rotating_give_the_models_logits(name, saved):
    source = saved[name]
    have, weights, config = opened(source)
    with torch.inference_mode():
        wanted = checkpoint.load_model(source, torch.float32)(IDS[:1], use_cache=False).logits
    assert torch.equal(walk_logits(weights, config), wanted)
    if not have.tied:
        rotation = random_rotation()
        turned = walk_logits(Rotated(weights, have, rotation), config)
        assert error(turned, wanted) < PASS_ROUNDING


@pytest.mark.parametrize("name", CONFIGS)
def test_a_cut_checkpoint_is_written_and_loaded_strictly(name, saved, tmp_path):
    source = saved[name]
    have, shape = checkpoint.read_shape(source), smaller_of(name, checkpoint.read_shape(source))
    keep = choose(random_scores(have, 3), have, shape, [0, 1, 4])
    config = checkpoint.config_for(shape, checkpoint.read_config(source), keep.layers)
    saving.write_checkpoint(tmp_path, config, Cut(checkpoint.Weights(source), shape, keep).items(), None)
    model = checkpoint.load_model(tmp_path, torch.float32)
    assert checkpoint.read_shape(tmp_path) == shape
    assert torch.isfinite(model(IDS).logits).all()
    if name == "smollm3":
        assert json.loads((tmp_path / "config.json").read_text())["no_rope_layers"] == [1, 0, 0]


@pytest.mark.parametrize("name", REFUSED)
def test_other_structures_are_refused_by_the_tensor_that_differs(name, tmp_path):
    random_model(REFUSED[name]()).save_pretrained(tmp_path)
    with pytest.raises(UserError):
        checkpoint.read_shape(tmp_path)


def test_the_same_tensors_with_another_meaning_are_refused(tmp_path):
    random_model(hf.GemmaConfig(**SIZES)).save_pretrained(tmp_path)
    have = checkpoint.read_shape(tmp_path)  # by its tensors alone it passes
    with pytest.raises(UserError):
        check_prunable(checkpoint.read_config(tmp_path), have)


def test_a_shape_that_transformers_builds_otherwise_is_refused(saved):
    have, config = checkpoint.read_shape(saved["helium"]), checkpoint.read_config(saved["helium"])
    shape = have.model_copy(update={"hidden": 48})
    with raises_option("head_dim"):
        check_buildable(checkpoint.config_for(shape, config), shape)
