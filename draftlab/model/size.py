"""Sizes of checkpoints of any architecture, and costs of training, to print in plans and model cards."""

from dataclasses import dataclass
from pathlib import Path

import torch

from draftlab.errors import OtherArchitecture, Quantised
from draftlab.model import checkpoint
from draftlab.model.hf_files import quantization_method
from draftlab.model.shape import Shape, format_count
from draftlab.quantities import format_bytes

# names in config.json for the number of routed experts
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApproximateSize:
    """The size of a model without a Shape: a model that is quantised or not LLaMA-like, or a head.

    Args:
        kind: Kind of model for messages, such as "awq llama".
        count: Number of parameters.
        active: Number of parameters that a token uses. In a mixture of experts it is smaller than count.
        stored_bytes: Size of quantised weights in bytes; None for unquantised weights.
    """

    kind: str
    count: int
    active: int
    layers: int
    hidden: int
    stored_bytes: int | None = None

    def describe(self) -> str:
        size = "" if self.stored_bytes is None else f", {format_bytes(self.stored_bytes)}"
        used = f", {format_count(self.active)} of them active" if self.active < self.count else ""
        return f"{self.kind}, {format_count(self.count)} parameters{used}{size}"

    def params(self) -> int:
        return self.count

    def weight_bytes(self, bytes_per_weight: int = 2) -> int:
        return self.count * bytes_per_weight if self.stored_bytes is None else self.stored_bytes

    def kv_bytes_per_token(self, bytes_per_value: float = 2) -> int:
        """Return an upper bound of the KV cache's bytes per token, as if each query head had a KV head of its own."""
        return int(2 * self.layers * self.hidden * bytes_per_value)

    def flops_per_token(self, context: int) -> int:
        """Return the number of operations to decode one token: 2 per active parameter. Attention is left out."""
        return 2 * self.active


def read_size(directory: Path) -> Shape | ApproximateSize:
    """Return the Shape of a checkpoint, or an ApproximateSize if it is quantised or not LLaMA-like.

    Raises:
        UserError: config or tensors cannot be read or contradict each other, or transformers cannot build the model.
    """
    try:
        return checkpoint.read_shape(directory)
    except (OtherArchitecture, Quantised):
        config = checkpoint.read_config(directory)
        method = quantization_method(config)
        plain = {name: value for name, value in config.items() if name != "quantization_config"}
        model = checkpoint.meta_model(plain, torch.float32)
        text = model.config.get_text_config()
        count = sum(p.numel() for p in model.parameters())
        routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        kind = " ".join(filter(None, (method, str(config.get("model_type")))))
        stored = sum(file.stat().st_size for file in directory.glob("*.safetensors")) if method else 0
        return ApproximateSize(
            kind=kind,
            count=count,
            active=count - int(routed * (1 - _used_experts(text))),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            stored_bytes=stored or None,
        )


def _used_experts(config: object) -> float:
    """Return the fraction of the routed experts that a token uses, or 1 for a model without experts."""
    counts = [getattr(config, name, None) for name in EXPERT_COUNTS]
    count = next((n for n in counts if n), None)
    used = getattr(config, "num_experts_per_tok", None)
    return used / count if count and used else 1.0


def training_cost(
    student: Shape | ApproximateSize,
    teacher: Shape | ApproximateSize | None,
    *,
    tokens: int,
    seq_len: int,
) -> dict[str, object]:
    """Return the tokens, floating-point operations, memory and disk space of a training run, to print in a plan.

    For each token, training takes 3 times the operations of the student's forward pass, plus the operations of the
    teacher's forward pass. The student has fp32 weights, gradients and two Adam moments. The teacher has its quantised
    weights, or weights in bf16. Memory includes a chunk of logits of about 130 MB, but no activations.
    """
    weights = 16 * student.params() + (teacher.weight_bytes() if teacher else 0)
    per_token = 3 * student.flops_per_token(seq_len // 2) + (teacher.flops_per_token(seq_len // 2) if teacher else 0)
    return {
        "tokens": f"{tokens:,}",
        "flops": tokens * per_token,
        "memory": f"about {format_bytes(weights + 1.3e8, 2)}, plus activations",
        "disk": f"{format_bytes(student.weight_bytes())}, and up to {format_bytes(12 * student.params())} more "
        "during the run",
    }
