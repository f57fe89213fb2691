"""Random hidden states and logits for losses, and comparisons of losses and gradients."""

import torch
from torch import Tensor

from draftlab.training.fused_loss import Dense, Sums, TopK
from draftlab.training.losses import log_probs

N, D, V = 13, 6, 31
LOSSES = ["ce", "fkl", "rkl", "jsd(0.3)", "tvd", "nla", "lk(3)", "0.7*fkl + 0.3*ce"]
ALL = ("objective", "cross_entropy", "acceptance", "agreement")


def inputs(dtype: torch.dtype = torch.float64, vocab: int = V, tokens: int = N) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng, dtype=torch.float64).to(dtype)

    return {
        "hidden": draw(tokens, D).requires_grad_(),
        "head": draw(vocab, D).requires_grad_(),
        "teacher_hidden": draw(tokens, 5),
        "teacher_head": draw(vocab, 5),
        "labels": torch.randint(0, vocab, (tokens,), generator=rng),
        "weights": torch.rand(tokens, generator=rng, dtype=torch.float64).to(dtype),
    }


def budget(x: dict[str, Tensor], chunk: int) -> int:
    """Bytes with which chunks have so many tokens."""
    return 2 * x["head"][:, 0].nbytes * chunk


def whole(x: dict[str, Tensor]) -> Dense:
    return Dense(x["teacher_hidden"], x["teacher_head"])


def same(
    found: Sums,
    wanted: dict[str, Tensor],
    x: dict[str, Tensor],
    keys: tuple[str, ...],
    error: float = 1e-10,
) -> None:
    """Compare values and gradients."""
    for key in keys:
        torch.testing.assert_close(getattr(found, key).double(), wanted[key].detach(), atol=error, rtol=error)
    gradients = [torch.autograd.grad(2.5 * o, [x["hidden"], x["head"]]) for o in (found.objective, wanted["objective"])]
    for there, here in zip(*gradients, strict=True):
        torch.testing.assert_close(there, here, atol=error, rtol=error)


def top_k(x: dict[str, Tensor], k: int, temperature: float) -> TopK:
    log_p = log_probs(x["teacher_hidden"] @ x["teacher_head"].T, temperature)
    values, ids = log_p.topk(k)
    rest = log_p.scatter(1, ids, -torch.inf).logsumexp(-1).clamp_min(-80)
    return TopK(ids, values, rest)
