"""A drafter that uses a second drafter for the texts that the first drafter has no draft for.

B rows (texts of a batch), K drafted tokens, V vocab.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftlab.engine.generate import Draft, Drafter, TokenIds
from draftlab.model.devices import staged
from draftlab.sampling import SamplingParams


class FallbackDrafter(Drafter):
    """Drafts with a first drafter. Texts that it has no draft for get a draft from a second drafter.

    second_tokens: Largest number of tokens that the second drafter drafts, because its tokens cost more and are
    accepted less often. None: both drafters have the same limit.
    """

    def __init__(self, first: Drafter, second: Drafter, vocab: int, second_tokens: int | None = None) -> None:
        self.first, self.second, self.vocab, self.second_tokens = (
            first,
            second,
            vocab,
            second_tokens,
        )

    def reset(self, rows: int, capacity: int) -> None:
        self.first.reset(rows, capacity)
        self.second.reset(rows, capacity)

    def attach(self, cache: Any) -> None:
        for drafter in (self.first, self.second):
            drafter.attach(cache)

    def prefill(self, texts: TokenIds) -> None:
        for drafter in (self.first, self.second):
            drafter.prefill(texts)

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        first = self.first.propose(texts, count, sampling, uniform)
        if all(first.counts):
            return first
        fewer = min(count, self.second_tokens or count)
        second = self.second.propose(texts, fewer, sampling, uniform[:, :fewer])
        second = second.to(first.ids.device)
        if not any(first.counts):
            return second
        counts = [a or b for a, b in zip(first.counts, second.counts, strict=True)]
        from_first = staged(first.counts, first.ids.device) > 0  # [B]
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
