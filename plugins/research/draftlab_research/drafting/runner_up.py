"""A chain of a draft model, with a second candidate (a runner-up) beside each of its first tokens.

A pass of a target over a few tokens often takes no longer than a pass over one, because the weights must be read
anyway. The runners-up come from logits that the draft model has already computed, so they cost no pass of the draft.

B rows (texts of a batch), K tokens of the chain, R runners-up, V vocab.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftlab.engine.generate import Draft, ModelDrafter, Sampler, fit_vocab
from draftlab.engine.verify import draw, most_probable
from draftlab.model.decoder import Decoder
from draftlab.sampling import SamplingParams
from draftlab_research.drafting.tree import without
from draftlab_research.rules import recursive


class RunnerUpDrafter(ModelDrafter):
    """Drafts a chain of `tokens` tokens. The first `runners_up` of them have a second candidate as a sibling.

    The runners-up come after the chain, so that a draft without room loses them first. When sampling, they are drawn
    without replacement.
    """

    def __init__(self, model: Decoder, vocab: int | None, tokens: int, runners_up: int) -> None:
        super().__init__(model, vocab)
        self.tokens, self.runners_up = tokens, runners_up

    def propose(
        self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor
    ) -> Draft:
        length = min(self.tokens, count)
        runners_up = min(self.runners_up, count - length)
        logits = self.last_logits(texts)[:, -1]
        sampler = RunnerUpSampler(
            sampling.unlimited(), self.vocab, uniform[:, length:][:, :runners_up]
        )
        self.drafted, q = self.model.draft(logits, self.cache, uniform[:, :length], sampler)
        ids = torch.stack([*self.drafted.unbind(1), *sampler.ids], 1)
        return Draft(
            ids=ids,
            q=None if q is None else torch.stack([*q.unbind(1), *sampler.q], 1),
            counts=[ids.shape[1]] * len(texts),
            parents=(*range(length), *range(runners_up)),
            rule=recursive,
        )


class RunnerUpSampler(Sampler):
    """A Sampler that also takes a second candidate for each of the first R tokens.

    ids: The second candidates so far, [B] each. q: The distributions from which they are drawn, [B, V] each; empty for
    greedy decoding.
    """

    def __init__(self, sampling: SamplingParams, vocab: int | None, uniform: Tensor) -> None:
        """Make a sampler. uniform: Draws in [0, 1), [B, R]."""
        super().__init__(sampling, vocab)
        self.draws = list(uniform.unbind(1))
        self.ids: list[Tensor] = []
        self.q: list[Tensor] = []

    def __call__(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor | None]:
        first, q = super().__call__(logits, uniform)
        number = len(self.ids)
        if number == len(self.draws):
            return first, q
        taken = first.unsqueeze(-1)
        if q is None:
            others = fit_vocab(logits, self.vocab).scatter(-1, taken, -torch.inf)
            self.ids.append(most_probable(others))
        else:
            self.q.append(without(q, taken))
            self.ids.append(draw(self.q[-1], self.draws[number].to(q.device)))
        return first, q
