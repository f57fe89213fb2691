"""Sizes of checkpoints of any architecture, and costs of training, for plans and model cards."""

from dataclasses import dataclass
from pathlib import Path

import torch

from draftlab.errors import OtherArchitecture, Quantised
from draftlab.model import checkpoint
from draftlab.model.hf_files import quantization_method
from draftlab.model.shape import Shape, format_count


@dataclass(frozen=True, slots=True)
class ApproximateSize:
    """Sizes of a model that transformers runs, counted in the module that it builds. Some sizes are upper bounds.

    stored_bytes: Bytes of quantised weights, None for unquantised weights.
    """

    kind: str
    count: int
    layers: int
    hidden: int
    stored_bytes: int | None = None

    def describe(self) -> str:
        size = "" if self.stored_bytes is None else f", {self.stored_bytes / 1e9:.3g} GB"
        return f"{self.kind}, {format_count(self.count)} parameters{size}"

    def params(self) -> int:
        return self.count

    def weight_bytes(self, bytes_per_weight: int = 2) -> int:
        return self.count * bytes_per_weight if self.stored_bytes is None else self.stored_bytes

    def kv_bytes_per_token(self, bytes_per_value: float = 2) -> int:
        """Return an upper bound of the KV cache's bytes per token: the size without grouped heads."""
        return int(2 * self.layers * self.hidden * bytes_per_value)

    def flops_per_token(self, context: int) -> int:
        """Return two operations per parameter, an upper bound for a mixture of experts."""
        return 2 * self.count


def read_size(directory: Path) -> Shape | ApproximateSize:
    """Return the shape of a checkpoint, or its approximate size if it is quantised or not LLaMA-like.

    Raises:
        UserError: config or tensors cannot be read or contradict each other, or transformers cannot build the model.
    """
    try:
        return checkpoint.planned_shape(directory)
    except (OtherArchitecture, Quantised):
        config = checkpoint.read_config(directory)
        method = quantization_method(config)
        plain = {name: value for name, value in config.items() if name != "quantization_config"}
        model = checkpoint.meta_model(plain, torch.float32)
        text, count = model.config.get_text_config(), sum(p.numel() for p in model.parameters())
        kind = " ".join(filter(None, (method, str(config.get("model_type")))))
        stored = (
            sum(file.stat().st_size for file in directory.glob("*.safetensors")) if method else 0
        )
        return ApproximateSize(
            kind, count, text.num_hidden_layers, text.hidden_size, stored or None
        )


def training_cost(
    student: Shape | ApproximateSize,
    teacher: Shape | ApproximateSize | None,
    *,
    tokens: int,
    seq_len: int,
) -> dict[str, object]:
    """Return the tokens, floating-point operations, memory and disk of a training run, for a plan.

    Training takes 6 operations per student weight and token, and the teacher's pass 2. The student has fp32 weights,
    gradients and two Adam moments; the teacher is in bf16. Memory does not include activations, and logits are computed
    in chunks of about 100 MB.
    """
    weights = 16 * student.params() + (teacher.weight_bytes() if teacher else 0)
    per_token = 3 * student.flops_per_token(seq_len // 2) + (
        teacher.flops_per_token(seq_len // 2) if teacher else 0
    )
    return {
        "tokens": f"{tokens:,}",
        "flops": tokens * per_token,
        "memory": f"about {(weights + 1.3e8) / 1e9:.2g} GB and activations",
        "disk": f"{student.weight_bytes() / 1e6:,.4g} MB, and {12 * student.params() / 1e6:,.4g} MB while it runs",
    }
