"""The checkpoint that a draft is cut from, as it is stored and as it is computed with."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from draftlab.model import checkpoint
from draftlab.model.shape import Shape
from draftlab.pruning.cut import Untied
from draftlab.pruning.trial_model import check_buildable, check_prunable
from draftlab.pruning.walk import Walk


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint to cut.

    With untied, the checkpoint ties its head to the embedding, and the shape and the draft have separate heads.
    """

    directory: Path
    shape: Shape
    device: torch.device
    untied: bool = False

    @cached_property
    def config(self) -> dict[str, object]:
        return checkpoint.read_config(self.directory) | (
            {"tie_word_embeddings": False} if self.untied else {}
        )

    @cached_property
    def stored_dtype(self) -> torch.dtype:
        return checkpoint.stored_dtype(self.directory)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights that are cut, and of the draft's passes: float32 where the CPU is slow at it."""
        return checkpoint.compute_dtype(self.directory, self.device)

    @cached_property
    def planned_dtype(self) -> torch.dtype:
        """The dtype that config.json announces, before any weight is read."""
        stored = str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32")
        return checkpoint.computed_dtype(checkpoint.resolve_dtype(stored, self.device), self.device)

    @cached_property
    def pass_dtype(self) -> torch.dtype:
        """The dtype of the source's own passes: bfloat16 for float16 weights on a CPU where that is fast.

        These passes only calibrate; no weight of the draft is rounded to bfloat16.
        """
        slow = self.dtype != self.stored_dtype and self.device.type == "cpu"
        return (
            torch.bfloat16
            if slow and checkpoint.is_fast(torch.bfloat16, self.device)
            else self.dtype
        )

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        return self.with_head(checkpoint.Weights(self.directory, self.dtype))

    def with_head(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return weights of the checkpoint's shape with the head that the draft is cut from."""
        return (
            Untied(weights, self.shape)
            if self.untied and "lm_head.weight" not in weights
            else weights
        )

    def walk(self) -> Walk:
        return Walk(self.weights, self.config, self.pass_dtype, self.device)

    def config_for(self, shape: Shape, layers: list[int] | None = None) -> dict[str, object]:
        """Return config.json of a draft of that shape which keeps these layers, or the first layers."""
        return checkpoint.config_for(shape, self.config, layers or list(range(shape.layers)))


def check_cut(config: dict[str, object], have: Shape, shape: Shape) -> None:
    """Refuse a source or a shape that transformers builds otherwise than the axis table says.

    Raises:
        UserError: names the tensor or the size.
    """
    check_prunable(config, have)
    check_buildable(checkpoint.config_for(shape, config, list(range(shape.layers))), shape)


def kv_saving(have: Shape, shape: Shape) -> str:
    saved = 1 - shape.kv_bytes_per_token() / have.kv_bytes_per_token()
    return f"KV cache {shape.kv_bytes_per_token() / 1024:.3g} KiB per token in bf16 ({saved:.1%} less than the source)"
