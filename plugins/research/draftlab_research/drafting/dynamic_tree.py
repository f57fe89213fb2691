"""EAGLE-2's dynamic tree (Li et al. 2024, 2406.16858): the tokens whose paths are most probable under the draft.

B rows (texts of a batch), N drafted tokens, M candidates, V vocab. The value of a token is the sum of the draft's
log-probabilities on its path. On each level, the draft reads the topk candidates of highest value, and each of them has
topk children. The N candidates of highest value are drafted. A parent's value is at least that of its child, so these
candidates form a tree. The tree depends only on the text, so q is one-hot, and verification is lossless.
"""

from typing import Any

import torch
from torch import Tensor

from draftlab.engine.generate import Draft, Drafter, TokenIds, fit_vocab
from draftlab.sampling import SamplingParams
from draftlab_research.drafting.tree import TreeDrafter
from draftlab_research.rules import recursive


class DynamicTreeDrafter(Drafter):
    """A drafter of dynamic trees. A TreeDrafter computes their logits, level by level."""

    def __init__(self, reader: TreeDrafter, topk: int, depth: int) -> None:
        """Create the drafter.

        reader: Drafter that computes the logits; its own tree is not used. topk: Number of candidates that are read on
        each level, and number of children of each of them. depth: Number of levels.
        """
        self.reader, self.topk, self.depth = reader, topk, depth

    def reset(self, rows: int, capacity: int) -> None:
        # all candidates that are read have a place in the cache
        self.reader.reset(rows, capacity + self.topk * (self.depth - 1))

    def attach(self, cache: Any) -> None:
        self.reader.attach(cache)

    def prefill(self, texts: TokenIds) -> None:
        self.reader.prefill(texts)

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        # [B, candidates read in the last pass, V]
        logits = fit_vocab(self.reader.last_logits(texts), self.reader.vocab)
        rows, value = len(texts), logits.new_zeros(len(texts), 1, dtype=torch.float32)
        number, read = (
            torch.zeros_like(value, dtype=torch.long),
            torch.zeros_like(value, dtype=torch.long),
        )
        # tokens, values and parents of candidates, [B, .] each
        levels: list[tuple[Tensor, Tensor, Tensor]] = []
        ids: list[Tensor] = []  # candidates that the model reads
        parents = number[:, :0]  # parent of each read candidate, as an index among read candidates
        for level in range(self.depth):
            if level:
                logits = self.reader.read(texts, ids, _rows(parents))[:, -number.shape[1] :]
            best = logits.float().log_softmax(-1).clamp_max(0).topk(min(self.topk, logits.shape[-1]))
            values = (value.unsqueeze(-1) + best.values).flatten(1)
            tokens, children = best.indices.flatten(1), best.values.shape[-1]
            first = 1 + sum(kept.shape[1] for kept, *_ in levels)
            levels.append((tokens, values, number.repeat_interleave(children, 1)))
            value, chosen = values.topk(min(self.topk, values.shape[1]))
            parents = torch.cat([parents, read.gather(1, chosen // children)], 1)
            read = (torch.arange(value.shape[1], device=value.device) + len(ids) + 1).expand(rows, -1)
            number, ids = first + chosen, [*ids, *tokens.gather(1, chosen).unbind(1)]
        # drop the cached positions after the text, which hold the tree
        self.reader.cache.used = [len(text) for text in texts]
        tokens, values, number = (torch.cat(part, 1) for part in zip(*levels, strict=True))
        return _most_valuable(tokens, values, number, count)


def _most_valuable(tokens: Tensor, values: Tensor, parents: Tensor, count: int) -> Draft:
    """Return a draft of the `count` candidates of highest value in each row, in descending order of value.

    If a row has room for fewer tokens, it verifies only the first tokens, which form the best tree of that size.

    tokens, values: Token ids and values of the candidates, [B, M] each. parents: Index of each candidate's parent among
    the candidates, counted from 1; 0 is the last token of the text.
    """
    # the sort is stable, so that parents stay before children of equal value
    order = values.sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, :count]
    place = parents.new_zeros(len(parents), parents.shape[1] + 1)
    numbers = torch.arange(1, chosen.shape[1] + 1, device=chosen.device).expand_as(chosen)
    place.scatter_(1, chosen + 1, numbers)
    kept = place.gather(1, parents.gather(1, chosen))
    counts = [chosen.shape[1]] * len(tokens)
    return Draft(ids=tokens.gather(1, chosen), q=None, counts=counts, parents=_rows(kept), rule=recursive)


def _rows(parents: Tensor) -> list[tuple[int, ...]]:
    return [tuple(row) for row in parents.tolist()]
