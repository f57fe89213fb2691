"""The passes of drafters: their times, from which the cost of a step follows, and heads as decoders, to time them.

C contexts.
"""

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from draftlab.model.decoder import Decoder
from draftlab.model.llama import Cache


class Latencies(Protocol):
    """The latencies of a model's passes, such as a CostModel (latency/cost_model.py)."""

    def forward_ms(self, width: int, batch: int, contexts: np.ndarray) -> np.ndarray:
        """Return the milliseconds of a pass over `width` tokens of each text, by context, [C]."""
        ...

    def host_ms(self, width: int) -> float:
        """Return the milliseconds of a step outside of the passes, if `width` tokens are verified."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Milliseconds of a drafter's passes at one batch size, by context.

    Args:
        contexts: Numbers of cached tokens, ascending by 1, [C].
        steady: Time of a pass over one token after many passes of the same model, [C].
        warmup: Additional time of each of the first N one-token passes after a target pass, [N, C].
        k: Largest number of tokens drafted in a step.
        lag: Number of tokens by which the drafter's cache is shorter than the target's.
        by_width: Times of forward passes computed so far, by width.
    """

    draft: Latencies
    batch: int
    contexts: np.ndarray
    steady: np.ndarray
    warmup: np.ndarray
    k: int
    lag: int
    by_width: dict[int, np.ndarray] = field(default_factory=dict)

    def step(self, k: int, *, unread: int, at_once: bool = False) -> np.ndarray:
        """Return the time of drafting k tokens in a step, by the number of tokens in the target's cache, [C].

        Args:
            unread: Number of tokens that the drafter's first pass reads, because it has not read them yet.
            at_once: Whether the first pass drafts all k tokens, because it also reads k - 1 mask tokens. Otherwise
                every further token has its own pass. The drafter works on the host once in a step: to roll back its
                cache and to read the text. Choosing a token between two passes takes next to no time.
        """
        if k == 0:
            return np.zeros(len(self.contexts))
        here = np.arange(len(self.contexts)) - self.lag
        width = unread + (k - 1 if at_once else 0)
        ms = self._forward(width)[np.maximum(here - unread + 1, 0)] + self.draft.host_ms(1)
        for j in range(1, 1 if at_once else k):
            at = np.minimum(here + j, len(here) - 1)
            ms = ms + self.steady[at]
            if j < len(self.warmup):
                ms = ms + self.warmup[j, at]
        return ms

    def block(self, k: int) -> np.ndarray:
        """Return the time of a pass that drafts a block of k tokens, by number of tokens in the target's cache, [C].

        In the profile of a head that drafts blocks, the width of a pass is the number of its drafted tokens. The pass
        also reads the same number of the target's hidden states.
        """
        return self._forward(k) + self.draft.host_ms(1) if k else np.zeros(len(self.contexts))

    def _forward(self, width: int) -> np.ndarray:
        if width not in self.by_width:
            self.by_width[width] = self.draft.forward_ms(width, self.batch, self.contexts)
        return self.by_width[width]


class StatesHead(Protocol):
    """A head that reads states of the target's layers, and has its own cache. layer_ids: Ids of these layers."""

    @property
    def device(self) -> torch.device: ...
    @property
    def layer_ids(self) -> tuple[int, ...]: ...
    def new_cache(self, rows: int, capacity: int) -> Cache: ...


Head = TypeVar("Head", bound=StatesHead)


class HeadPasses(Decoder, Generic[Head]):
    """A head with the interface of a Decoder, so that its passes can be timed like those of a draft model."""

    def __init__(self, head: Head, context: int) -> None:
        """Make a Decoder. context: Length of the longest text, in tokens."""
        self.head = head
        self.context = context

    @property
    def device(self) -> torch.device:
        return self.head.device

    def new_cache(self, rows: int, capacity: int) -> Cache:
        return self.head.new_cache(rows, capacity)

    def of_own_states(self) -> "HeadPasses[Head]":
        """Return the passes in which the head reads its own states: all passes of a step except the first.

        By default, return this object, because a head that drafts all tokens in one pass has only one kind of pass.
        """
        return self
