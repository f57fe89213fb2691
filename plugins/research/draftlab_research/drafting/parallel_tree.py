"""A parallel draft that drafts trees.

B rows (texts of a batch), V vocab.
"""

from collections.abc import Sequence

from torch import Tensor

from draftlab.drafters.parallel import offset_logits
from draftlab.engine.generate import Draft, TokenIds, fit_vocab
from draftlab.model.decoder import Decoder
from draftlab.model.parallel import mask_token
from draftlab.sampling import SamplingParams
from draftlab_research.drafting.tree import Siblings, TreeDrafter, draft_levels


class ParallelTreeDrafter(TreeDrafter):
    """A parallel draft that drafts a tree of fixed shape in one pass. Tokens of a level come from the same logits."""

    def __init__(self, model: Decoder, vocab: int | None, parents: Sequence[int], siblings: Siblings) -> None:
        """Create the drafter. Arguments: See TreeDrafter. Raises UserError: the model is not a parallel draft."""
        super().__init__(model, vocab, parents, siblings)
        self.token = mask_token(model)

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        parents, levels = self.parents[:count], self.levels[:count]
        logits = fit_vocab(offset_logits(self, self.token, texts, max(levels)), self.vocab)
        return draft_levels(logits, parents, self.siblings, sampling, uniform)
