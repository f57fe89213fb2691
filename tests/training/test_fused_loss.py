"""Fused is naive: values, gradients and what is watched, for every chunking, loss, temperature and kind of teacher."""

import math

import pytest
import torch
from helpers.builders import assert_rounds
from helpers.loss_inputs import ALL, LOSSES, N, V, budget, inputs, same, top_k, whole
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftlab.training.fused_loss import Dense, Sums, Teacher, fused_loss
from draftlab.training.losses import Pair, log_probs, parse_loss, wide


def objective(name: str, pair: Pair, ce: Tensor) -> Tensor:
    """Return the objective over every token."""
    loss = parse_loss(name)
    return (loss.divergence(pair)[0] if loss.terms else 0) + loss.cross_entropy * ce


def naive(x: dict[str, Tensor], name: str, temperature: float) -> dict[str, Tensor]:
    """Return the values of every token, and their weighted sums under the names of Sums."""
    z, y = x["hidden"] @ x["head"].T, x["teacher_hidden"] @ x["teacher_head"].T
    pair = Pair.of(log_probs(y, temperature), log_probs(z, temperature))
    ce = torch.nn.functional.cross_entropy(wide(z), x["labels"], reduction="none")
    watched = {
        "objective": objective(name, pair, ce),
        "cross_entropy": ce,
        "acceptance": pair.alpha,
        "agreement": (y.argmax(-1) == z.argmax(-1)).to(ce),
    }
    return {"each": watched["objective"]} | {key: (x["weights"] * tensor).sum() for key, tensor in watched.items()}


def fused(x: dict[str, Tensor], name: str, temperature: float, chunk: int, teacher: Teacher | None) -> Sums:
    given = [x[key] for key in ("hidden", "head", "labels", "weights")]
    return fused_loss(*given, teacher, parse_loss(name), temperature, budget(x, chunk))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("chunk", [1, 5, N, 100])
def test_fused_is_naive_in_fp64(name, temperature, chunk):
    x = inputs()
    found = fused(x, name, temperature, chunk, whole(x))
    same(found, naive(x, name, temperature), x, ALL[:2] if name == "ce" else ALL)


@pytest.mark.parametrize("name", LOSSES)
def test_a_vocabulary_that_is_worked_through_in_blocks_and_slices_changes_nothing(name):
    x = inputs(vocab=30_000)
    same(fused(x, name, 1.3, 5, whole(x)), naive(x, name, 1.3), x, ALL[:2] if name == "ce" else ALL)


def test_a_second_backward_pass_is_refused():
    x = inputs()
    objective = fused(x, "fkl", 1.0, 4, whole(x)).objective
    objective.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        objective.backward()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("autocast", [True, False])
def test_heads_in_bf16_are_naive_in_bf16(name, autocast):
    x = inputs(torch.float32, vocab=5000)
    x |= {key: x[key].bfloat16() for key in ("teacher_hidden", "teacher_head")}
    if not autocast:
        x |= {key: x[key].detach().bfloat16().requires_grad_() for key in ("hidden", "head")}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        wanted, found = naive(x, name, 1.0), fused(x, name, 1.0, 4, whole(x))
    assert found.objective.dtype == torch.float32
    assert_rounds(found.objective, wanted["objective"].float())
    gradients = [torch.autograd.grad(o, [x["hidden"], x["head"]]) for o in (found.objective, wanted["objective"])]
    for there, here in zip(*gradients, strict=True):
        assert there.dtype == here.dtype
        assert float((there - here).norm() / here.norm()) < 1e-2


def test_cross_entropy_needs_no_teacher():
    x = inputs()
    same(fused(x, "ce", 1.0, 4, None), naive(x, "ce", 1.0), x, ALL[:2])


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
    frozen = fused(x, "jsd(0.3)", 1.0, 4, whole(x))
    torch.testing.assert_close(torch.autograd.grad(frozen.objective, x["hidden"])[0], d_hidden)


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
    ce = -log_q.gather(1, x["labels"][:, None]).squeeze(1)
    value = (x["weights"] * objective(name, Pair.of(log_p, atoms), ce)).sum()
    torch.testing.assert_close(found.objective, value)
    for there, here in zip(
        torch.autograd.grad(found.objective, [x["hidden"], x["head"]]),
        torch.autograd.grad(value, [x["hidden"], x["head"]]),
        strict=True,
    ):
        torch.testing.assert_close(there, here, atol=1e-9, rtol=1e-9)
    dense = naive(x, name, 1.0)
    if name != "lk(3)":  # a mixture whose shares change with the atoms
        assert float(found.objective.detach()) <= float(dense["objective"].detach()) + 1e-9
    low = float(found.acceptance)
    assert low - 1e-9 <= float(dense["acceptance"].detach()) <= low + float(found.slack) + 1e-9 or name == "ce"


def test_no_gradient_reaches_the_teacher_and_none_is_made_without_need():
    x = inputs()
    x["teacher_hidden"].requires_grad_()
    found = fused(x, "fkl", 1.0, 4, whole(x))
    with pytest.raises(RuntimeError):
        torch.autograd.grad(found.objective, x["teacher_hidden"])
    with torch.no_grad():
        assert not fused(x, "fkl", 1.0, 4, whole(x)).objective.requires_grad


@pytest.mark.parametrize("name", LOSSES)
def test_far_apart_teachers_give_finite_values_and_gradients(name):
    x = inputs(torch.float32)
    x["hidden"] = (x["hidden"].detach() * 100).requires_grad_()
    for teacher in (Dense(x["teacher_hidden"] * 100, x["teacher_head"]), top_k(x, 3, 0.01)):
        found = fused(x, name, 1.0, 4, teacher)
        assert math.isfinite(float(found.objective.detach()))
        assert torch.isfinite(torch.autograd.grad(found.objective, x["hidden"])[0]).all()


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation makes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.nbytes for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.bytes = max([self.bytes, *sizes])
        return made


@pytest.mark.parametrize("kind", ["whole", "listed"])
def test_no_tensor_has_the_logits_of_all_tokens(kind):
    x = inputs(torch.float32, 3000, 128)
    teacher = whole(x) if kind == "whole" else top_k(x, 4, 1.0)
    with Largest() as ours:
        fused(x, "fkl", 1.0, 16, teacher)
    with Largest() as theirs:
        naive(x, "fkl", 1.0)
    assert ours.bytes <= 16 * 3000 * 4 * 2 < 128 * 3000 * 4 <= theirs.bytes


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


@pytest.mark.parametrize("k", [0, 5])
def test_cross_entropy_beside_a_teacher_reports_what_a_divergence_reports(k):
    """A schedule that begins with cross-entropy is watched all the way."""
    x = inputs()
    seen = top_k(x, k, 1.0) if k else whole(x)
    ce, fkl = (fused(x, name, 1.0, 4, seen) for name in ("ce", "fkl"))
    torch.testing.assert_close(ce.objective, fused(x, "ce", 1.0, 4, None).objective)
    for name in ("acceptance", "slack", "agreement", "cross_entropy"):
        torch.testing.assert_close(getattr(ce, name), getattr(fkl, name))
