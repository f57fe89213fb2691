"""Divergences keep their bounds and digits; test_trimmed_training.py has their definitions."""

import pytest
import torch
from helpers.builders import assert_rounds
from torch import Tensor

from draftlab.training.losses import Loss, Pair, log_probs, parse_loss

EVERY = ["fkl", "rkl", "jsd(0.3)", "tvd", "nla", "lk(3)"]


def value(name: str, log_p: Tensor, log_q: Tensor) -> Tensor:
    return parse_loss(name).divergence(Pair.of(log_p, log_q))[0]


@pytest.mark.parametrize("name", ["fkl", "rkl", "jsd(0.5)"])
def test_never_negative_in_fp32_when_p_and_q_nearly_agree(name):
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(64, 5000, generator=rng) * 3
    log_p, log_q = log_probs(z + 1e-3 * torch.randn(z.shape, generator=rng), 1.0), log_probs(z, 1.0)
    exact = value(name, *(torch.log_softmax(x.double(), -1) for x in (log_p, log_q)))
    found = value(name, log_p, log_q)
    assert (found >= 0).all()
    # a loss is a mean of log p - log q, which is about 1e-3
    assert_rounds(found, exact, 1, magnitude=1e-3)
    if name == "fkl":
        textbook = (log_p.exp() * (log_p - log_q)).sum(-1)
        assert ((textbook - exact) / exact).abs().median() > 0.05


@pytest.mark.parametrize("name", EVERY)
def test_what_underflows_in_fp32_still_counts(name):
    """Half of q where p is 1e-87: of KL(p || q) = ln 2, the terms there make a half."""
    logits = (
        torch.tensor([[0.0, -200.0, -2.0]], dtype=torch.float64),
        torch.tensor([[0.0, 0.0, -150.0]]).double(),
    )
    exact = value(name, *(log_probs(x, 1.0) for x in logits))
    assert_rounds(value(name, *(log_probs(x.float(), 1.0) for x in logits)).double(), exact)


@pytest.mark.parametrize("name", EVERY)
def test_equal_distributions_have_no_loss_and_no_gradient(name):
    logits = torch.randn(7, 23, generator=torch.Generator().manual_seed(5)).double()
    log_p = torch.log_softmax(2 * logits, -1)
    log_p = torch.cat([log_p, torch.full((7, 2), -200.0).to(log_p)], 1)  # padded vocabulary
    loss, found = parse_loss(name).divergence(Pair.of(log_p, log_p))
    assert loss.abs().max() < 1e-12
    assert (found - log_p.exp() * found.sum(-1, keepdim=True)).abs().max() < 1e-12


def test_phases_follow_each_other():
    loss = parse_loss("fkl@0.3 -> 0.5*tvd + 0.5*ce@0.6 -> lk(3)")
    assert [loss.at(x).name for x in (0.0, 0.29, 0.3, 0.5, 0.6, 1.0)] == [
        "fkl",
        "fkl",
        "0.5*tvd + 0.5*ce",
        "0.5*tvd + 0.5*ce",
        "lk(3)",
        "lk(3)",
    ]
    assert parse_loss("fkl -> tvd").at(0.2).name == "tvd"
    assert parse_loss("fkl -> tvd").at(0.19).name == "fkl"
    assert loss.at(0.4).cross_entropy == 0.5
    assert isinstance(loss, Loss)
    assert loss.needs_teacher
    assert not parse_loss("ce").needs_teacher
    assert parse_loss("ce -> tvd").needs_teacher
