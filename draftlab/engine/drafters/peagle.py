"""P-EAGLE (2602.01469): a head drafts all tokens in one pass, which reads the target's new states and mask tokens.

B rows (texts of a batch), T positions, K drafted tokens, D hidden, V vocab. Positions are those of EAGLE-3, see
eagle.py. The mask tokens follow the last position. The distribution q of a drafted token does not depend on the other
drafted tokens, so the verify rules for chains are lossless.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from draftlab.engine.drafters.eagle import EagleDrafter
from draftlab.engine.generate import Draft, TokenIds, draw_each
from draftlab.model.devices import staged
from draftlab.sampling import SamplingParams


class PEagleDrafter(EagleDrafter):
    """Drafts a chain with one pass of a P-EAGLE head."""

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        assert self.head.mask is not None  # model/peagle.py sets it
        token, state = self.head.mask
        starts, places = self.new_positions(texts)
        states = F.pad(self.head.combine(self.states_at(places)), (0, 0, 0, count - 1))
        new = torch.arange(states.shape[1], device=states.device)
        unread = [len(text) - 1 - start for text, start in zip(texts, starts, strict=True)]
        masked = new >= staged(unread, states.device).unsqueeze(1)
        states = torch.where(masked.unsqueeze(-1), state, states)  # [B, T + K - 1, D]
        logits, _, at = self.run(texts, starts, states, token)
        chosen = (at - at.min()).unsqueeze(1) + new[:count]
        logits = logits.gather(1, chosen.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
        return draw_each(logits, uniform, sampling, self.vocab)
