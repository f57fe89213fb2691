"""DeepSpeed's ZeRO and FSDP under accelerate: their configuration, and their limits."""

from typing import Any

from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, parse_flag_from_env
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from draftlab.errors import UserError


def check(*, optimizer: str = "adamw", masks: bool = False) -> None:
    """Raises UserError: the launcher chose DeepSpeed or FSDP for what these cannot train."""
    chosen = next((name for name in ("DeepSpeed", "FSDP") if _chosen(name)), None)
    if chosen and optimizer == "muon":
        raise UserError(
            f"--optimizer muon is two optimizers, and {chosen} runs one; use --optimizer adamw, or DDP"
        )
    if chosen == "DeepSpeed" and masks:
        raise UserError(
            "masks are clamped in place, and DeepSpeed trains copies of them; launch with DDP or FSDP2"
        )


def new_accelerator(dtype: str, clip: float) -> Accelerator:
    """Return an accelerator that computes in dtype on fp32 weights.

    clip: largest gradient norm. DeepSpeed clips and counts by itself: its configuration is overwritten, so that the
    settings of the command alone decide a run.
    """
    if not _chosen("DeepSpeed"):
        # the loop accumulates, whatever the launcher says
        alone = GradientAccumulationPlugin(num_steps=1)
        return Accelerator(
            mixed_precision="bf16" if dtype == "bfloat16" else "no",
            gradient_accumulation_plugin=alone,
        )
    accelerator = Accelerator(mixed_precision="no")  # DeepSpeed's bf16 rounds the weights, too
    unset_hf_deepspeed_config()  # or transformers shards models that one process loads later
    plugin: Any = accelerator.deepspeed_plugin
    config: dict[str, Any] = plugin.deepspeed_config
    for name in ("optimizer", "scheduler"):
        config.pop(name, None)
    config |= {
        "train_micro_batch_size_per_gpu": 1,  # required, and decides nothing: the loop shares rows out
        "train_batch_size": accelerator.num_processes,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "torch_autocast": {"enabled": dtype == "bfloat16", "dtype": "bfloat16"},
    }
    # fp32 ones, too
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return accelerator


def _chosen(name: str) -> bool:
    """Return whether accelerate uses it; on CPUs it uses DDP alone."""
    return parse_flag_from_env(f"ACCELERATE_USE_{name.upper()}") and not parse_flag_from_env(
        "ACCELERATE_USE_CPU"
    )
