"""P-EAGLE heads in their layout."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from draftlab.model import peagle
from helpers.dflash_heads import LAYER
from helpers.head_texts import LAYERS, V, W, id_tensors, random_weights

MASK, K = 2, 4
PEAGLE: dict[str, Any] = {
    "architectures": ["PEagleSpeculator"],
    "speculators_model_type": "peagle",
    "draft_vocab_size": W,
    "eagle_aux_hidden_state_layer_ids": LAYERS,
    "mask_token_id": MASK,
    "norm_before_residual": True,
    "transformer_layer_config": LAYER | {"model_type": "llama", "head_dim": 8},
}


def written(folder: Path, target: Path, content: dict[str, Any]) -> Path:
    """Return a head of random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    layers = content.get("transformer_layer_config", content)
    shape = peagle.PEagleShape(
        hidden=64,
        heads=8,
        kv_heads=4,
        head_dim=8,
        ffn=88,
        eps=1e-6,
        context=256,
        rope={},
        vocab=V,
        draft_vocab=W,
        target_hidden=64,
        layer_ids=tuple(LAYERS),
        norm_before_residual=True,
        layers=2,
        mask_token_id=MASK,
        norm_before_fc=content.get("norm_before_fc", False),
        fc_norm=content.get("fc_norm", False),
        qk_norm=layers["model_type"] == "qwen3",
    )
    save_file(random_weights(shape.sizes()) | id_tensors(), folder / "model.safetensors")
    return folder
