"""P-EAGLE and DSpark heads in their layouts, and drafters with heads of random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from helpers.dflash_heads import LAYER, SPECULATORS
from helpers.drafter_laws import EAGLE, dflash_drafter, random_head
from helpers.head_texts import LAYERS, V, W, id_tensors, random_weights
from safetensors.torch import save_file

from draftlab.model import llama
from draftlab_research.dspark import DSpark, DSparkDrafter, DSparkShape
from draftlab_research.peagle import PEagle, PEagleDrafter, PEagleShape

MASK = 2
K = 4
PEAGLE: dict[str, Any] = {
    "architectures": ["PEagleSpeculator"],
    "speculators_model_type": "peagle",
    "draft_vocab_size": W,
    "eagle_aux_hidden_state_layer_ids": LAYERS,
    "mask_token_id": MASK,
    "norm_before_residual": True,
    "transformer_layer_config": LAYER | {"model_type": "llama", "head_dim": 8},
}
MARKOV: dict[str, Any] = {
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "sample_from_anchor": True,
}
DSPARK = SPECULATORS | {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    **MARKOV,
}


def written_peagle(folder: Path, target: Path, content: dict[str, Any]) -> Path:
    """Return a head of random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    layers = content.get("transformer_layer_config", content)
    shape = PEagleShape(
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


def peagle_drafter(target: llama.Llama) -> PEagleDrafter:
    """Return a P-EAGLE drafter with a head of two layers."""
    config = PEagleShape(**EAGLE, layers=2, mask_token_id=2)
    return PEagleDrafter(target, random_head(target, config, PEagle))


def dspark_drafter(target: llama.Llama, kind: str = "gated", least_confidence: float = 0) -> DSparkDrafter:
    """Return a drafter with the block of dflash_drafter, and random Markov and confidence heads."""
    head, generator = dflash_drafter(target).head, torch.Generator().manual_seed(6)
    markov = {"markov_rank": 8, "markov_kind": kind, "confidence": 64 + 8}
    config = DSparkShape.model_validate(head.config.model_dump() | markov)
    weights = {
        name: head.weights.get(name, torch.randn(size, generator=generator)) for name, size in config.sizes().items()
    }
    rope = 1 / 10000 ** (torch.arange(0, 12, 2) / 12), 1.0
    spark = DSpark(config, weights, head.embed, head.head, head.ids, rope)
    return DSparkDrafter(target, spark, least_confidence)
