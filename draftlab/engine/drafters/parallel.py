"""Drafting with a parallel draft (PARD, 2504.18583): all tokens from one pass, each from its own mask token.

B rows, K drafted tokens, N tokens of a tree, V vocab. A pass reads what the cache lacks of the texts and K - 1 mask
tokens, as vLLM's parallel_drafting does; the cache is then rolled back to the texts. Each token is drawn from its own
q, which does not depend on the other drafted tokens, so the rules for chains and trees hold.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftlab.engine.drafters.tree import Siblings, TreeDrafter
from draftlab.engine.generate import Draft, ModelDrafter, Sampler, fit_vocab
from draftlab.errors import UserError
from draftlab.model.decoder import Decoder, feed
from draftlab.model.llama import Llama
from draftlab.sampling import SamplingParams


class ParallelDrafter(ModelDrafter):
    """A parallel draft that drafts a chain."""

    def __init__(self, model: Decoder, vocab: int | None = None) -> None:
        """Raises UserError: not a parallel draft."""
        super().__init__(model, vocab)
        self.token = mask_token(model)

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        logits = offset_logits(self, self.token, texts, count)
        ids, q = Sampler(sampling.unlimited(), self.vocab)(logits, uniform[:, :count])
        return Draft(ids=ids, q=q, counts=[count] * len(texts))


class ParallelTreeDrafter(TreeDrafter):
    """A parallel draft that drafts a tree of fixed shape: the nodes of a level have one distribution."""

    def __init__(self, model: Decoder, vocab: int | None, parents: Sequence[int], siblings: Siblings) -> None:
        """Raises UserError: not a parallel draft."""
        super().__init__(model, vocab, parents, siblings)
        self.token = mask_token(model)

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        parents, levels = self.parents[:count], self.levels[:count]
        logits = fit_vocab(offset_logits(self, self.token, texts, max(levels)), self.vocab)
        ids: list[Tensor] = []
        q: list[Tensor] = []
        for token, level in enumerate(levels):
            elder = [ids[i] for i in range(token) if parents[i] == parents[token]]
            child, drawn_from = self._child(logits[:, level - 1], elder, sampling, uniform[:, token])
            ids.append(child)
            q += [] if drawn_from is None else [drawn_from]
        return Draft(
            ids=torch.stack(ids, 1), q=torch.stack(q, 1) if q else None, counts=[count] * len(texts), parents=parents
        )


def offset_logits(drafter: ModelDrafter, token: int, texts: Sequence[list[int]], count: int) -> Tensor:
    """Return the logits of each offset after the texts, [B, count, V], and leave the cache at the texts."""
    drafter.roll_back(texts)
    masked = [text + [token] * (count - 1) for text in texts]
    logits = feed(drafter.model, drafter.cache, masked, drafter.own_vocab, count)
    drafter.cache.used = [len(text) for text in texts]  # keys of mask tokens are not those of the text
    return logits


def mask_token(model: Decoder) -> int:
    """Return the mask token of a parallel draft. Raises UserError: it is none."""
    token = model.pard_token if isinstance(model, Llama) else None
    if token is None:
        raise UserError("the draft has no pard_token in its config.json; draftlab distill --parallel trains one")
    return token


def drafts_in_parallel(model: Decoder) -> bool:
    """Return whether a draft model is a parallel draft."""
    return isinstance(model, Llama) and model.pard_token is not None


def model_drafter(model: Decoder, vocab: int | None) -> ModelDrafter:
    """Return the drafter of a draft model: in one pass for a parallel draft, else in one for each token."""
    return ParallelDrafter(model, vocab) if drafts_in_parallel(model) else ModelDrafter(model, vocab)
