"""Muon in float32 takes torch's steps, and its state is torch's."""

import pytest
import torch

from draftlab.training.optimizers import Float32Muon, orthogonal

SHAPES = [(12, 40), (40, 12), (16, 16)]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan et al. 2024


def stepped(kind: type[torch.optim.Muon], steps: int):
    """Return weights before and after some steps on given gradients."""
    rng = torch.Generator().manual_seed(1)
    first = [torch.randn(shape, generator=rng) for shape in SHAPES]
    weights = [torch.nn.Parameter(weight.clone()) for weight in first]
    optimizer = kind(weights, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=rng)
        optimizer.step()
    return first, [weight.detach() for weight in weights]


def test_its_steps_are_torchs_but_for_the_rounding_to_bfloat16():
    start, ours = stepped(Float32Muon, 5)
    _, torchs = stepped(torch.optim.Muon, 5)
    for a, b, before in zip(ours, torchs, start, strict=True):
        # products of several sums, each rounded to 8 bits
        assert (a - b).norm() < 2**-5 * (b - before).norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_an_orthogonal_matrix_keeps_the_singular_vectors(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inside = u.T @ orthogonal(matrix, COEFFICIENTS, 5, 1e-7) @ v.T
    values = inside.diagonal()
    assert values.min() > 0.3
    assert values.max() < 1.3
    assert (inside - torch.diag(values)).abs().max() < 1e-4
