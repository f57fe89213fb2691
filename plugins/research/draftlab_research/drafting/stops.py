"""Draft models that end a draft early.

B rows, V vocab.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftlab.engine.generate import Draft, ModelDrafter, Sampler
from draftlab.model.decoder import Decoder
from draftlab.sampling import SamplingParams

# a function from the draft's probabilities at temperature 1, [B, V], to whether each row stops, [B]
StopRule = Callable[[Tensor], Tensor]


def confidence_below(threshold: float) -> StopRule:
    """Return a rule that stops if the largest probability is below the threshold.

    transformers does the same with assistant_confidence_threshold.
    """
    return lambda p: p.amax(-1) < threshold


def entropy_above(nats: float) -> StopRule:
    """Return a rule that stops if the draft's entropy is above a number of nats.

    Entropy bounds the acceptance rate (SVIP, 2411.18462).
    """
    return lambda p: torch.special.entr(p).sum(-1) > nats


class ConfidenceStopDrafter(ModelDrafter):
    """A draft model that ends its draft after the first token at which a rule stops.

    This token stays in the draft, because dropping tokens by their probability would bias the output.
    """

    def __init__(self, model: Decoder, vocab: int | None, stops: StopRule) -> None:
        super().__init__(model, vocab)
        self.stops = stops

    def propose(
        self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor
    ) -> Draft:
        logits = self.last_logits(texts)[:, -1]
        active = torch.ones(len(texts), dtype=torch.bool, device=logits.device)
        sampler = Sampler(sampling.unlimited(), self.vocab)
        ids, q, drafted = [], [], []
        while len(ids) < count and active.any():
            if ids:
                logits = self.model.forward(ids[-1].unsqueeze(1), self.cache, last=1)[:, -1]
            token, drawn_from = sampler(logits, uniform[:, len(ids)])
            ids.append(token)
            q += [] if drawn_from is None else [drawn_from]
            drafted.append(active)
            active = active & ~self.stops(torch.softmax(logits.float(), -1))
        counts, self.drafted = torch.stack(drafted).sum(0).tolist(), torch.stack(ids, 1)
        return Draft(ids=self.drafted, q=torch.stack(q, 1) if q else None, counts=counts)
