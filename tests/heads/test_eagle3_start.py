"""A head starts at the least squares of the target's next state, whatever its heads and sizes."""

from typing import Any

import pytest
import torch
from helpers.builders import assert_rounds
from torch import Tensor

from draftlab.heads.eagle3.layout import HeadShape
from draftlab.heads.eagle3.module import EagleHead
from draftlab.heads.eagle3.start import RIDGE, start_linear
from draftlab.heads.training import Sample

D, A, N, V = 24, 3, 400, 50
SIZES: dict[str, Any] = {
    "hidden": D,
    "ffn": 40,
    "eps": 1e-5,
    "context": 64,
    "rope": {"rope_type": "default", "rope_theta": 100.0},
    "vocab": V,
    "draft_vocab": 20,
    "target_hidden": D,
    "layer_ids": (1, 2, 4),
    "norm_before_residual": False,
}


def random(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def case() -> tuple[Tensor, Tensor, Sample]:
    """Return tokens [N], an embedding [V, D], and neighbours whose later state is linear in the first, with noise."""
    embedding, ids = random(V, D, seed=1), torch.arange(N) % V
    states = random(N, A * D, seed=2)
    now = states @ random(A * D, D, seed=3) * 0.1
    after = 0.3 * now + embedding[ids] @ random(D, D, seed=4) * 0.2 + 0.1 * random(N, D, seed=5)
    return ids, embedding, Sample(states, embedding[ids], now * 3 + 0.5, after * 3 + 0.5)


def least_squares(x: Tensor, y: Tensor) -> Tensor:
    """Return predictions, with the rows of the penalty written out."""
    size = (RIDGE * (x.double() ** 2).sum(0).mean()).sqrt()
    rows = torch.cat([x.double(), size * torch.eye(x.shape[1], dtype=torch.float64)])
    zeros = torch.zeros(x.shape[1], y.shape[1], dtype=torch.float64)
    return x.double() @ torch.linalg.lstsq(rows, torch.cat([y.double(), zeros])).solution


def normalised(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def started(heads: int, kv_heads: int, head_dim: int, embedding: Tensor, found: Sample, **variant: Any) -> EagleHead:
    torch.manual_seed(0)
    student = EagleHead(HeadShape(**SIZES | variant, heads=heads, kv_heads=kv_heads, head_dim=head_dim), embedding)
    start_linear(student, found)
    return student


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 6), (4, 2, 12), (6, 3, 4), (4, 4, 10)])
def test_the_first_step_is_least_squares_of_the_rank_that_the_values_have(case, heads, kv_heads, head_dim):
    """A text of one token attends to itself alone."""
    ids, embedding, found = case
    student = started(heads, kv_heads, head_dim, embedding, found)
    unit = found.now.pow(2).mean(0).sqrt()
    state = least_squares(found.states, found.now / unit)
    inputs = torch.cat([normalised(embedding[ids].double()), normalised(state)], -1)
    change = least_squares(inputs, found.after / unit - state)
    rank = min(D, kv_heads * head_dim)
    # the best of this rank (Eckart and Young)
    u, s, v = torch.linalg.svd(change, full_matrices=False)
    predicted = state + (u[:, :rank] * s[:rank]) @ v[:rank]
    with torch.no_grad():
        output = student(ids.unsqueeze(1), found.states.unsqueeze(1), 1)[0].squeeze(1)
    direction = normalised(predicted)
    weight = (direction * found.after).sum(0) / (direction**2).sum(0)
    assert_rounds(output.double(), direction * weight)


def test_attention_starts_at_the_own_position_wherever_it_is(case):
    ids, embedding, found = case
    student = started(2, 2, 12, embedding, found)
    with torch.no_grad():
        alone = student(ids.unsqueeze(1), found.states.unsqueeze(1), 1)[0].squeeze(1)
        text = student(ids[None, :30].roll(1, 1), found.states[None, :30], 1)[0][0]
        scrambled = student(ids[None, torch.randperm(30)], found.states[None, :30], 1)[0][0]
    error, control = ((output - alone[:30])[:29].norm() for output in (text, scrambled))
    assert error < 0.4 * control
