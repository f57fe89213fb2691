"""Token trees: drafted by a model level by level, and the tree that is worth its time.

B rows, N drafted tokens, V vocab. parents as in generate.Draft: the node that
each token follows, 0 the text's last token.
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
    """A draft model that drafts a tree of fixed shape, one pass per level.

    siblings: top, the most probable tokens; sampled, independently; distinct, without replacement. Greedy decoding
    always takes the most probable ones.
    """

    def __init__(self, model: Decoder, vocab: int | None, parents: Sequence[int], siblings: Siblings) -> None:
        """Raises ValueError: parents are not sorted by level."""
        self.parents, self.siblings = tuple(parents), siblings
        self.levels = node_depths(parents)
        if self.levels != sorted(self.levels):
            raise ValueError(f"parents are not sorted by level: {parents}")
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
                child, drawn_from = self._child(logits[:, parents[token]], elder, sampling, uniform[:, token])
                ids.append(child)
                q += [] if drawn_from is None else [drawn_from]
        self.cache.used = [len(text) for text in texts]  # the rest of the cache is a tree
        return Draft(
            ids=torch.stack(ids, 1), q=torch.stack(q, 1) if q else None, counts=[len(ids)] * len(texts), parents=parents
        )

    def _read(self, texts: Sequence[list[int]], ids: list[Tensor], parents: tuple[int, ...]) -> Tensor:
        """Return the logits after the text and after each token so far, [B, nodes, V]."""
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
        """Return a token [B] with elder siblings, and the distribution it was drawn from, [B, V]."""
        if sampling.temperature == 0 or self.siblings == "top":
            return logits.topk(len(elder) + 1).indices[:, -1], None
        q = distribution(logits, sampling)
        if self.siblings == "distinct":
            for sibling in elder:
                q = q.scatter(1, sibling.unsqueeze(1), 0)
            total = q.sum(1, keepdim=True)
            q = torch.where(total > 0, q / total, 1 / q.shape[1])  # no token is left to draw: any distribution will do
        return draw(q, uniform), q


def full_tree(widths: Sequence[int]) -> tuple[int, ...]:
    """Return the parents of a tree in which each node at depth j has widths[j] children, level by level."""
    parents: list[int] = []
    level = [0]
    for width in widths:
        start = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(start + 1, len(parents) + 1))
    return tuple(parents)


def node_depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of each token; 1 follows the text."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent - 1] + 1 if parent else 1)
    return depths


def best_tree(ranked: Sequence[float], nodes: int, depth: int) -> tuple[tuple[int, ...], float]:
    """Return the tree of limited nodes and depth that accepts most, and its tokens per pass.

    ranked: probability that the target's token is the draft's most probable one, the second, ..., the same at every
    position, as in Sequoia (2402.12374). The value of a node is the product of the probabilities on its path, so the
    best tree consists of the most valuable nodes: Sequoia's dynamic program finds the same tree.
    """
    queue = [(-ranked[0], 1, 0, 0, 1.0)]  # -value, depth, rank, parent's number, parent's value
    chosen: list[tuple[int, int, int]] = []  # depth, parent's number, rank
    tokens = 1.0
    while queue and len(chosen) < nodes:
        negative, level, rank, parent, parent_value = heapq.heappop(queue)
        chosen.append((level, parent, rank))
        tokens -= negative
        if rank + 1 < len(ranked):
            heapq.heappush(queue, (-parent_value * ranked[rank + 1], level, rank + 1, parent, parent_value))
        if level < depth:
            heapq.heappush(queue, (negative * ranked[0], level + 1, 0, len(chosen), -negative))
    return _by_level(chosen), tokens


def fastest_tree(
    ranked: Sequence[float], draft_ms: float, verify_ms: Callable[[int], float], nodes: int, depth: int
) -> tuple[tuple[int, ...], float]:
    """Return the tree of limited nodes and depth with the most tokens per millisecond, and that speed (Sequoia).

    draft_ms: time of one level. verify_ms: time of a target pass by its width.
    """
    trees = [best_tree(ranked, n, d) for n in range(1, nodes + 1) for d in range(1, min(n, depth) + 1)]

    def speed(tree: tuple[tuple[int, ...], float]) -> float:
        parents, tokens = tree
        return tokens / (max(node_depths(parents)) * draft_ms + verify_ms(len(parents) + 1))

    best = max(trees, key=speed)
    return best[0], speed(best)


def _by_level(chosen: list[tuple[int, int, int]]) -> tuple[int, ...]:
    """Return the parents of the chosen nodes, renumbered level by level, elder siblings first."""
    number = {0: 0}
    order = sorted(range(len(chosen)), key=lambda i: chosen[i][0])  # stable: an elder sibling was chosen earlier
    for place, i in enumerate(order, 1):
        number[i + 1] = place
    return tuple(number[chosen[i][1]] for i in order)
