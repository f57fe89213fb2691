"""Drafters with heads that read the states of the target's layers.

B rows, T positions, A layers that are read, D hidden. In a text of n tokens the target has read n - 1 tokens.
"""

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from draftlab.engine.generate import Drafter
from draftlab.model.decoder import Decoder
from draftlab.model.devices import staged
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import LayerStates, Llama


class StatesHead(Protocol):
    """A head on states of the target's layers, with a cache of its own."""

    @property
    def device(self) -> torch.device: ...
    @property
    def layer_ids(self) -> tuple[int, ...]: ...
    def new_cache(self, rows: int, capacity: int) -> Any: ...


class HeadPasses(Decoder):
    """The passes of a head, with the interface of a decoder, so that they can be timed like a decoder's."""

    def of_own_states(self) -> "HeadPasses":
        """Return the passes in which the head reads its own states.

        Only a step's first drafted token needs the target's.
        """
        return self


Head = TypeVar("Head", bound=StatesHead)


class StatesDrafter(Drafter, Generic[Head]):
    """A drafter that reads the target's states, and keeps track of the positions that it has not read."""

    cache: Any
    layer_states: LayerStates

    def __init__(self, target: Llama | HFDecoder, head: Head) -> None:
        self.target, self.head = target, head
        self.vocab = target.vocab

    def reset(self, rows: int, capacity: int) -> None:
        self.cache = None  # frees its memory before the next one is allocated
        self.cache = self.head.new_cache(rows, capacity)
        self.read = [0] * rows  # positions of each row that the head has read

    def attach(self, cache: Any) -> None:
        self.layer_states = self.target.new_layer_states(cache, self.head.layer_ids)
        cache.layer_states = self.layer_states

    def new_positions(self, texts: Sequence[list[int]]) -> tuple[list[int], Tensor]:
        """Return the first position that each row reads, and all positions to read, [B, T].

        All rows read the same number of positions: the largest number of new positions in the batch, at least 1.
        """
        ends = [len(text) - 1 for text in texts]
        width = max(end - min(read, end - 1) for end, read in zip(ends, self.read, strict=True))
        starts = [max(0, end - width) for end in ends]
        device = self.head.device
        return starts, staged(starts, device).unsqueeze(1) + torch.arange(width, device=device)

    def states_at(self, positions: Tensor) -> Tensor:
        """Return the target's states at `positions` [B, T], as [B, T, A D] on the head's device."""
        states = self.layer_states.states
        rows = torch.arange(len(positions), device=states.device).unsqueeze(1)
        return states[rows, positions.to(states.device)].to(self.head.device)
