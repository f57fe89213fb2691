"""Drafting with a DFlash head: the head reads each state of the target once, and drafts all tokens in one pass.

B rows (texts of a batch), T tokens, K drafted tokens, V vocab. In a text of n tokens, the target has read n - 1 tokens,
and the head reads their states. The tokens drafted in one pass are a block, which begins with the last token of the
text. The distribution q of a drafted token does not depend on the other drafted tokens, so the verify rules for chains
are lossless.
"""

import torch
from torch import Tensor

from draftlab.engine.drafters.states import HeadPasses, StatesDrafter
from draftlab.engine.generate import Draft, TokenIds, draw_each
from draftlab.model.decoder import Tree
from draftlab.model.devices import staged
from draftlab.model.dflash import DFlash
from draftlab.model.llama import Cache
from draftlab.sampling import SamplingParams


class DFlashDrafter(StatesDrafter[DFlash]):
    """Drafts a block of tokens after each text, with a DFlash head."""

    def reset(self, rows: int, capacity: int) -> None:
        super().reset(rows, capacity)
        # Length of a block. It does not shrink near the end of a text, because a block's tokens attend to each other.
        self.width = 0

    def prefill(self, texts: TokenIds) -> None:
        """Read the target's states of the prompts into the head's cache."""
        self.read_states(texts)

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        last, count = self.begin(texts, count)
        logits = self.head.block_logits(last, self.width, self.cache)[:, :count]
        return draw_each(logits, uniform, sampling, self.vocab)

    def begin(self, texts: TokenIds, count: int) -> tuple[Tensor, int]:
        """Read the target's new states. Return the texts' last tokens, [B], and the number of tokens to draft.

        This number is `count`, but at most the limit of the head.
        """
        self.read_states(texts)
        count = min(count, self.head.config.most)
        self.width = max(self.width, count)
        return staged([text[-1] for text in texts], self.head.device), count

    def read_states(self, texts: TokenIds) -> None:
        """Feed the head the states that the target added since the last call. The head stores them in its cache.

        States of rejected tokens are never used, because the head does not read beyond the texts.
        """
        _, positions = self.new_positions(texts)
        self.head.read(self.states_at(positions), positions, self.cache)
        self.cache.used = self.read = [len(text) - 1 for text in texts]


class BlockPasses(HeadPasses):
    """A DFlash head as a Decoder, to time its passes. A pass reads T states of zeros, and drafts T tokens."""

    def __init__(self, head: DFlash) -> None:
        super().__init__(head, head.config.context)

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in (*self.head.weights.values(), self.head.head))

    def forward(self, ids: Tensor, cache: Cache, last: int = 0, tree: Tree | None = None) -> Tensor:
        """Run a pass with the arguments and the result of Decoder.forward.

        If the head drafts fewer than T tokens, the last token's logits are repeated.
        """
        rows, width = ids.shape
        new = torch.arange(width, device=self.device)
        positions = staged(cache.used, self.device).unsqueeze(1) + new
        read = self.head.weights["fc.weight"].shape[1]
        self.head.read(self.head.embed.new_zeros(rows, width, read), positions, cache)
        cache.used = [used + width for used in cache.used]
        count = min(width, self.head.config.most)
        logits = self.head.text_logits(ids[:, -1:].expand(-1, count), cache)
        return logits[:, new.clamp_max(count - 1)[-(last or width) :]]
