"""Muon in float32 takes torch's steps, and its state is torch's."""

import pytest
import torch

from draftlab.training.optimizers import Float32Muon, orthogonal

SHAPES = [(12, 40), (40, 12), (16, 16)]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan et al. 2024


def stepped(
    kind: type[torch.optim.Muon], steps: int, state: dict | None = None, start: list | None = None
):
    """Weights after some steps on given gradients, and the optimizer."""
    rng = torch.Generator().manual_seed(1)
    first = [torch.randn(shape, generator=rng) for shape in SHAPES]
    weights = [torch.nn.Parameter((start or first)[i].clone()) for i in range(len(SHAPES))]
    optimizer = kind(weights, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    if state is not None:
        optimizer.load_state_dict(state)
    for step in range(steps):
        for i, weight in enumerate(weights):
            weight.grad = torch.randn(
                weight.shape, generator=torch.Generator().manual_seed(10 * step + i)
            )
        optimizer.step()
    return [weight.detach() for weight in weights], optimizer, first


def test_its_steps_are_torchs_but_for_the_rounding_to_bfloat16():
    ours, _, start = stepped(Float32Muon, 5)
    torchs, *_ = stepped(torch.optim.Muon, 5)
    for a, b, before in zip(ours, torchs, start, strict=True):
        # products of several sums, each rounded to 8 bits
        assert (a - b).norm() < 2**-5 * (b - before).norm()


def test_a_run_goes_on_with_either():
    whole, *_ = stepped(Float32Muon, 1)
    _, torchs, _ = stepped(torch.optim.Muon, 3)
    _, ours, _ = stepped(Float32Muon, 3)
    for a, b in zip(
        ours.state_dict()["state"].values(), torchs.state_dict()["state"].values(), strict=True
    ):
        assert a.keys() == b.keys()
        assert torch.equal(a["momentum_buffer"], b["momentum_buffer"])
    again, *_ = stepped(Float32Muon, 1, ours.state_dict())
    other, *_ = stepped(Float32Muon, 1, torchs.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again, other, strict=True))
    # the average counts
    assert not any(torch.equal(a, b) for a, b in zip(again, whole, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_an_orthogonal_matrix_keeps_the_singular_vectors(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inside = u.T @ orthogonal(matrix, COEFFICIENTS, 5, 1e-7) @ v.T
    values = inside.diagonal()
    assert values.min() > 0.3
    assert values.max() < 1.3
    assert (inside - torch.diag(values)).abs().max() < 1e-4
