"""Drafting with a parallel draft (PARD, 2504.18583): one pass drafts all tokens, all but the first from mask tokens.

B rows (texts of a batch), K drafted tokens, V vocab. As in vLLM's parallel_drafting, a pass reads the uncached tokens
of the texts and K - 1 mask tokens. Then the cache is rolled back to the texts. The distribution q of a drafted token
does not depend on the other drafted tokens, so the verify rules for chains and trees are lossless.
"""

from torch import Tensor

from draftlab.engine.generate import Draft, ModelDrafter, TokenIds, draw_each
from draftlab.errors import UserError
from draftlab.model.decoder import Decoder, feed
from draftlab.model.llama import Llama
from draftlab.sampling import SamplingParams


class ParallelDrafter(ModelDrafter):
    """Drafts a chain with a parallel draft, in one pass."""

    def __init__(self, model: Decoder, vocab: int | None = None) -> None:
        """Make a drafter. vocab: Same as in Sampler. Raises UserError: the model is not a parallel draft."""
        super().__init__(model, vocab)
        self.token = mask_token(model)

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        logits = offset_logits(self, self.token, texts, count)
        return draw_each(logits, uniform, sampling, self.vocab)


def offset_logits(drafter: ModelDrafter, token: int, texts: TokenIds, count: int) -> Tensor:
    """Return the logits of the next `count` tokens after each text, [B, count, V]. Only the texts stay in the cache.

    token: The mask token.
    """
    drafter.roll_back(texts)
    masked = [text + [token] * (count - 1) for text in texts]
    logits = feed(drafter.model, drafter.cache, masked, drafter.own_vocab, count)
    # drop the keys of mask tokens
    drafter.cache.used = [len(text) for text in texts]
    return logits


def mask_token(model: Decoder) -> int:
    """Return the mask token of a parallel draft. Raises UserError: the model is not a parallel draft."""
    token = model.pard_token if isinstance(model, Llama) else None
    if token is None:
        raise UserError(
            "the draft is not a parallel draft, because config.json has no pard_token; train a parallel draft with "
            "draftlab distill --student parallel"
        )
    return token


def drafts_in_parallel(model: Decoder) -> bool:
    """Return whether a draft model is a parallel draft."""
    return isinstance(model, Llama) and model.pard_token is not None


def model_drafter(model: Decoder, vocab: int | None) -> ModelDrafter:
    """Return a drafter for a draft model: a ParallelDrafter for a parallel draft, else a ModelDrafter."""
    return ParallelDrafter(model, vocab) if drafts_in_parallel(model) else ModelDrafter(model, vocab)
