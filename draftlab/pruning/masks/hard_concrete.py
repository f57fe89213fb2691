"""Learned masks: Sheared LLaMA's targeted structured pruning (Xia et al., 2310.06694), with heads by KV group.

L layers, D hidden, K kv heads, G query heads per kv head, H = K G, F ffn. The masks of a dimension are [rows, size]
(see MaskSize). After training, the deterministic masks have exactly `target` non-zero entries in each row.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from draftlab.model.shape import Shape
from draftlab.pruning.cut import Keep

Dimension = Literal["hidden", "layers", "kv_heads", "heads", "ffn"]

# hard concrete (Louizos et al., 1712.01312): a sigmoid at temperature BETA, stretched to [LOW, HIGH], clipped to [0, 1]
LOW = -0.1
HIGH = 1.1
BETA = 2 / 3
EPSILON = 1e-6
BOUND = math.log(100)  # log-odds stay within +- this
WARM_UP = 0.2  # share of the steps in which the target sparsity rises to its final value


class MaskSize(NamedTuple):
    rows: int
    size: int
    target: int


@dataclass(frozen=True, slots=True)
class Values:
    """Mask values. An entry with value 1 is not masked."""

    hidden: Tensor  # [D]
    layers: Tensor  # [L]
    heads: Tensor  # [L, H]
    ffn: Tensor  # [L, F]


def mask_sizes(source: Shape, shape: Shape) -> dict[Dimension, MaskSize]:
    """Return the sizes of the masks, for each dimension in which the shape is smaller than the source.

    The mask of a kv head multiplies the masks of its query heads.
    """
    group = source.heads // source.kv_heads
    target = shape.heads // shape.kv_heads
    sizes: dict[Dimension, MaskSize] = {
        "hidden": MaskSize(1, source.hidden, shape.hidden),
        "layers": MaskSize(1, source.layers, shape.layers),
        "kv_heads": MaskSize(source.layers, source.kv_heads, shape.kv_heads),
        "heads": MaskSize(source.layers * source.kv_heads, group, target),
        "ffn": MaskSize(source.layers, source.ffn, shape.ffn),
    }
    return {name: size for name, size in sizes.items() if size.target < size.size}


class Masks(nn.Module):
    """Trainable masks: log-odds of every mask, and Lagrange multipliers that bring each dimension to its target size.

    A masked model multiplies by `values`. `draw` sets `values` before every forward pass: to a sample in training, and
    to the deterministic masks otherwise.
    """

    def __init__(self, source: Shape, shape: Shape, seed: int) -> None:
        super().__init__()
        self.source = source
        self.shape = shape
        self.sizes = mask_sizes(source, shape)
        rng = torch.Generator().manual_seed(seed)
        start = {n: 5 + 0.01 * torch.randn(s.rows, s.size, generator=rng) for n, s in self.sizes.items()}
        self.log_odds = nn.ParameterDict(start)
        self.multipliers = nn.ParameterDict({name: torch.zeros(2) for name in self.sizes})
        self.progress = 1.0  # share of the run that is done
        self.values = self._values({})

    def groups(self) -> list[dict[str, Any]]:
        """Return AdamW's parameter groups, with the published rate of 1. Multipliers are trained by gradient ascent."""
        same = {"lr": 1.0, "weight_decay": 0.0}
        return [
            {"params": list(self.log_odds.parameters()), **same},
            {"params": list(self.multipliers.parameters()), "maximize": True, **same},
        ]

    def draw(self) -> None:
        """Set `values` for the next forward pass."""
        if not self.training:
            self.values = self.deterministic()
            return
        with torch.no_grad():
            for log_odds in self.log_odds.values():
                log_odds.clamp_(-BOUND, BOUND)
        self.values = self._values({name: sample(self._odds(name)) for name in self.sizes})

    def deterministic(self) -> Values:
        """Return masks without randomness, in which the smallest entries of each row are 0.

        Each row has as many non-zero entries as the target shape needs.
        """
        masks = {}
        for name, size in self.sizes.items():
            soft = torch.sigmoid(0.8 * clamped(self._odds(name), -BOUND, BOUND) / BETA)
            order = soft.argsort(descending=True, stable=True, dim=-1)[:, : size.target]
            masks[name] = soft * torch.zeros_like(soft).scatter(-1, order, 1.0)
        return self._values(masks)

    def penalty(self) -> Tensor:
        """Return the augmented Lagrangian, the sum over dimensions of the mean of l1 (s - t) + l2 (s - t)^2.

        s is the expected sparsity of a row of masks, t the target sparsity. l1 and l2 are the dimension's multipliers.
        """
        total = torch.zeros((), device=next(iter(self.log_odds.values())).device)
        for name, gap in self._gaps(min(1.0, self.progress / WARM_UP)).items():
            linear, square = self.multipliers[name]
            total = total + (linear * gap + square * gap.square()).mean()
        return total

    def gaps(self) -> dict[str, float]:
        """Return the mean absolute difference between expected and target sparsity, by dimension."""
        return {name: float(gap.detach().abs().mean()) for name, gap in self._gaps(1.0).items()}

    def keep(self) -> Keep:
        """Return the indices that the deterministic masks keep."""
        values = self.deterministic()
        group = self.source.heads // self.source.kv_heads
        layers = _nonzero(values.layers)
        heads = [_nonzero(values.heads[layer]) for layer in layers]
        return Keep(
            layers=layers,
            hidden=_nonzero(values.hidden),
            heads=heads,
            kv_heads=[sorted({head // group for head in row}) for row in heads],
            ffn=[_nonzero(values.ffn[layer]) for layer in layers],
        )

    def _odds(self, name: str) -> Tensor:
        return cast(Tensor, self.log_odds[name])

    def _gaps(self, share: float) -> dict[str, Tensor]:
        """Return expected minus target sparsity of each row, by dimension.

        share: Factor that multiplies the final target sparsity. It rises to 1 during the warm-up.
        """
        return {
            name: 1 - keep_probability(self._odds(name)).mean(-1) - share * (1 - size.target / size.size)
            for name, size in self.sizes.items()
        }

    def _values(self, masks: dict[Dimension, Tensor]) -> Values:
        s = self.source
        device = next((p.device for p in self.log_odds.values()), torch.device("cpu"))

        def shaped(name: Dimension, *size: int) -> Tensor:
            return masks[name].view(size) if name in masks else torch.ones(size, device=device)

        hidden = shaped("hidden", s.hidden)
        # a tied matrix both embeds and predicts, so soft masks cannot be folded into it
        if s.tied and "hidden" in masks:
            hidden = (hidden > 0).float() + (hidden - hidden.detach())
        by_group = shaped("heads", s.layers, s.kv_heads, s.heads // s.kv_heads)
        heads = shaped("kv_heads", s.layers, s.kv_heads, 1) * by_group
        return Values(hidden, shaped("layers", s.layers), heads.flatten(1), shaped("ffn", s.layers, s.ffn))


def sample(log_odds: Tensor) -> Tensor:
    """Return hard concrete samples in [0, 1], drawn from the CPU's global random state."""
    u = torch.rand(log_odds.shape).clamp(EPSILON, 1 - EPSILON).to(log_odds.device)
    s = torch.sigmoid((u.log() - torch.log1p(-u) + log_odds) / BETA)
    return clamped(s * (HIGH - LOW) + LOW, 0, 1)


def keep_probability(log_odds: Tensor) -> Tensor:
    """Return the probability that a sample is not zero."""
    within = clamped(log_odds, -BOUND, BOUND)
    return clamped(torch.sigmoid(within - BETA * math.log(-LOW / HIGH)), EPSILON, 1 - EPSILON)


def clamped(values: Tensor, low: float, high: float) -> Tensor:
    """Return the values, or the nearest bound of those outside. Values at a bound have a gradient.

    draw() puts log odds at a bound, which they must be able to leave. torch.clamp has a gradient there in torch 2.13,
    and none in torch 2.15.
    """
    inside = (values >= low) & (values <= high)
    return torch.where(inside, values, values.detach().clamp(low, high))


def _nonzero(values: Tensor) -> list[int]:
    return values.detach().nonzero().flatten().tolist()
