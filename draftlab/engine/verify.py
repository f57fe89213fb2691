"""Sampling from logits, and the rejection rule of speculative sampling. Pure functions.

K drafted tokens, V vocab. Greedy decoding is the same rule with one-hot distributions.
"""

import math

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.model.devices import exact_dtype
from draftlab.sampling import SamplingParams

COLD = 1e-2


def check_logits(logits: Tensor, model: str) -> None:
    """Raises UserError: some are NaN or infinite. -inf is the logit of an id that a head lacks."""
    if not math.isfinite(float(logits.max())):
        dtype = str(logits.dtype).removeprefix("torch.")
        raise UserError(
            f"{model} computes logits that are not finite (NaN or infinity) in {dtype}: its weights are damaged, or "
            "overflow there; try --dtype float32"
        )


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return next-token probabilities, [..., V], fp32. Temperature 0: one-hot on the largest logit, ties to the lowest.

    The filters apply in transformers' and vLLM's order: top_k, then top_p over what top_k left (the fewest tokens that
    reach top_p together, at least one), then min_p relative to the most probable token.
    """
    if params.temperature == 0:
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(
            -1, logits.argmax(-1, keepdim=True), 1.0
        )
    logits = logits.float()
    if params.temperature < COLD:
        logits = logits - logits.amax(-1, keepdim=True)  # else the quotient overflows
    p = torch.softmax(logits / params.temperature, -1)
    if params.top_k or params.top_p < 1:
        values, ids = (
            p.topk(params.top_k, -1)
            if 0 < params.top_k < p.shape[-1]
            else p.sort(-1, descending=True)
        )
        values = values / values.sum(-1, keepdim=True)
        # all before it have not yet reached top_p
        values = values * (values.cumsum(-1) - values < params.top_p)
        p = torch.zeros_like(p).scatter_(-1, ids, values / values.sum(-1, keepdim=True))
    if params.min_p:
        p = p * (p >= params.min_p * p.amax(-1, keepdim=True))
        p = p / p.sum(-1, keepdim=True)
    return p


def draw(probabilities: Tensor, u: Tensor) -> Tensor:
    """Sample by the inverse CDF: the first id whose cumulative probability exceeds u. [..., V], [...] -> ids [...].

    Samples follow exactly the distribution given, so q in the verify rule is what the draft sampled from. An id of
    probability 0 is never drawn, even where the cumulative sum falls short of 1 by rounding.
    """
    cumulative = probabilities.to(exact_dtype(probabilities.device)).cumsum(-1)
    total = cumulative[..., -1:]
    edge = torch.minimum(
        u.to(cumulative).unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total))
    )
    return torch.searchsorted(cumulative, edge, right=True).squeeze(-1)


def verify(p: Tensor, q: Tensor, drafted: Tensor, u: Tensor) -> tuple[int, Tensor]:
    """Accept a prefix of the drafted tokens, losslessly.

    Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.

    Args:
        p: target probabilities, [K + 1, V].
        q: probabilities the drafted tokens were drawn from, [K, V].
        drafted: token ids, [K].
        u: uniform draws in [0, 1), [K].

    Returns: number accepted, and the distribution [V] of the next token.
    """
    counts = torch.tensor([len(drafted)], device=p.device)
    accepted, following = verify_rows(p[None], q[None], drafted[None], u[None], counts)
    return int(accepted), following[0]


def verify_rows(
    p: Tensor, q: Tensor, drafted: Tensor, u: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Verify rows as ``verify`` does, without waiting for the device.

    p: [B, K + 1, V]. q: [B, K, V]. drafted, u: [B, K]. counts: Number of each row's drafted tokens that count, [B].

    Returns: numbers accepted, [B], and the distributions of the next tokens, [B, V].
    """
    width, at = drafted.shape[1], drafted.unsqueeze(-1)
    p_drafted, q_drafted = p[:, :-1].gather(-1, at).squeeze(-1), q.gather(-1, at).squeeze(-1)
    passed = u.to(q) * q_drafted < p_drafted  # u < p / q, without dividing
    passed &= torch.arange(width, device=p.device) < counts.unsqueeze(1)
    accepted = passed.long().cumprod(1).sum(1)
    p_next = _picked(p, accepted)
    if width == 0:
        return accepted, p_next
    residual = (p_next - _picked(q, accepted.clamp_max(width - 1))).clamp_min(0)
    total = residual.sum(-1, keepdim=True)
    # if the total is 0, p and q agree up to rounding: rejection had no real chance, and p itself is right
    rejected = (accepted < counts).unsqueeze(1) & (total > 0)
    return accepted, torch.where(rejected, residual / total, p_next)


def _picked(probabilities: Tensor, place: Tensor) -> Tensor:
    """Return probabilities [B, T, V] at a place of each row, [B, V]."""
    return probabilities[torch.arange(len(place), device=place.device), place]
