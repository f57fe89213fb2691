"""Token trees that a model drafts level by level, and the search for the fastest tree.

B rows, N drafted tokens, V vocab. As in generate.Draft, `parents` has the node that each drafted token follows. Node 0
is the last token of the text.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from draftlab.engine.generate import Draft, ModelDrafter, fit_vocab
from draftlab.engine.verify import distribution, draw
from draftlab.model.decoder import Decoder, Parents, Tree
from draftlab.model.devices import staged
from draftlab.sampling import SamplingParams
from draftlab_research.rules import recursive

Siblings = Literal["top", "sampled", "distinct"]
# maps a path, as ranks in the draft's distributions, to the share of positions with these as the target's next tokens
PathShare = Callable[[tuple[int, ...]], float]


class TreeDrafter(ModelDrafter):
    """A draft model that drafts a tree of fixed shape, with one pass per level.

    parents: Node that each drafted token follows, level by level; node 0 is the last token of the text. siblings: How
    the children of a node are drawn: independently (sampled), without replacement (distinct), or the most probable
    tokens (top), which greedy decoding always takes. spare: Number of cache slots beyond the text and the tree.
    """

    spare = 0

    def __init__(
        self, model: Decoder, vocab: int | None, parents: Sequence[int], siblings: Siblings
    ) -> None:
        """Create the drafter. Raises ValueError: parents are not sorted by level."""
        self.parents = tuple(parents)
        self.siblings: Siblings = siblings
        self.levels = node_depths(parents)
        if self.levels != sorted(self.levels):
            raise ValueError(f"parents must be sorted by level: {parents}")
        super().__init__(model, vocab)

    def reset(self, rows: int, capacity: int) -> None:
        super().reset(rows, capacity + self.spare)

    def propose(
        self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor
    ) -> Draft:
        parents, levels = self.parents[:count], self.levels[:count]
        logits = fit_vocab(self.last_logits(texts), self.vocab)  # [B, nodes so far, V]
        ids, q = [], []
        for level in range(1, max(levels) + 1):
            if level > 1:
                logits = self.read(texts, ids, parents[: len(ids)])
            for token in [i for i, own in enumerate(levels) if own == level]:
                elder = [ids[i] for i in range(token) if parents[i] == parents[token]]
                child, drawn_from = draw_child(
                    logits[:, parents[token]], elder, self.siblings, sampling, uniform[:, token]
                )
                ids.append(child)
                q += [] if drawn_from is None else [drawn_from]
        # cached positions after the text belong to the tree
        self.cache.used = [len(text) for text in texts]
        return Draft(
            ids=torch.stack(ids, 1),
            q=torch.stack(q, 1) if q else None,
            counts=[len(ids)] * len(texts),
            parents=parents,
            rule=recursive,
        )

    def read(self, texts: Sequence[list[int]], ids: list[Tensor], parents: Parents) -> Tensor:
        """Return the logits after the text and after each drafted token, [B, nodes, V]."""
        last = staged([text[-1] for text in texts], self.model.device)
        fed = torch.stack([last, *ids], 1)
        if self.own_vocab is not None:
            fed = fed.clamp(max=self.own_vocab - 1)
        self.cache.used = [len(text) - 1 for text in texts]
        tree = Tree.from_parents(parents, self.model.device)
        return fit_vocab(self.model.forward(fed, self.cache, tree=tree), self.vocab)


def draw_child(
    logits: Tensor,
    elder: list[Tensor],
    siblings: Siblings,
    sampling: SamplingParams,
    uniform: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return the next child of a node, [B], and the distribution that it was drawn from, [B, V], or None if not drawn.

    logits: Logits after the node, [B, V]. elder: Children of the node so far, [B] each. uniform: Uniform draws, [B].
    """
    if sampling.temperature == 0 or siblings == "top":
        return logits.topk(len(elder) + 1).indices[:, -1], None
    q = distribution(logits, sampling)
    if siblings == "distinct":
        for sibling in elder:
            q = q.scatter(1, sibling.unsqueeze(1), 0)
        total = q.sum(1, keepdim=True)
        # if no token is left to draw, any distribution will do
        q = torch.where(total > 0, q / total, 1 / q.shape[1])
    return draw(q, uniform.to(q.device)), q


def draft_levels(
    logits: Tensor,
    parents: Sequence[int],
    siblings: Siblings,
    sampling: SamplingParams,
    uniform: Tensor,
) -> Draft:
    """Draft a tree in which all tokens of a level have the same distribution. logits: One per level, [B, levels, V]."""
    ids: list[Tensor] = []
    q: list[Tensor] = []
    for token, level in enumerate(node_depths(parents)):
        elder = [ids[i] for i in range(token) if parents[i] == parents[token]]
        child, drawn_from = draw_child(
            logits[:, level - 1], elder, siblings, sampling, uniform[:, token]
        )
        ids.append(child)
        q += [] if drawn_from is None else [drawn_from]
    return Draft(
        ids=torch.stack(ids, 1),
        q=torch.stack(q, 1) if q else None,
        counts=[len(ids)] * len(logits),
        parents=tuple(parents),
        rule=recursive,
    )


def full_tree(widths: Sequence[int]) -> tuple[int, ...]:
    """Return the parents, level by level, of a tree in which each node at depth j has widths[j] children."""
    parents: list[int] = []
    level = [0]
    for width in widths:
        start = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(start + 1, len(parents) + 1))
    return tuple(parents)


def node_depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of each token of a tree. Tokens that directly follow the text have depth 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent - 1] + 1 if parent else 1)
    return depths


def independent(ranked: Sequence[float]) -> PathShare:
    """Return a function from a path to its share, as if ranks did not depend on earlier tokens (Sequoia, 2402.12374).

    The share of a path is the share of positions at which the target's next tokens are that path.

    ranked: For each rank, the share of positions at which the target's token has this rank in the draft's distribution.
    """
    return lambda path: math.prod(ranked[rank] for rank in path)


def observed(texts: Sequence[np.ndarray], depth: int) -> PathShare:
    """Return a function from a path to the share of positions at which the target's next tokens are that path.

    Whole paths are counted, because a parallel draft with a wrong first token has wrong later tokens more often.

    texts: Rank of each of a text's n tokens in the draft's distributions, with a column for each offset, [n, K].
    """
    paths = []
    for ranks in texts:
        # paths do not extend beyond the end of a text
        ahead = np.pad(ranks, [(0, depth), (0, 0)], constant_values=-1)
        paths.append(np.stack([ahead[age : age + len(ranks), age] for age in range(depth)], 1))
    starts = np.concatenate(paths)  # [N, depth]
    shares: dict[tuple[int, ...], float] = {}
    for level in range(1, depth + 1):
        prefixes, counts = np.unique(starts[:, :level], axis=0, return_counts=True)
        shares |= dict(
            zip(map(tuple, prefixes.tolist()), (counts / len(starts)).tolist(), strict=True)
        )
    return lambda path: shares.get(path, 0.0)


def best_tree(
    share: PathShare, siblings: int, nodes: int, depth: int
) -> tuple[tuple[int, ...], float]:
    """Return the tree with the most expected tokens per pass, and that number of tokens.

    The tree has at most `nodes` nodes, `siblings` children per node and `depth` levels. share(path) is the share of
    positions at which the target's next tokens are that path. The best tree consists of the paths with the largest
    shares; Sequoia's dynamic program finds the same tree.
    """
    queue: list[tuple[float, tuple[int, ...]]] = [(-share((0,)), (0,))]
    chosen: list[tuple[int, ...]] = []
    tokens = 1.0
    while queue and len(chosen) < nodes:
        negative, path = heapq.heappop(queue)
        chosen.append(path)
        tokens -= negative
        following = [(*path[:-1], path[-1] + 1)] if path[-1] + 1 < siblings else []
        following += [(*path, 0)] if len(path) < depth else []
        for each in following:
            heapq.heappush(queue, (-share(each), each))
    # the sort is stable, so that siblings stay in the order of their ranks
    chosen.sort(key=len)
    number = {path: place for place, path in enumerate([(), *chosen])}
    return tuple(number[path[:-1]] for path in chosen), tokens


def fastest_tree(
    share: PathShare,
    step_ms: Callable[[int, int, float], float],
    siblings: int,
    nodes: int,
    depth: int,
) -> tuple[tuple[int, ...], float]:
    """Return the tree with the most expected tokens per millisecond, and that speed.

    The tree has at most `nodes` nodes, `siblings` children per node and `depth` levels. share: As in best_tree.
    step_ms: Function from a tree's depth, number of nodes and expected tokens per pass to the milliseconds of drafting
    and verifying the tree (Sequoia).
    """
    trees = [
        best_tree(share, siblings, n, d)
        for n in range(1, nodes + 1)
        for d in range(1, min(n, depth) + 1)
    ]

    def speed(tree: tuple[tuple[int, ...], float]) -> float:
        parents, tokens = tree
        return tokens / step_ms(max(node_depths(parents)), len(parents), tokens)

    best = max(trees, key=speed)
    return best[0], speed(best)
