"""Drafters made of drafters, and a model that stops where it is unsure.

B rows, K drafted, V vocab.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from draftlab.engine.generate import Draft, Drafter, ModelDrafter, Sampler, fit_vocab, verify_batch
from draftlab.engine.verify import distribution
from draftlab.model.decoder import Decoder
from draftlab.sampling import SamplingParams

Unsure = Callable[[Tensor], Tensor]  # the draft's probabilities at temperature 1, [B, V] -> [B] bool


def less_sure_than(probability: float) -> Unsure:
    """The most probable token is less probable than that, as transformers' assistant_confidence_threshold."""
    return lambda p: p.amax(-1) < probability


def more_entropy_than(nats: float) -> Unsure:
    """The draft's entropy is above that; it bounds how often the draft is accepted (SVIP, 2411.18462)."""
    return lambda p: torch.special.entr(p).sum(-1) > nats


class ConfidenceStopDrafter(ModelDrafter):
    """A model that ends its draft behind the first token that it is unsure of.

    That token stays: to drop it for what it is would bias what is emitted.
    """

    def __init__(self, model: Decoder, vocab: int | None, unsure: Unsure) -> None:
        super().__init__(model, vocab)
        self.unsure = unsure

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        logits = self.last_logits(texts)[:, -1]
        going = torch.ones(len(texts), dtype=torch.bool, device=logits.device)
        choose = Sampler(sampling.unlimited(), self.vocab)
        ids, q, drafted = [], [], []
        while len(ids) < count and going.any():
            if ids:
                logits = self.next_logits(ids[-1])
            token, drawn_from = choose(logits, uniform[:, len(ids)])
            ids.append(token)
            q += [] if drawn_from is None else [drawn_from]
            drafted.append(going)
            going = going & ~self.unsure(torch.softmax(logits.float(), -1))
        counts, self.drafted = torch.stack(drafted).sum(0).tolist(), torch.stack(ids, 1)
        return Draft(ids=self.drafted, q=torch.stack(q, 1) if q else None, counts=counts)


class Fallback:
    """What the first drafter proposes; where it has nothing, what the second does, which is asked only then."""

    def __init__(self, first: Drafter, second: Drafter, vocab: int) -> None:
        self.first, self.second, self.vocab = first, second, vocab

    def reset(self, rows: int, capacity: int) -> None:
        self.first.reset(rows, capacity)
        self.second.reset(rows, capacity)

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        first = self.first.propose(texts, count, sampling, uniform)
        if all(first.counts):
            return first
        second = self.second.propose(texts, count, sampling, uniform)
        if not any(first.counts):
            return second
        counts = [a or b for a, b in zip(first.counts, second.counts, strict=True)]
        chosen = torch.tensor(first.counts, device=uniform.device) > 0  # [B]
        a, b = (F.pad(d.ids, (0, max(counts) - d.ids.shape[1])) for d in (first, second))
        ids = torch.where(chosen[:, None], a, b)
        if first.q is None and second.q is None:
            return Draft(ids=ids, q=None, counts=counts)
        both = (self._q(d, wide, sampling) for d, wide in ((first, a), (second, b)))
        return Draft(ids=ids, q=torch.where(chosen[:, None, None], *both), counts=counts)

    def _q(self, draft: Draft, ids: Tensor, sampling: SamplingParams) -> Tensor:
        if draft.q is None:
            return F.one_hot(ids, self.vocab).float()
        return F.pad(draft.q, (0, 0, 0, ids.shape[1] - draft.q.shape[1]))


class CascadeDrafter(ModelDrafter):
    """A smaller drafter drafts for the draft model, which drafts for the target (Spector and Re 2023, 2308.04623).

    What comes out are samples of the draft model itself, so its distributions are the q of the outer rule.
    """

    def __init__(self, model: Decoder, vocab: int | None, inner: Drafter, inner_count: int) -> None:
        self.inner, self.inner_count = inner, inner_count
        super().__init__(model, vocab)

    def reset(self, rows: int, capacity: int) -> None:
        super().reset(rows, capacity + self.inner_count)
        self.inner.reset(rows, capacity + self.inner_count)

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        written: list[list[int]] = [[] for _ in texts]
        q: list[list[Tensor]] = [[] for _ in texts]
        draws = self._draws(uniform)  # [B, K, 2 inner_count + 1]
        while min(done := list(map(len, written)), default=count) < count:
            u = draws[torch.arange(len(done)), [min(n, count - 1) for n in done]]
            so_far = [text + more for text, more in zip(texts, written, strict=True)]
            inner = self.inner.propose(so_far, self.inner_count, sampling, u[:, : self.inner_count])
            fed = [text + more for text, more in zip(so_far, inner.ids.tolist(), strict=True)]
            logits = fit_vocab(self.last_logits(fed, last=inner.ids.shape[1] + 1), self.vocab)
            for row, (_, tokens) in enumerate(
                verify_batch(logits, inner, inner.counts, sampling, u[:, self.inner_count :])
            ):
                if done[row] < count:
                    written[row] += tokens
                    q[row] += [] if sampling.temperature == 0 else [distribution(logits[row, : len(tokens)], sampling)]
        return Draft(
            ids=torch.tensor([tokens[:count] for tokens in written], device=uniform.device),
            q=torch.stack([torch.cat(rows)[:count] for rows in q]) if q[0] else None,
            counts=[count] * len(texts),
        )

    def _draws(self, uniform: Tensor) -> Tensor:
        """More draws than were given, of each row and place their own."""
        width = 2 * self.inner_count + 1
        draws = [
            torch.rand(len(row), width, generator=torch.Generator().manual_seed(int(row[0] * (1 << 24))))
            for row in uniform.cpu()
        ]
        return torch.stack(draws).to(uniform)
