"""LoRA with peft; adapters are merged when the model is written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from draftlab.model import checkpoint, saving


def adapt(model: PreTrainedModel, rank: int, seed: int) -> PreTrainedModel:
    """Return the model with adapters on every matrix of its blocks; only they are trained."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # a PeftModel runs like the model in it
        return cast(PreTrainedModel, get_peft_model(model, config))


def merged_weights(source: Path, rank: int, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of source with trained adapters merged into them, fp32."""
    model: Any = adapt(checkpoint.load_model(source, torch.float32), rank, seed=0)
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if adapters.keys() != trained.keys():
        raise ValueError(
            f"adapters of rank {rank} on {source} have other names than the trained ones"
        )
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.copy_(trained[name])
    return dict(saving.model_weights(model.merge_and_unload(), torch.float32))
