"""Each option of prune and prune-masks is read or refused; the plan is that of the dtype computed with."""

import json
import re

import pytest
import torch

from draftlab.commands.prune import prune, prune_masks
from draftlab.config.prune import PruneConfig, PruneMasksConfig
from draftlab.errors import UserError
from draftlab.model import checkpoint

SIZED = {"layers": 2, "source": "tiny"}
LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008,
    "vocab_size": 32000, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "mode", "option"),
    [
        (PruneConfig, {"method": "first"}, {"depth": "even"}),
        (PruneConfig, {"method": "random"}, {"basis": "coordinates"}),
        (PruneConfig, {"method": "magnitude"}, {"scores_cache": "scores.safetensors"}),
        (PruneConfig, {"refit": False}, {"ridge": 0.1}),
        (PruneConfig, {"ffn": 64}, {"multiple_of": 64}),
        (PruneConfig, {"shape": "a.yaml", "layers": None}, {"width": 64}),
        (PruneConfig, {"shape": "a.yaml", "layers": None}, {"multiple_of": 64}),
        (PruneConfig, {"method": "first", "refit": False, "rescale_norms": False}, {"calibration_tokens": 64}),
        (PruneConfig, {"method": "first", "refit": False, "rescale_norms": False}, {"seed": 1}),
        (PruneMasksConfig, {"train_weights": "frozen"}, {"lr": 1e-3}),
        (PruneMasksConfig, {"train_weights": "frozen"}, {"optimizer": "muon"}),
        (PruneMasksConfig, {"train_weights": "frozen"}, {"weight_decay": 0.1}),
        (PruneMasksConfig, {"loss": "ce"}, {"target": "tiny"}),
        (PruneMasksConfig, {}, {"patience": 2}),
        (PruneMasksConfig, {}, {"torch_compile": True}),
        (PruneMasksConfig, {"refit": False}, {"ridge": 0.1}),
    ],
)
def test_an_option_that_a_mode_does_not_read_is_refused(config, mode, option):
    config.build(SIZED | mode)
    with pytest.raises(UserError, match=config.flag(next(iter(option)))):
        config.build(SIZED | mode | option)


def test_prune_shows_few_options():
    shown = [f for f in PruneConfig.model_fields.values() if not f.json_schema_extra["advanced"]]
    assert len(shown) + len(["config", "force", "dry_run", "json"]) <= 14


def planned_gb(source, **settings) -> float:
    settings |= {"data": "stdlib", "device": "cpu", "dry_run": True, "out": "out"}
    outcome = prune(source=str(source), layers=12, width=2560, **settings)
    return float(re.search(r"[\d.]+", outcome.data["memory"])[0])


def test_a_plan_counts_float16_as_it_is_computed_on_a_cpu(tmp_path):
    gb = {}
    for dtype in ("float32", "float16", "bfloat16"):
        (tmp_path / dtype).mkdir()
        (tmp_path / dtype / "config.json").write_text(json.dumps(LLAMA_7B | {"dtype": dtype}))
        gb[dtype] = planned_gb(tmp_path / dtype)
    assert gb["float32"] == gb["float16"]
    if checkpoint.is_fast(torch.bfloat16, checkpoint.CPU):
        assert gb["float16"] > gb["bfloat16"] + 2
    else:
        assert gb["float16"] == gb["bfloat16"]
    assert planned_gb(tmp_path / "float16", depth="greedy") > 4 * 6.7 + gb["float16"] - 1  # all weights in memory


def test_a_plan_of_mask_training_counts_what_is_trained(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B | {"dtype": "bfloat16"}))
    plans = [
        prune_masks(
            source=str(tmp_path), layers=12, data="stdlib", device="cpu", dry_run=True, out="out", train_weights=weights
        ).data
        for weights in ("frozen", "full")
    ]
    assert [plan["training tokens"] for plan in plans] == ["2,457,600"] * 2
    frozen, full = (float(re.search(r"[\d.]+", plan["memory"])[0]) for plan in plans)
    assert full > frozen + 11 * 6.7
