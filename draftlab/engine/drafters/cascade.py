"""Drafters made of drafters, and drafters that stop early.

B rows, K drafted, V vocab.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftlab.engine.generate import (
    Draft,
    Drafter,
    ModelDrafter,
    PromptReader,
    Sampler,
    TargetCacheReader,
    fit_vocab,
    verify_batch,
)
from draftlab.engine.verify import distribution
from draftlab.model.decoder import Decoder
from draftlab.sampling import SamplingParams

StopRule = Callable[[Tensor], Tensor]  # the draft's probabilities at temperature 1, [B, V] -> [B] bool


def confidence_below(threshold: float) -> StopRule:
    """Stop when the largest probability is below the threshold, as transformers' assistant_confidence_threshold."""
    return lambda p: p.amax(-1) < threshold


def entropy_above(nats: float) -> StopRule:
    """Stop when the draft's entropy is above the threshold; it bounds the acceptance rate (SVIP, 2411.18462)."""
    return lambda p: torch.special.entr(p).sum(-1) > nats


class ConfidenceStopDrafter(ModelDrafter):
    """A draft model that ends its draft after the first token with low confidence.

    That token stays in the draft: dropping it because of its own probability would bias the output.
    """

    def __init__(self, model: Decoder, vocab: int | None, stops: StopRule) -> None:
        super().__init__(model, vocab)
        self.stops = stops

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        logits = self.last_logits(texts)[:, -1]
        active = torch.ones(len(texts), dtype=torch.bool, device=logits.device)
        sampler = Sampler(sampling.unlimited(), self.vocab)
        ids, q, drafted = [], [], []
        while len(ids) < count and active.any():
            if ids:
                logits = self.next_logits(ids[-1])
            token, drawn_from = sampler(logits, uniform[:, len(ids)])
            ids.append(token)
            q += [] if drawn_from is None else [drawn_from]
            drafted.append(active)
            active = active & ~self.stops(torch.softmax(logits.float(), -1))
        counts, self.drafted = torch.stack(drafted).sum(0).tolist(), torch.stack(ids, 1)
        return Draft(ids=self.drafted, q=torch.stack(q, 1) if q else None, counts=counts)


class FallbackDrafter:
    """Proposes what the first drafter proposes, and where it has no draft what the second does.

    second_tokens: most that the second drafts, for its tokens cost more and are right less often than long copies.
    """

    def __init__(self, first: Drafter, second: Drafter, vocab: int, second_tokens: int | None = None) -> None:
        self.first, self.second, self.vocab, self.second_tokens = first, second, vocab, second_tokens

    def reset(self, rows: int, capacity: int) -> None:
        self.first.reset(rows, capacity)
        self.second.reset(rows, capacity)

    def attach(self, cache: Any) -> None:
        for drafter in (self.first, self.second):
            if isinstance(drafter, TargetCacheReader):
                drafter.attach(cache)

    def prefill(self, texts: Sequence[list[int]]) -> None:
        for drafter in (self.first, self.second):
            if isinstance(drafter, PromptReader):
                drafter.prefill(texts)

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        first = self.first.propose(texts, count, sampling, uniform)
        if all(first.counts):
            return first
        fewer = min(count, self.second_tokens or count)
        second = self.second.propose(texts, fewer, sampling, uniform[:, :fewer])
        if not any(first.counts):
            return second
        counts = [a or b for a, b in zip(first.counts, second.counts, strict=True)]
        from_first = torch.tensor(first.counts, device=uniform.device) > 0  # [B]
        a, b = (F.pad(d.ids, (0, max(counts) - d.ids.shape[1])) for d in (first, second))
        ids = torch.where(from_first[:, None], a, b)
        if first.q is None and second.q is None:
            return Draft(ids=ids, q=None, counts=counts)
        both = (self._q(draft, padded) for draft, padded in ((first, a), (second, b)))
        return Draft(ids=ids, q=torch.where(from_first[:, None, None], *both), counts=counts)

    def _q(self, draft: Draft, ids: Tensor) -> Tensor:
        if draft.q is None:
            return F.one_hot(ids, self.vocab).float()
        return F.pad(draft.q, (0, 0, 0, ids.shape[1] - draft.q.shape[1]))


class CascadeDrafter(ModelDrafter):
    """A smaller drafter drafts for the draft model, which drafts for the target (Spector and Re 2023, 2308.04623).

    The output are samples of the draft model itself, so its distributions are the q of the target's rule.
    """

    def __init__(self, model: Decoder, vocab: int | None, inner: Drafter, inner_tokens: int) -> None:
        self.inner, self.inner_tokens = inner, inner_tokens
        super().__init__(model, vocab)

    def reset(self, rows: int, capacity: int) -> None:
        super().reset(rows, capacity + self.inner_tokens)
        self.inner.reset(rows, capacity + self.inner_tokens)

    def prefill(self, texts: Sequence[list[int]]) -> None:
        super().prefill(texts)
        if isinstance(self.inner, PromptReader):
            self.inner.prefill(texts)

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        tokens: list[list[int]] = [[] for _ in texts]
        q: list[list[Tensor]] = [[] for _ in texts]
        draws = self._draws(uniform)  # [B, K, 2 inner_tokens + 1]
        while min(done := list(map(len, tokens)), default=count) < count:
            u = draws[torch.arange(len(done)), [min(n, count - 1) for n in done]]
            so_far = [text + more for text, more in zip(texts, tokens, strict=True)]
            inner = self.inner.propose(so_far, self.inner_tokens, sampling, u[:, : self.inner_tokens])
            fed = [text + more for text, more in zip(so_far, inner.ids.tolist(), strict=True)]
            logits = fit_vocab(self.last_logits(fed, last=inner.ids.shape[1] + 1), self.vocab)
            verified = verify_batch(logits, inner, inner.counts, sampling, u[:, self.inner_tokens :])
            for row, (_, emitted) in enumerate(verified):
                if done[row] < count:
                    tokens[row] += emitted
                    q[row] += [] if sampling.temperature == 0 else [distribution(logits[row, : len(emitted)], sampling)]
        return Draft(
            ids=torch.tensor([row[:count] for row in tokens], device=uniform.device),
            q=torch.stack([torch.cat(rows)[:count] for rows in q]) if q[0] else None,
            counts=[count] * len(texts),
        )

    def _draws(self, uniform: Tensor) -> Tensor:
        """Expand the draws of each row and position to as many as an inner step needs."""
        width = 2 * self.inner_tokens + 1
        draws = [
            torch.rand(len(row), width, generator=torch.Generator().manual_seed(int(row[0] * (1 << 24))))
            for row in uniform.cpu()
        ]
        return torch.stack(draws).to(uniform)
