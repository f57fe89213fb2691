"""LoRA through peft: small matrices beside frozen ones, merged when the model is written."""

from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel


def adapt(model: PreTrainedModel, rank: int) -> PreTrainedModel:
    """model with adapters of that rank on every matrix of its blocks; only they are trained."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return get_peft_model(model, config)  # type: ignore[return-value]  # a PeftModel runs like what it wraps


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """The plain model, adapters added into its weights; a model without any is returned as it is."""
    wrapped: Any = model
    return wrapped.merge_and_unload() if isinstance(wrapped, PeftModel) else model
