"""Token trees: drafted by a model level by level, and which shape is worth its time.

B rows, N drafted tokens, V vocab. parents as in generate.Draft: of each token its node, 0 the text's last token.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from draftlab.engine.generate import Draft, ModelDrafter, fit_vocab
from draftlab.engine.verify import distribution, draw
from draftlab.model.decoder import Decoder
from draftlab.model.llama import Tree
from draftlab.sampling import SamplingParams

Siblings = Literal["top", "sampled", "distinct"]


class TreeDrafter(ModelDrafter):
    """A model that drafts a tree of a fixed shape, one pass per level.

    siblings: the most probable tokens; or drawn independently; or drawn without replacement. Greedily always the first.
    """

    def __init__(self, model: Decoder, vocab: int | None, parents: Sequence[int], siblings: Siblings) -> None:
        """Raises ValueError: a token before one of a level above it."""
        self.parents, self.siblings = tuple(parents), siblings
        self.levels = depths(parents)
        if self.levels != sorted(self.levels):
            raise ValueError(f"a tree is given level by level: {parents}")
        super().__init__(model, vocab)

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        parents, levels = self.parents[:count], self.levels[:count]
        logits = fit_vocab(self.last_logits(texts), self.vocab)  # [B, nodes so far, V]
        ids, q = [], []
        for level in range(1, max(levels) + 1):
            if level > 1:
                logits = self._read(texts, ids, parents)
            for token in [i for i, own in enumerate(levels) if own == level]:
                elder = [ids[i] for i in range(token) if parents[i] == parents[token]]
                found = self._child(logits[:, parents[token]], elder, sampling, uniform[:, token])
                ids.append(found[0])
                q += [] if found[1] is None else [found[1]]
        self.cache.used = [len(text) for text in texts]  # what lies behind is a tree
        return Draft(
            ids=torch.stack(ids, 1), q=torch.stack(q, 1) if q else None, counts=[len(ids)] * len(texts), parents=parents
        )

    def _read(self, texts: Sequence[list[int]], ids: list[Tensor], parents: tuple[int, ...]) -> Tensor:
        """Logits behind the text and each token so far, [B, nodes, V]."""
        last = torch.tensor([text[-1] for text in texts], device=self.model.device)
        fed = torch.stack([last, *ids], 1)
        if self.own_vocab is not None:
            fed = fed.clamp(max=self.own_vocab - 1)
        self.cache.used = [len(text) - 1 for text in texts]
        tree = Tree.from_parents(parents[: len(ids)], self.model.device)
        return fit_vocab(self.model.forward(fed, self.cache, tree=tree), self.vocab)

    def _child(
        self, logits: Tensor, elder: list[Tensor], sampling: SamplingParams, uniform: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """A token [B] beside its elder siblings, and what it was drawn from, [B, V]."""
        if sampling.temperature == 0 or self.siblings == "top":
            return logits.topk(len(elder) + 1).indices[:, -1], None
        q = distribution(logits, sampling)
        if self.siblings == "distinct":
            for one in elder:
                q = q.scatter(1, one.unsqueeze(1), 0)
            total = q.sum(1, keepdim=True)
            q = torch.where(total > 0, q / total, 1 / q.shape[1])  # nothing is left to draw: any distribution will do
        return draw(q, uniform), q


def full(widths: Sequence[int]) -> tuple[int, ...]:
    """parents of a tree in which each node at depth j has widths[j] children, level by level."""
    parents: list[int] = []
    level = [0]
    for width in widths:
        began = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(began + 1, len(parents) + 1))
    return tuple(parents)


def depths(parents: Sequence[int]) -> list[int]:
    """Of each token; 1 follows the text."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent - 1] + 1 if parent else 1)
    return found


def most_accepted(ranked: Sequence[float], nodes: int, depth: int) -> tuple[tuple[int, ...], float]:
    """The tree of at most so many nodes and levels that keeps most, and the tokens that it emits per pass.

    ranked: chance that the target's token is the draft's most probable, the second, ...; the same at each place, as in
    Sequoia (2402.12374). A node is worth the product of the chances on its path, so the best tree is the nodes that are
    worth most: Sequoia's dynamic program finds the same.
    """
    waiting = [(-ranked[0], 1, 0, 0, 1.0)]  # worth, depth, rank, parent's number, parent's worth
    chosen: list[tuple[int, int, int]] = []  # depth, parent's number, rank
    kept = 1.0
    while waiting and len(chosen) < nodes:
        worth, level, rank, parent, above = heapq.heappop(waiting)
        chosen.append((level, parent, rank))
        kept -= worth
        if rank + 1 < len(ranked):
            heapq.heappush(waiting, (-above * ranked[rank + 1], level, rank + 1, parent, above))
        if level < depth:
            heapq.heappush(waiting, (worth * ranked[0], level + 1, 0, len(chosen), -worth))
    return _by_level(chosen), kept


def fastest(
    ranked: Sequence[float], draft_ms: float, verify_ms: Callable[[int], float], nodes: int, depth: int
) -> tuple[tuple[int, ...], float]:
    """The tree that emits most tokens per millisecond, and how many (Sequoia, hardware-aware).

    draft_ms: time of one level; verify_ms: of a pass over so many tokens. At most so many nodes and levels are tried.
    """
    tried = [most_accepted(ranked, n, d) for n in range(1, nodes + 1) for d in range(1, min(n, depth) + 1)]

    def speed(found: tuple[tuple[int, ...], float]) -> float:
        parents, tokens = found
        return tokens / (max(depths(parents)) * draft_ms + verify_ms(len(parents) + 1))

    best = max(tried, key=speed)
    return best[0], speed(best)


def _by_level(chosen: list[tuple[int, int, int]]) -> tuple[int, ...]:
    """parents, numbered level by level and elder siblings first."""
    number = {0: 0}
    order = sorted(range(len(chosen)), key=lambda i: chosen[i][0])  # stable: an elder sibling was chosen earlier
    for place, i in enumerate(order, 1):
        number[i + 1] = place
    return tuple(number[chosen[i][1]] for i in order)
