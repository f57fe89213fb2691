"""EAGLE-3 (Li et al. 2025, 2503.01840): a head of one layer drafts from the target's states, then from its own.

B rows, T new tokens, K drafted tokens, D hidden, V vocab. In a text of n tokens the target has read n - 1 tokens, and
the head has n - 1 positions: position i combines the target's state of token i with token i + 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftlab.engine.drafters.states import StatesDrafter
from draftlab.engine.generate import Draft, Sampler
from draftlab.model.devices import staged
from draftlab.model.eagle_llama import EagleLlama
from draftlab.sampling import SamplingParams


class EagleDrafter(StatesDrafter[EagleLlama]):
    """Drafts a chain with one pass of the head per token. The first pass also feeds the target's new states."""

    def prefill(self, texts: Sequence[list[int]]) -> None:
        """Read all positions of the prompts. The first draft reads the last position again."""
        self.last_logits(texts)

    def propose(
        self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor
    ) -> Draft:
        logits, state = self.last_logits(texts)
        ids, q = self.head.draft(
            logits, self.cache, uniform, Sampler(sampling.unlimited(), self.vocab), state
        )
        return Draft(ids=ids, q=q, counts=[count] * len(texts))

    def last_logits(self, texts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Feed the target's new states. Return logits [B, V] and state [B, 1, D] of each text's last position.

        All rows feed the same number of positions, see decoder.feed.
        """
        ends = [len(text) - 1 for text in texts]
        starts, places = self.new_positions(texts)
        width = places.shape[1]
        rows = [
            (text[at + 1 : at + 1 + width] + [0] * width)[:width]
            for text, at in zip(texts, starts, strict=True)
        ]
        ids, row = staged(rows, self.head.device), torch.arange(len(rows), device=self.head.device)
        fed = self.head.combine(self.states_at(places))
        self.cache.used = starts
        # each text's last position among the fed positions
        at = [end - start - 1 for end, start in zip(ends, starts, strict=True)]
        logits, states = self.head.step(ids, fed, self.cache, last=width - min(at))
        self.cache.used, self.read = list(ends), list(ends)
        chosen = staged(at, self.head.device)
        return logits[row, chosen - min(at)], states[row, chosen].unsqueeze(1)
