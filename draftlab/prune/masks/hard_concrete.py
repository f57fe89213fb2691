"""Learned masks: Sheared-LLaMA's targeted structured pruning (Xia et al., 2310.06694), with heads by kv group.

L layers, D hidden, K kv heads, G query heads per kv head, F ffn. A family of masks is [rows, n]: each of its rows
ends with an exact number of entries that are not zero.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from draftlab.model.shape import Shape
from draftlab.prune.cut import Keep

FamilyName = Literal["hidden", "layers", "kv_heads", "heads", "ffn"]

# hard concrete (Louizos et al., 1712.01312): a sigmoid stretched to [LOW, HIGH] at temperature BETA, clipped to [0, 1]
LOW, HIGH, BETA = -0.1, 1.1, 2 / 3
EPSILON = 1e-6
BOUND = math.log(100)  # log-odds stay within +- this
WARM_UP = 0.2  # share of the steps in which the wanted sparsity rises to its end


class Family(NamedTuple):
    rows: int
    size: int
    target: int


@dataclass(frozen=True, slots=True)
class Values:
    """Mask values: hidden [D], layers [L], heads [L, H], ffn [L, F]; 1 where nothing is masked."""

    hidden: Tensor
    layers: Tensor
    heads: Tensor
    ffn: Tensor


def families(source: Shape, shape: Shape) -> dict[FamilyName, Family]:
    """The families in which something has to go. One kv mask stands over the masks of its group's query heads."""
    group, kept = source.heads // source.kv_heads, shape.heads // shape.kv_heads
    every: dict[FamilyName, Family] = {
        "hidden": Family(1, source.hidden, shape.hidden),
        "layers": Family(1, source.layers, shape.layers),
        "kv_heads": Family(source.layers, source.kv_heads, shape.kv_heads),
        "heads": Family(source.layers * source.kv_heads, group, kept),
        "ffn": Family(source.layers, source.ffn, shape.ffn),
    }
    return {name: family for name, family in every.items() if family.target < family.size}


class Masks(nn.Module):
    """Log-odds of every mask, and the Lagrange multipliers that hold each family to its target.

    A masked model reads ``values``, which ``draw`` sets anew for every forward pass: a sample while training, the
    deterministic masks otherwise.
    """

    def __init__(self, source: Shape, shape: Shape, seed: int) -> None:
        super().__init__()
        self.source, self.shape = source, shape
        self.families = families(source, shape)
        rng = torch.Generator().manual_seed(seed)
        start = {n: 5 + 0.01 * torch.randn(f.rows, f.size, generator=rng) for n, f in self.families.items()}
        self.log_odds = nn.ParameterDict({name: nn.Parameter(value) for name, value in start.items()})
        self.multipliers = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in self.families})
        self.progress = 1.0  # share of the run that is done
        self.values = self._joined({})

    def groups(self) -> list[dict[str, Any]]:
        """Descent on log-odds, ascent on multipliers, both at rate 1 (their published setting)."""
        same = {"lr": 1.0, "weight_decay": 0.0}
        return [
            {"params": list(self.log_odds.parameters()), **same},
            {"params": list(self.multipliers.parameters()), "maximize": True, **same},
        ]

    def draw(self) -> None:
        """Set values for one forward pass."""
        if self.training:
            with torch.no_grad():
                for log_odds in self.log_odds.values():
                    log_odds.clamp_(-BOUND, BOUND)
            self.values = self._joined({name: sample(self._odds(name)) for name in self.families})
        else:
            self.values = self.deterministic()

    def deterministic(self) -> Values:
        """Masks with exactly the target's counts: the smallest of each row are zero, the others stay soft."""
        found = {}
        for name, family in self.families.items():
            soft = torch.sigmoid(0.8 * self._odds(name).clamp(-BOUND, BOUND) / BETA)
            order = soft.argsort(descending=True, stable=True, dim=-1)[:, : family.target]
            kept = torch.zeros_like(soft).scatter(-1, order, 1.0)
            found[name] = soft * kept
        return self._joined(found)

    def penalty(self) -> Tensor:
        """Augmented Lagrangian, the sum over families of mean l1 (s - t) + l2 (s - t)^2, s expected sparsity."""
        total = torch.zeros((), device=next(iter(self.log_odds.values())).device)
        for name, gap in self._gaps(min(1.0, self.progress / WARM_UP)).items():
            linear, square = self.multipliers[name]
            total = total + (linear * gap + square * gap.square()).mean()
        return total

    def gaps(self) -> dict[str, float]:
        """How far each family's expected sparsity is from the target, the mean over its rows."""
        return {name: float(gap.detach().abs().mean()) for name, gap in self._gaps(1.0).items()}

    def keep(self) -> Keep:
        """What the deterministic masks leave."""
        values, group = self.deterministic(), self.source.heads // self.source.kv_heads
        layers = _alive(values.layers)
        heads = [_alive(values.heads[layer]) for layer in layers]
        return Keep(
            layers=layers,
            hidden=_alive(values.hidden),
            heads=heads,
            kv_heads=[sorted({head // group for head in row}) for row in heads],
            ffn=[_alive(values.ffn[layer]) for layer in layers],
        )

    def save(self, file: Path) -> None:
        """Log-odds and final values, to look at."""
        values = self.deterministic()
        tensors = {f"log_odds.{name}": p.detach() for name, p in self.log_odds.items()}
        tensors |= {f"value.{name}": getattr(values, name).detach() for name in Values.__slots__}
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, file)

    def _odds(self, name: str) -> Tensor:
        return cast(Tensor, self.log_odds[name])

    def _gaps(self, share: float) -> dict[str, Tensor]:
        """Expected less wanted sparsity of each row."""
        return {
            name: 1 - alive(self._odds(name)).mean(-1) - share * (1 - family.target / family.size)
            for name, family in self.families.items()
        }

    def _joined(self, found: dict[FamilyName, Tensor]) -> Values:
        s = self.source
        device = next((p.device for p in self.log_odds.values()), torch.device("cpu"))

        def of(name: FamilyName, *size: int) -> Tensor:
            return found[name].view(size) if name in found else torch.ones(size, device=device)

        hidden = of("hidden", s.hidden)
        if s.tied and "hidden" in found:  # a soft mask cannot be folded into a matrix that both embeds and predicts
            hidden = (hidden > 0).float() + (hidden - hidden.detach())
        by_group = of("heads", s.layers, s.kv_heads, s.heads // s.kv_heads)
        heads = of("kv_heads", s.layers, s.kv_heads, 1) * by_group
        return Values(hidden, of("layers", s.layers), heads.flatten(1), of("ffn", s.layers, s.ffn))


def sample(log_odds: Tensor) -> Tensor:
    """Hard concrete samples in [0, 1], by the global random state of the CPU."""
    u = torch.rand(log_odds.shape).clamp(EPSILON, 1 - EPSILON).to(log_odds.device)
    s = torch.sigmoid((u.log() - torch.log1p(-u) + log_odds) / BETA)
    return (s * (HIGH - LOW) + LOW).clamp(0, 1)


def alive(log_odds: Tensor) -> Tensor:
    """Chance that a sample is not zero."""
    clamped = log_odds.clamp(-BOUND, BOUND)
    return torch.sigmoid(clamped - BETA * math.log(-LOW / HIGH)).clamp(EPSILON, 1 - EPSILON)


def _alive(values: Tensor) -> list[int]:
    return values.detach().nonzero().flatten().tolist()
