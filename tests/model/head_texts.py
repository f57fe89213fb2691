"""A text and random states of a target with 307 ids and hidden size 64, for tests of heads."""

import torch
from torch import Tensor

V, W, T = 307, 40, 12  # ids of the target, ids of the head, positions with states
LAYERS = [1, 2, 4]


def draft_ids() -> Tensor:
    """Return the ids that a head predicts, [W]."""
    return torch.randperm(V, generator=torch.Generator().manual_seed(1))[:W].sort().values


def random_text(tokens: int) -> tuple[Tensor, Tensor]:
    """Return ids [1, tokens], and states [1, T, A E] of the target."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 300, (1, tokens), generator=generator)
    return ids, torch.randn(1, T, len(LAYERS) * 64, generator=generator)
