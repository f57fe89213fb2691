"""Drafting with a DFlash head: states of read tokens are projected once, and one pass drafts all tokens.

B rows, T tokens, K drafted tokens, V vocab. In a text of n tokens the target has read n - 1, whose states are the
context; the last token begins the block. Each token is drawn from its own q, which does not depend on the other tokens
of the draft, so the rules for chains hold.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftlab.engine.generate import Draft, Drafter, Sampler
from draftlab.model.devices import staged
from draftlab.model.dflash import DFlash
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import LayerStates, Llama
from draftlab.sampling import SamplingParams


class DFlashDrafter(Drafter):
    """Drafts a block after each text."""

    cache: Any
    layer_states: LayerStates

    def __init__(self, target: Llama | HFDecoder, head: DFlash) -> None:
        self.target, self.head = target, head
        self.vocab = target.vocab

    def reset(self, rows: int, capacity: int) -> None:
        self.cache = None  # frees its memory before the next one is allocated
        self.cache = self.head.new_cache(rows, capacity)

    def attach(self, cache: Any) -> None:
        self.layer_states = self.target.new_layer_states(cache, self.head.config.layer_ids)
        cache.layer_states = self.layer_states

    def prefill(self, texts: Sequence[list[int]]) -> None:
        """Read the states of the prompts."""
        self.read(texts)

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        self.read(texts)
        last = staged([text[-1] for text in texts], self.head.device)
        logits = self.head.block_logits(last, min(count, self.head.config.most), self.cache)
        ids, q = Sampler(sampling.unlimited(), self.vocab)(logits, uniform[:, : logits.shape[1]])
        return Draft(ids=ids, q=q, counts=[ids.shape[1]] * len(texts))

    def read(self, texts: Sequence[list[int]]) -> None:
        """Project the states that are new since the last call. All rows are fed equally many positions.

        States of drafted tokens that were rejected are not used: positions are read again once the target has read
        their tokens.
        """
        ends = [len(text) - 1 for text in texts]
        width = max(max(1, end - min(used, end)) for end, used in zip(ends, self.cache.used, strict=True))
        starts = [max(0, end - width) for end in ends]
        positions = staged(starts, self.head.device).unsqueeze(1) + torch.arange(width, device=self.head.device)
        rows = torch.arange(len(texts), device=self.head.device).unsqueeze(1)
        self.head.read(self.layer_states.states[rows, positions], positions, self.cache)
        self.cache.used = ends
