"""A draft model that verifies the tokens of a cheaper drafter.

B rows (texts of a batch), K drafted tokens, V vocab.
"""

import torch
from torch import Tensor

from draftlab.engine.generate import Draft, Drafter, ModelDrafter, TokenIds, fit_vocab, verify_batch
from draftlab.engine.verify import distribution
from draftlab.model.decoder import Decoder
from draftlab.sampling import SamplingParams


class CascadeDrafter(ModelDrafter):
    """A draft model that decodes speculatively with a cheaper, inner drafter (Spector and Re 2023, 2308.04623).

    The drafted tokens are samples of the draft model, so the target verifies them with the draft model's q.

    inner_tokens: Number of tokens that the inner drafter drafts for each pass of the draft model.
    """

    def __init__(self, model: Decoder, vocab: int | None, inner: Drafter, inner_tokens: int) -> None:
        self.inner, self.inner_tokens = inner, inner_tokens
        super().__init__(model, vocab)

    def reset(self, rows: int, capacity: int) -> None:
        super().reset(rows, capacity + self.inner_tokens)
        self.inner.reset(rows, capacity + self.inner_tokens)

    def prefill(self, texts: TokenIds) -> None:
        super().prefill(texts)
        self.inner.prefill(texts)

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        tokens: list[list[int]] = [[] for _ in texts]
        q: list[list[Tensor]] = [[] for _ in texts]
        draws = self._draws(uniform)  # [B, K, 2 inner_tokens + 1]
        while min(done := list(map(len, tokens)), default=count) < count:
            u = draws[torch.arange(len(done)), [min(n, count - 1) for n in done]]
            # a row that already has `count` tokens is fed without them, so that it stays within the cache
            so_far = [text + (more if len(more) < count else []) for text, more in zip(texts, tokens, strict=True)]
            inner = self.inner.propose(so_far, self.inner_tokens, sampling, u[:, : self.inner_tokens])
            fed = [text + more for text, more in zip(so_far, inner.ids.tolist(), strict=True)]
            logits = fit_vocab(self.last_logits(fed, last=inner.ids.shape[1] + 1), self.vocab)
            verified = verify_batch(logits, inner, inner.counts, sampling, u[:, self.inner_tokens :])
            for row, (_, emitted) in enumerate(verified):
                if done[row] < count:
                    tokens[row] += emitted
                    q[row] += [] if sampling.temperature == 0 else [distribution(logits[row, : len(emitted)], sampling)]
        return Draft.chain(
            torch.tensor([row[:count] for row in tokens], device=uniform.device),
            torch.stack([torch.cat(rows)[:count] for rows in q]) if q[0] else None,
        )

    def _draws(self, uniform: Tensor) -> Tensor:
        """Return 2 inner_tokens + 1 uniform draws for each row and drafted position, [B, K, 2 inner_tokens + 1].

        The first draw of each row of `uniform` seeds the generator of that row.

        uniform: Uniform draws in [0, 1), [B, K].
        """
        width = 2 * self.inner_tokens + 1
        draws = [
            torch.rand(len(row), width, generator=torch.Generator().manual_seed(int(row[0] * (1 << 24))))
            for row in uniform.cpu()
        ]
        return torch.stack(draws).to(uniform)
