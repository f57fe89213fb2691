"""Quantised checkpoints: how they are, and what transformers needs to run them. Torch only for these."""

from pathlib import Path
from typing import Any, cast

from draftlab.errors import Quantised, one_line
from draftlab.reading import reading


def is_quantised(config: dict[str, object]) -> bool:
    """Return whether transformers would load quantised weights; MLX's it cannot."""
    return config.get("quantization_config") is not None


def quantization_method(config: dict[str, object]) -> str | None:
    """Return how the weights are quantised, as awq, gptq, bitsandbytes, fp8 or mlx; None if they are not."""
    quantization = config.get("quantization_config") or config.get("quantization")  # the latter is MLX's
    default = "unnamed" if is_quantised(config) else "mlx"
    method = quantization.get("quant_method", default) if isinstance(quantization, dict) else quantization
    return None if method is None else one_line(method, 40)


def check_unquantised(directory: Path, config: dict[str, object]) -> None:
    """Raises UserError: the weights are quantised, which neither pruning nor the engine reads."""
    if (method := quantization_method(config)) is not None:
        raise Quantised(f"{directory} is quantised ({method}); name the checkpoint with unquantised weights")


def check_quantised_runs(directory: Path, config: dict[str, object]) -> None:
    """Raises UserError: quantised weights for which transformers lacks a GPU or a library."""
    import torch

    if not torch.cuda.is_available():
        raise Quantised(
            f"{directory} is quantised ({quantization_method(config)}), which runs on GPUs only, and here is none; "
            "serve it elsewhere (docs/servers.md), or name the checkpoint with unquantised weights"
        )
    check_quantizer(directory, config)


def check_quantizer(directory: Path, config: dict[str, object]) -> None:
    """Raises UserError: what transformers lacks to load quantised weights on a GPU, as a library."""
    from transformers.quantizers.auto import AutoHfQuantizer

    with reading(f"{directory} is quantised ({quantization_method(config)}) and cannot be loaded"):
        quantizer: Any = AutoHfQuantizer.from_config(cast(Any, config["quantization_config"]), pre_quantized=True)
        quantizer.validate_environment(device_map={"": "cuda"})
