"""Fused is naive: values, gradients and what is watched, for every chunking, loss, temperature and kind of teacher."""

import math

import pytest
import torch
from torch import Tensor

from draftlab.distill.fused import Dense, Sums, Teacher, TopK, fused_loss
from draftlab.distill.losses import acceptance, log_probs, parse_loss

N, D, V = 13, 6, 31
LOSSES = ["ce", "fkl", "rkl", "jsd(0.3)", "tvd", "nla", "lk(3)", "0.7*fkl + 0.3*ce"]


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng, dtype=torch.float64).to(dtype)

    return {
        "hidden": draw(N, D).requires_grad_(),
        "head": draw(V, D).requires_grad_(),
        "teacher_hidden": draw(N, 5),
        "teacher_head": draw(V, 5),
        "labels": torch.randint(0, V, (N,), generator=rng),
        "weights": torch.rand(N, generator=rng, dtype=torch.float64).to(dtype),
    }


def naive(x: dict[str, Tensor], name: str, temperature: float) -> dict[str, Tensor]:
    loss = parse_loss(name)
    z, y = x["hidden"] @ x["head"].T, x["teacher_hidden"] @ x["teacher_head"].T
    log_p, log_q = log_probs(y, temperature), log_probs(z, temperature)
    ce = torch.nn.functional.cross_entropy(z, x["labels"], reduction="none")
    value = loss.value(log_p, log_q) + loss.cross_entropy * ce
    watched = {
        "objective": value,
        "cross_entropy": ce,
        "acceptance": acceptance(log_p, log_q),
        "agreement": (log_p.argmax(-1) == log_q.argmax(-1)).to(z),
    }
    return {key: (x["weights"] * tensor).sum() for key, tensor in watched.items()}


def fused(x: dict[str, Tensor], name: str, temperature: float, chunk: int, teacher: Teacher) -> Sums:
    budget = 4 * 10 * V * chunk
    return fused_loss(x["hidden"], x["head"], x["labels"], x["weights"], teacher, parse_loss(name), temperature, budget)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("chunk", [1, 5, N, 100])
def test_fused_is_naive_in_fp64(name, temperature, chunk):
    x = inputs()
    wanted = naive(x, name, temperature)
    gradients = torch.autograd.grad(2.5 * wanted["objective"], [x["hidden"], x["head"]])
    found = fused(x, name, temperature, chunk, Dense(x["teacher_hidden"], x["teacher_head"]))
    for key in ("objective", "cross_entropy") if name == "ce" else wanted:
        torch.testing.assert_close(getattr(found, key).double(), wanted[key].detach(), atol=1e-10, rtol=1e-10)
    for there, here in zip(
        torch.autograd.grad(2.5 * found.objective, [x["hidden"], x["head"]]), gradients, strict=True
    ):
        torch.testing.assert_close(there, here, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", LOSSES)
def test_fused_is_naive_in_fp32(name):
    x = inputs(torch.float32)
    wanted = naive(x, name, 1.0)
    gradients = torch.autograd.grad(wanted["objective"], [x["hidden"], x["head"]])
    found = fused(x, name, 1.0, 4, Dense(x["teacher_hidden"], x["teacher_head"]))
    assert float(found.objective.detach()) == pytest.approx(float(wanted["objective"].detach()), rel=2e-6)
    for there, here in zip(torch.autograd.grad(found.objective, [x["hidden"], x["head"]]), gradients, strict=True):
        assert float((there - here).abs().max() / here.abs().max()) < 5e-5


@pytest.mark.parametrize("name", ["fkl", "rkl", "jsd(0.3)", "nla"])
def test_gradcheck(name):
    x = inputs()
    teacher = Dense(x["teacher_hidden"], x["teacher_head"])
    assert torch.autograd.gradcheck(
        lambda h, w: fused(x | {"hidden": h, "head": w}, name, 1.3, 4, teacher).objective, (x["hidden"], x["head"])
    )


def test_logits_and_a_frozen_head_work_too():
    x = inputs()
    teacher = Dense(x["teacher_hidden"] @ x["teacher_head"].T, None)
    z = (x["hidden"] @ x["head"].T).detach().requires_grad_()
    loss = parse_loss("jsd(0.3)")
    found = fused_loss(z, None, x["labels"], x["weights"], teacher, loss, 1.0, 4 * 10 * V * 3)
    wanted = naive(x, "jsd(0.3)", 1.0)["objective"]
    torch.testing.assert_close(found.objective, wanted)
    (d_z,) = torch.autograd.grad(found.objective, z)
    (d_hidden,) = torch.autograd.grad(wanted, x["hidden"])
    torch.testing.assert_close(d_z @ x["head"], d_hidden)
    x["head"].requires_grad_(False)
    frozen = fused(x, "jsd(0.3)", 1.0, 4, Dense(x["teacher_hidden"], x["teacher_head"]))
    torch.testing.assert_close(torch.autograd.grad(frozen.objective, x["hidden"])[0], d_hidden)


def top_k(x: dict[str, Tensor], k: int, temperature: float) -> TopK:
    log_p = log_probs(x["teacher_hidden"] @ x["teacher_head"].T, temperature)
    values, ids = log_p.topk(k)
    rest = log_p.scatter(1, ids, -torch.inf).logsumexp(-1).clamp_min(-80)
    return TopK(ids, values, rest)


@pytest.mark.parametrize("name", LOSSES)
def test_all_tokens_listed_is_the_whole_distribution(name):
    x = inputs()
    whole = fused(x, name, 1.0, 4, Dense(x["teacher_hidden"], x["teacher_head"]))
    listed = fused(x, name, 1.0, 4, top_k(x, V, 1.0))
    for key in ("objective", "cross_entropy", "acceptance", "agreement"):
        torch.testing.assert_close(getattr(listed, key), getattr(whole, key), atol=1e-8, rtol=1e-8)
    gradients = [torch.autograd.grad(s.objective, [x["hidden"], x["head"]]) for s in (listed, whole)]
    for there, here in zip(*gradients, strict=True):
        torch.testing.assert_close(there, here, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("k", [1, 4, 12])
def test_a_listed_teacher_has_autograds_gradient_and_bounds_the_whole_one(name, k):
    x = inputs()
    teacher = top_k(x, k, 1.0)
    found = fused(x, name, 1.0, 4, teacher)
    log_q = log_probs(x["hidden"] @ x["head"].T, 1.0)
    rest = log_q.scatter(1, teacher.ids, -torch.inf).logsumexp(-1, keepdim=True)
    atoms = torch.cat([log_q.gather(1, teacher.ids), rest], 1)
    log_p = torch.cat([teacher.log_p, teacher.tail[:, None]], 1)
    loss = parse_loss(name)
    ce = -log_q.gather(1, x["labels"][:, None]).squeeze(1)
    value = (x["weights"] * (loss.value(log_p, atoms) + loss.cross_entropy * ce)).sum()
    torch.testing.assert_close(found.objective, value)
    for there, here in zip(
        torch.autograd.grad(found.objective, [x["hidden"], x["head"]]),
        torch.autograd.grad(value, [x["hidden"], x["head"]]),
        strict=True,
    ):
        torch.testing.assert_close(there, here, atol=1e-9, rtol=1e-9)
    whole = naive(x, name, 1.0)
    if name != "lk(3)":  # a mixture whose shares change with the atoms
        assert float(found.objective.detach()) <= float(whole["objective"].detach()) + 1e-9
    low = float(found.acceptance)
    assert low - 1e-9 <= float(whole["acceptance"].detach()) <= low + float(found.slack) + 1e-9 or name == "ce"


def test_no_gradient_reaches_the_teacher_and_none_is_made_without_need():
    x = inputs()
    x["teacher_hidden"].requires_grad_()
    found = fused(x, "fkl", 1.0, 4, Dense(x["teacher_hidden"], x["teacher_head"]))
    with pytest.raises(RuntimeError):
        torch.autograd.grad(found.objective, x["teacher_hidden"])
    with torch.no_grad():
        assert not fused(x, "fkl", 1.0, 4, Dense(x["teacher_hidden"], x["teacher_head"])).objective.requires_grad


@pytest.mark.parametrize("name", LOSSES)
def test_far_apart_teachers_give_finite_values_and_gradients(name):
    x = inputs(torch.float32)
    x["hidden"] = (x["hidden"].detach() * 100).requires_grad_()
    for teacher in (Dense(x["teacher_hidden"] * 100, x["teacher_head"]), top_k(x, 3, 0.01)):
        found = fused(x, name, 1.0, 4, teacher)
        assert math.isfinite(float(found.objective.detach()))
        assert torch.isfinite(torch.autograd.grad(found.objective, x["hidden"])[0]).all()


def test_no_token_at_all_is_no_loss():
    x = inputs()
    empty = {
        key: tensor[:0] if key in ("hidden", "labels", "weights", "teacher_hidden") else tensor
        for key, tensor in x.items()
    }
    found = fused(empty, "fkl", 1.0, 4, Dense(empty["teacher_hidden"], x["teacher_head"]))
    assert float(found.objective.detach()) == 0
    found.objective.backward()
    assert x["head"].grad.abs().max() == 0
