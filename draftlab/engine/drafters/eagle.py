"""EAGLE-3 (Li et al. 2025, 2503.01840): a head of one layer drafts from the target's states, then from its own.

B rows (texts of a batch), T new tokens, K drafted tokens, D hidden, V vocab. In a text of n tokens, the target has read
n - 1 tokens, and the head has n - 1 positions. At position i it reads the target's state of token i, and token i + 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from draftlab.engine.drafters.states import HeadPasses, StatesDrafter
from draftlab.engine.generate import Draft, Sampler, TokenIds
from draftlab.model.decoder import Tree
from draftlab.model.devices import staged
from draftlab.model.eagle_llama import EagleLlama
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import Cache, LayerStates, Llama
from draftlab.sampling import SamplingParams


class EagleDrafter(StatesDrafter[EagleLlama]):
    """Drafts a chain with one pass of the head per token.

    The first pass also reads the target's states at all positions since the last draft.
    """

    def __init__(self, target: Llama | HFDecoder, head: EagleLlama) -> None:
        super().__init__(target, head)
        self.sampler: Callable[[SamplingParams, int | None], Sampler] = Sampler

    def prefill(self, texts: TokenIds) -> None:
        """Read the target's states at all positions of the prompts. The first draft reads the last position again."""
        self.last_logits(texts)

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        logits, state = self.last_logits(texts)
        sampler = self.sampler(sampling.unlimited(), self.vocab)
        return Draft.chain(*self.head.draft(logits, self.cache, uniform, sampler, state))

    def last_logits(self, texts: TokenIds) -> tuple[Tensor, Tensor]:
        """Run the head over the target's new states. Return its logits and state at each text's last position.

        All texts feed the same number of positions, see StatesDrafter.new_positions.

        Returns: The logits, [B, V], and the state, [B, 1, D].
        """
        starts, places = self.new_positions(texts)
        read = self.head.combine(self.states_at(places))
        logits, states, at = self.run(texts, starts, read)
        row = torch.arange(len(texts), device=self.head.device)
        return logits[row, at - at.min()], states[row, at].unsqueeze(1)

    def run(self, texts: TokenIds, starts: list[int], states: Tensor, filler: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Run the head over T positions of each text from its start on. The cache then ends with the texts.

        Args:
            states: States that the head reads, [B, T, D].
            filler: Token that the head reads at positions after the end of a text.

        Returns: The logits from position at.min() on, the head's states at all T positions, [B, T, D], and the index
            `at` of each text's last position among the T positions, [B].
        """
        width = states.shape[1]
        rows = [
            (text[start + 1 : start + 1 + width] + [filler] * width)[:width]
            for text, start in zip(texts, starts, strict=True)
        ]
        ids = staged(rows, self.head.device)
        ends = [len(text) - 1 for text in texts]
        at = [end - start - 1 for end, start in zip(ends, starts, strict=True)]
        self.cache.used = starts
        logits, states = self.head.step(ids, states, self.cache, last=width - min(at))
        self.cache.used, self.read = list(ends), list(ends)
        return logits, states, staged(at, self.head.device)


class EaglePasses(HeadPasses):
    """An EAGLE-3 head as a Decoder, to time its passes. The states that it reads are zeros.

    own: Whether the head reads its own states, as in all passes of a step except the first. In the first pass it reads
    the target's states. This pass also stores these states and runs fc.
    """

    def __init__(self, head: EagleLlama, own: bool = False) -> None:
        super().__init__(head, head.context)
        self.own = own

    @property
    def weight_bytes(self) -> int:
        """Return the size in bytes of the weights that a pass reads."""
        blocks = [w for b in self.head.blocks for w in (b.qkv, b.o, b.gate_up, b.down)]
        return sum(weight.nbytes for weight in (self.head.fc, *blocks, self.head.head))

    def of_own_states(self) -> "EaglePasses":
        return EaglePasses(self.head, own=True)

    def new_cache(self, rows: int, capacity: int) -> Cache:
        cache, width = self.head.new_cache(rows, capacity), self.head.fc.shape[1]
        cache.layer_states = LayerStates(self.head.layer_ids, self.head.embed.new_zeros(rows, capacity, width))
        return cache

    def forward(self, ids: Tensor, cache: Cache, last: int = 0, tree: Tree | None = None) -> Tensor:
        """Run a pass over T tokens with states of zeros. Arguments and result: See Decoder.forward."""
        rows, width = ids.shape
        if self.own:
            read = self.head.embed.new_zeros(rows, width, self.head.shape.hidden)
        else:
            read = self.head.combine(self._kept(cache, width))
        # these are states of the target's layers, which the head's pass must not overwrite
        layers, cache.layer_states = (cache.layer_states, None)
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
