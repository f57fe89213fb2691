"""Base classes of drafters whose heads read the states of the target's layers.

B rows (texts of a batch), T positions, A layers whose states the head reads, D hidden. In a text of n tokens, the
target has read n - 1 tokens.
"""

from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from draftlab.engine.generate import Drafter, TokenIds
from draftlab.model.decoder import Decoder
from draftlab.model.devices import staged
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import LayerStates, Llama


class StatesHead(Protocol):
    """A head that reads states of the target's layers, and has its own cache. layer_ids: Ids of these layers."""

    @property
    def device(self) -> torch.device: ...
    @property
    def layer_ids(self) -> tuple[int, ...]: ...
    def new_cache(self, rows: int, capacity: int) -> Any: ...


class HeadPasses(Decoder):
    """A head with the interface of a Decoder, so that its passes can be timed like those of a draft model."""

    def __init__(self, head: Any, context: int) -> None:
        """Make a Decoder. head: A StatesHead. context: Length of the longest text, in tokens."""
        self.head, self.context = head, context

    @property
    def device(self) -> torch.device:
        return self.head.device

    def new_cache(self, rows: int, capacity: int) -> Any:
        return self.head.new_cache(rows, capacity)

    def of_own_states(self) -> "HeadPasses":
        """Return the passes in which the head reads its own states: all passes of a step except the first.

        By default, return this object, because a head that drafts all tokens in one pass has only one kind of pass.
        """
        return self


Head = TypeVar("Head", bound=StatesHead)


class StatesDrafter(Drafter, Generic[Head]):
    """Base class of drafters whose head reads the target's states. It records which positions the head has read."""

    cache: Any
    layer_states: LayerStates

    def __init__(self, target: Llama | HFDecoder, head: Head) -> None:
        self.target, self.head = target, head
        self.vocab = target.vocab

    def reset(self, rows: int, capacity: int) -> None:
        self.cache = None  # frees the memory before a new cache is allocated
        self.cache = self.head.new_cache(rows, capacity)
        self.read = [0] * rows  # number of positions of each text that the head has read

    def attach(self, cache: Any) -> None:
        self.layer_states = self.target.new_layer_states(cache, self.head.layer_ids)
        cache.layer_states = self.layer_states

    def new_positions(self, texts: TokenIds) -> tuple[list[int], Tensor]:
        """Return the first position that the head reads of each text, and all positions that it reads, [B, T].

        T is the largest number of new positions of a text, but at least 1. Texts with fewer new positions read some
        positions again.
        """
        ends = [len(text) - 1 for text in texts]
        width = max(end - min(read, end - 1) for end, read in zip(ends, self.read, strict=True))
        starts = [max(0, end - width) for end in ends]
        device = self.head.device
        return starts, staged(starts, device).unsqueeze(1) + torch.arange(width, device=device)

    def states_at(self, positions: Tensor) -> Tensor:
        """Return the target's states at positions [B, T] of the texts, [B, T, A D], on the head's device.

        A: number of layers whose states the head reads. D: hidden size of the target.
        """
        states = self.layer_states.states
        rows = torch.arange(len(positions), device=states.device).unsqueeze(1)
        return states[rows, positions.to(states.device)].to(self.head.device)
