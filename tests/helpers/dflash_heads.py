"""DFlash heads in their two layouts."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from draftlab.heads.dflash import decoder, layout
from draftlab.model import checkpoint
from helpers.head_texts import LAYERS, V, W, id_tensors, random_weights

BLOCK = 5
LAYER: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": V,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "draft_vocab_size": W,
    "block_size": BLOCK,
    "aux_hidden_state_layer_ids": LAYERS,
    "mask_token_id": 2,
    "transformer_layer_config": LAYER,
    "sliding_window_non_causal": False,
    "sample_from_anchor": False,
}
NATIVE = LAYER | {
    "architectures": ["DFlashDraftModel"],
    "block_size": BLOCK,
    "draft_vocab_size": W,
    "dflash_config": {"mask_token_id": 2, "target_layer_ids": [i - 1 for i in LAYERS]},
}


def written(folder: Path, target: Path, content: dict[str, Any], kind: Any = layout) -> Path:
    """Return a head of random weights. kind: The module that checks such heads."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    sizes = kind.check(folder, target).sizes() | {"lm_head.weight": (W, 64)}
    save_file(random_weights(sizes) | id_tensors(), folder / "model.safetensors")
    return folder


def loaded(folder: Path, target: Path, kind: Any = decoder) -> Any:
    weights = checkpoint.Weights(target)
    return kind.load(folder, target, weights["model.embed_tokens.weight"], weights["lm_head.weight"])
