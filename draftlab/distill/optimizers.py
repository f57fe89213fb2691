"""AdamW, or Muon on matrices; and the dtype that they train in."""

from typing import Any, Literal

import torch
from torch import nn

OptimizerName = Literal["adamw", "muon"]


def optimizers_for(
    model: nn.Module, name: OptimizerName, lr: float, weight_decay: float, others: list[dict[str, Any]]
) -> list[torch.optim.Optimizer]:
    """AdamW on all; or Muon (Jordan et al. 2024) on the blocks' matrices and AdamW on the rest.

    others: groups of parameters with rates of their own, for AdamW. Muon's update is scaled to AdamW's size (Liu et al.
    2025), so that one learning rate serves both.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if p.ndim == 2 and ".layers." in name]
    ends = [p for name, p in named if p.ndim == 2 and ".layers." not in name]
    vectors = [p for _, p in named if p.ndim < 2]

    def adamw(decayed: list[nn.Parameter], kept: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
        return torch.optim.AdamW([g for g in [*groups, *others] if g["params"]], lr=lr, betas=(0.9, 0.95))

    if name == "adamw" or not named:
        return [adamw(matrices + ends, vectors)]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw([], ends + vectors)]


def training_dtype(name: str) -> str:
    """auto: bfloat16 where it is fast; a CPU without AVX-512 takes three times as long as in float32."""
    if name != "auto":
        return name
    return "bfloat16" if torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
