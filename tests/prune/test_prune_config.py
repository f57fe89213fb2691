"""Each option of prune is read or refused; the plan is that of the dtype computed with."""

import json
import re

import torch
from errors import raises_option

from draftlab.commands.prune import prune
from draftlab.model import checkpoint
from draftlab.model.families import presets, shipped

LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008,
    "vocab_size": 32000, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


def test_without_a_network_the_paper_s_draft_is_planned_from_the_shipped_shape(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # an empty folder: the default source is huggyllama/llama-7b
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    planned = prune(layers=12, width=2560, dry_run=True).data
    assert presets(shipped("widths"))["llama-7b"].describe() in planned["source"]
    assert planned["source"]
    assert planned["draft"] == presets(shipped("widths"))["wide-1.3b"].describe()
    assert list(tmp_path.iterdir()) == []
    with raises_option("--source"):
        prune(layers=12, width=2560)
    with raises_option("--source"):
        prune(layers=12, source="nobody/other-7b", dry_run=True)


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
