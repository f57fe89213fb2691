"""Draft models that end a draft early.

B rows (texts of a batch), V vocab.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from draftlab.engine.generate import Draft, ModelDrafter, Sampler, TokenIds
from draftlab.model.decoder import Decoder
from draftlab.sampling import SamplingParams

# a function that takes the draft's probabilities at temperature 1, [B, V], and returns whether each row stops, [B]
StopRule = Callable[[Tensor], Tensor]


class ConfidenceStopDrafter(ModelDrafter):
    """A draft model that ends the draft of a row after the first token at which a StopRule stops it.

    The draft keeps this token, because dropping tokens by their probability would bias the output.
    """

    def __init__(self, model: Decoder, vocab: int | None, stops: StopRule) -> None:
        super().__init__(model, vocab)
        self.stops = stops

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        logits = self.last_logits(texts)[:, -1]
        stopping = StoppingSampler(sampling.unlimited(), self.vocab, self.stops)
        # Decoder.draft runs pass by pass; a CUDA graph of all passes could not stop early
        self.drafted, q = Decoder.draft(self.model, logits, self.cache, uniform, stopping)
        return Draft(ids=self.drafted, q=q, counts=stopping.counts)


class StoppingSampler(Sampler):
    """A Sampler that ends the draft of the batch when all rows have stopped."""

    def __init__(self, sampling: SamplingParams, vocab: int | None, stops: StopRule) -> None:
        super().__init__(sampling, vocab)
        self.stops, self.drafted, self.active = stops, list[Tensor](), torch.tensor(True)

    def __call__(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor | None]:
        stopped = self.stops(torch.softmax(logits.float(), -1))
        self.drafted.append(self.active.expand_as(stopped))
        self.active = self.active.to(stopped.device) & ~stopped
        self.ended = not self.active.any()
        return super().__call__(logits, uniform)

    @property
    def counts(self) -> list[int]:
        """Return the number of drafted tokens of each row, [B]. It includes the token at which the row stopped."""
        return torch.stack([row.to(self.active.device) for row in self.drafted]).sum(0).tolist()
