"""Drafting with a DFlash head: the target's states are projected once per token, and one pass drafts all tokens.

B rows, T tokens, K drafted tokens, V vocab. In a text of n tokens the target has read n - 1 tokens, whose states are
the context. The last token begins the block. Each drafted token has its own q, which does not depend on the other
drafted tokens, so the rules for chains hold.
"""

from collections.abc import Sequence

from torch import Tensor

from draftlab.engine.drafters.states import StatesDrafter
from draftlab.engine.generate import Draft, Sampler
from draftlab.model.devices import staged
from draftlab.model.dflash import DFlash
from draftlab.sampling import SamplingParams


class DFlashDrafter(StatesDrafter[DFlash]):
    """Drafts a block after each text."""

    def prefill(self, texts: Sequence[list[int]]) -> None:
        """Read the states of the prompts."""
        self.read_states(texts)

    def propose(
        self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor
    ) -> Draft:
        self.read_states(texts)
        last = staged([text[-1] for text in texts], self.head.device)
        logits = self.head.block_logits(last, min(count, self.head.config.most), self.cache)
        ids, q = Sampler(sampling.unlimited(), self.vocab)(logits, uniform[:, : logits.shape[1]])
        return Draft(ids=ids, q=q, counts=[ids.shape[1]] * len(texts))

    def read_states(self, texts: Sequence[list[int]]) -> None:
        """Project the target's states that are new since the last call.

        States of rejected tokens are never used: their positions are read again when the target has read the new
        tokens.
        """
        _, positions = self.new_positions(texts)
        self.head.read(self.states_at(positions), positions, self.cache)
        self.cache.used = self.read = [len(text) - 1 for text in texts]
