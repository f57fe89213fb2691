"""EAGLE-3 (Li et al. 2025, 2503.01840): a head of one layer drafts from the target's states, then from its own.

B rows, T new tokens, K drafted tokens, D hidden, V vocab. In a text of n tokens the target has read n - 1, and the head
has a place for each: position i holds the state after token i with token i + 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftlab.engine.generate import Draft, Drafter, Sampler
from draftlab.model.devices import staged
from draftlab.model.eagle_llama import EagleLlama
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import LayerStates, Llama
from draftlab.sampling import SamplingParams


class EagleDrafter(Drafter):
    """Drafts a chain, one pass of the head per token; what the target has read since is fed first, in one pass."""

    cache: Any
    layer_states: LayerStates

    def __init__(self, target: Llama | HFDecoder, head: EagleLlama) -> None:
        self.target, self.head = target, head
        self.vocab = target.vocab

    def reset(self, rows: int, capacity: int) -> None:
        self.cache = None  # frees its memory before the next one is allocated
        self.cache = self.head.new_cache(rows, capacity)
        self.read = [0] * rows  # positions of each row that hold the target's states

    def attach(self, cache: Any) -> None:
        self.layer_states = self.target.new_layer_states(cache, self.head.layer_ids)
        cache.layer_states = self.layer_states

    def prefill(self, texts: Sequence[list[int]]) -> None:
        """Read every place; the first draft reads the last one again."""
        self.last_logits(texts)

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        logits, state = self.last_logits(texts)
        ids, q = self.head.draft(logits, self.cache, uniform, Sampler(sampling.unlimited(), self.vocab), state)
        return Draft(ids=ids, q=q, counts=[count] * len(texts))

    def last_logits(self, texts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Feed what the target has read since; return logits [B, V] and state [B, 1, D] of each text's last place.

        All rows feed the same number of places, see decoder.feed.
        """
        ends = [len(text) - 1 for text in texts]
        width = max(end - min(read, end - 1) for end, read in zip(ends, self.read, strict=True))
        starts = [max(0, end - width) for end in ends]
        rows = [(text[at + 1 : at + 1 + width] + [0] * width)[:width] for text, at in zip(texts, starts, strict=True)]
        ids, first = staged(rows, self.head.device), staged(starts, self.head.device)
        row = torch.arange(len(rows), device=self.head.device)
        places = first.unsqueeze(1) + torch.arange(width, device=self.head.device)
        fed = self.head.combine(self.layer_states.states[row.unsqueeze(1), places])
        self.cache.used = starts
        at = [end - start - 1 for end, start in zip(ends, starts, strict=True)]  # each text's last place
        logits, states = self.head.step(ids, fed, self.cache, last=width - min(at))
        self.cache.used, self.read = list(ends), list(ends)
        chosen = staged(at, self.head.device)
        return logits[row, chosen - min(at)], states[row, chosen].unsqueeze(1)
