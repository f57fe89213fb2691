"""The passes of an EAGLE-3 head as a decoder's, to time them.

B rows, T new tokens, V vocab.
"""

import torch
from torch import Tensor

from draftlab.model.decoder import Decoder, Tree
from draftlab.model.eagle_llama import EagleLlama
from draftlab.model.llama import Cache, LayerStates


class HeadPasses(Decoder):
    """A head that reads states of zeros; latency does not depend on their values.

    own: its own states, as for all but a step's first token. Else the target's: a pass includes what the target takes
    to keep them for these tokens, and fc.
    """

    def __init__(self, head: EagleLlama, own: bool = False) -> None:
        self.head, self.own, self.context = head, own, head.context

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def weight_bytes(self) -> int:
        """Return how much memory the weights take that a pass reads."""
        block = self.head.blocks[0]
        return sum(
            w.nbytes
            for w in (self.head.fc, block.qkv, block.o, block.gate_up, block.down, self.head.head)
        )

    def of_own_states(self) -> "HeadPasses":
        return HeadPasses(self.head, own=True)

    def new_cache(self, rows: int, capacity: int) -> Cache:
        cache, width = self.head.new_cache(rows, capacity), self.head.fc.shape[1]
        cache.layer_states = LayerStates(
            self.head.layer_ids, self.head.embed.new_zeros(rows, capacity, width)
        )
        return cache

    def forward(self, ids: Tensor, cache: Cache, last: int = 0, tree: Tree | None = None) -> Tensor:
        """Run a pass, see Decoder.forward."""
        rows, width = ids.shape
        if self.own:
            read = self.head.embed.new_zeros(rows, width, self.head.shape.hidden)
        else:
            read = self.head.combine(self._kept(cache, width))
        layers, cache.layer_states = (
            cache.layer_states,
            None,
        )  # the target's, not those of the head's layer
        logits, _ = self.head.step(ids, read, cache, last or width, tree)
        cache.layer_states = layers
        return logits

    def _kept(self, cache: Cache, width: int) -> Tensor:
        layers, new = cache.layer_states, slice(0, width)
        assert layers is not None  # new_cache set them
        for at, layer in enumerate(layers.ids):
            size = layers.states.shape[-1] // len(layers.ids)
            layers.store(
                layer,
                layers.states[:, -width:, at * size : (at + 1) * size].clone(),
                (slice(None), new, new),
            )
        return layers.states[:, new]
