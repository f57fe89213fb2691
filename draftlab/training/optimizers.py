"""The optimizers of a training run (AdamW, or Muon together with AdamW), and the dtype to train in."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from draftlab.model import devices
from draftlab.model.devices import symmetric_product
from draftlab.training.loop import Loop


def optimizers_for(
    model: nn.Module, loop: Loop, other_groups: list[dict[str, Any]], shares: Mapping[str, float]
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a model: AdamW alone, or Muon for matrices of layers and AdamW for other weights.

    The update of Muon (Jordan et al. 2024) is scaled to the size of AdamW's update (Liu et al. 2025), so both
    optimizers use the same learning rate.

    Args:
        other_groups: Further parameter groups for AdamW, with their own learning rates.
        shares: Factors of the learning rate for some parameters, by name. AdamW trains these parameters.
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if name in shares:
            other_groups = [*other_groups, {"params": [p], "lr": shares[name] * loop.lr}]
        elif p.ndim < 2:
            vectors.append(p)
        # matches model.layers.3.mlp, transformer.h.3.attn, and fc of an EAGLE-3 head
        elif p.ndim == 2 and re.search(r"\.\d+\.|^fc\.", name):
            matrices.append(p)
        else:
            others.append(p)

    def adamw(decayed: list[nn.Parameter], undecayed: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [
            {"params": decayed, "weight_decay": loop.weight_decay},
            {"params": undecayed, "weight_decay": 0.0},
            *other_groups,
        ]
        used = [group for group in groups if group["params"]]
        # torch's default on a CPU reads and writes each weight about ten times, and takes 8 times as long
        # weights on the device meta have no values yet
        fused = all(each.device.type in ("cpu", "cuda") for group in used for each in group["params"])
        return torch.optim.AdamW(used, lr=loop.lr, betas=(0.9, 0.95), fused=fused)

    if loop.optimizer == "adamw" or not matrices:
        return [adamw(matrices + others, vectors)]
    kind = torch.optim.Muon if devices.is_fast(torch.bfloat16, matrices[0].device) else Float32Muon
    muon = kind(matrices, lr=loop.lr, weight_decay=loop.weight_decay, adjust_lr_fn="match_rms_adamw")
    rest = others + vectors  # may be empty, if LoRA trains only adapters
    return [muon, adamw([], rest)] if rest or other_groups else [muon]


class Float32Muon(torch.optim.Muon):
    """torch's Muon with Newton-Schulz iterations in float32, for CPUs on which bfloat16 is slow.

    Both classes have the same optimizer state, so training may resume with either class.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            weights: list[torch.Tensor] = []
            grads: list[torch.Tensor] = []
            averages: list[torch.Tensor] = []
            self._init_group(group, weights, grads, averages)
            for weight, grad, average in zip(weights, grads, averages, strict=True):
                average.lerp_(grad, 1 - group["momentum"])
                update = grad.lerp(average, group["momentum"]) if group["nesterov"] else average
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                update = orthogonal(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                # the scale that torch's Muon calls match_rms_adamw
                weight.add_(update, alpha=-0.2 * group["lr"] * max(weight.shape) ** 0.5)


def orthogonal(matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    """Return a matrix with the singular vectors of `matrix`, and with singular values near 1.

    It is computed by Newton-Schulz iterations in float32 (Jordan et al. 2024). An iteration multiplies X, [N, M], by
    P = a I + b G + c G G, with G = X X'. The next G is then P G P, so X itself is multiplied only once, by the product
    of all P. All these matrices are polynomials of the first G. Their products are therefore symmetric.

    steps: Number of iterations, at least 1.
    """
    a, b, c = coefficients
    x = matrix.float() if matrix.shape[0] <= matrix.shape[1] else matrix.float().T
    x = x / x.norm().clamp(min=eps)
    gram = symmetric_product(x, x.T)  # [N, N]
    product = None
    for step in range(1, steps + 1):
        factor = (b * gram).add_(symmetric_product(gram, gram), alpha=c)
        factor.diagonal().add_(a)
        product = factor if product is None else symmetric_product(factor, product)
        if step < steps:
            gram = symmetric_product(symmetric_product(factor, gram), factor)
    assert product is not None
    x = product @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def training_dtype(name: str) -> torch.dtype:
    """Return the dtype to train in. "auto" means bfloat16 where that is fast, and otherwise float32."""
    if name != "auto":
        return devices.DTYPES[name]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.bfloat16 if devices.is_fast(torch.bfloat16, device) else torch.float32
