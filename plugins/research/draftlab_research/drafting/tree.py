"""Token trees that a model drafts level by level, and the search for the fastest tree.

B rows (texts of a batch), N drafted tokens, V vocab. As in generate.Draft, `parents` holds the parent node of each
drafted token. Node 0 is the last token of the text, and node i + 1 is drafted token i.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from draftlab.engine.generate import Draft, ModelDrafter, TokenIds, fit_vocab
from draftlab.engine.verify import distribution, draw
from draftlab.model.decoder import Decoder, Parents, Tree
from draftlab.model.devices import staged
from draftlab.sampling import SamplingParams
from draftlab_research.rules import recursive

Siblings = Literal["top", "sampled", "distinct"]
# A path is given by the rank of each token in the draft's distribution, 0 for the most probable token. The function
# returns its share: the fraction of positions at which the target's next tokens have these ranks.
PathShare = Callable[[tuple[int, ...]], float]


class TreeDrafter(ModelDrafter):
    """A draft model that drafts a tree of fixed shape, with one pass per level.

    parents: Parent node of each drafted token, level by level. siblings: How the children of a node are chosen: drawn
    independently (sampled), drawn without replacement (distinct), or the most probable tokens (top). Greedy decoding
    always takes the most probable tokens.
    """

    def __init__(self, model: Decoder, vocab: int | None, parents: Sequence[int], siblings: Siblings) -> None:
        """Create the drafter. Raises ValueError: parents are not sorted by level."""
        self.parents = tuple(parents)
        self.siblings: Siblings = siblings
        self.levels = node_depths(parents)
        if self.levels != sorted(self.levels):
            raise ValueError(f"parents must be sorted by level: {parents}")
        super().__init__(model, vocab)

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        parents, levels = self.parents[:count], self.levels[:count]
        logits = fit_vocab(self.last_logits(texts), self.vocab)  # [B, nodes of finished levels, V]

        def logits_before(token: int, ids: list[Tensor]) -> Tensor:
            nonlocal logits
            if token and levels[token] > levels[token - 1]:
                logits = self.read(texts, ids, parents[:token])
            return logits[:, parents[token]]

        draft = draft_tree(parents, self.siblings, sampling, uniform, logits_before)
        # drop the cached positions after the text, which hold the tree
        self.cache.used = [len(text) for text in texts]
        return draft

    def read(self, texts: TokenIds, ids: list[Tensor], parents: Parents) -> Tensor:
        """Run a pass over the tree. Return the logits after the text and after each drafted token, [B, nodes, V].

        ids: Tokens drafted so far, [B] each. parents: Parent node of each drafted token.
        """
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
    """Return the next child of a node, [B], and the distribution q, [B, V], that it was drawn from.

    q is None if the child is the next most probable token, as in greedy decoding.

    logits: Logits after the node, [B, V]. elder: Earlier children of the node, [B] each. uniform: Uniform draws, [B].
    """
    if sampling.temperature == 0 or siblings == "top":
        return logits.topk(len(elder) + 1).indices[:, -1], None
    q = distribution(logits, sampling)
    if siblings == "distinct":
        for sibling in elder:
            q = q.scatter(1, sibling.unsqueeze(1), 0)
        total = q.sum(1, keepdim=True)
        # if no token is left to draw, q is uniform; any distribution would do
        q = torch.where(total > 0, q / total, 1 / q.shape[1])
    return draw(q, uniform.to(q.device)), q


def draft_tree(
    parents: Sequence[int],
    siblings: Siblings,
    sampling: SamplingParams,
    uniform: Tensor,
    logits_before: Callable[[int, list[Tensor]], Tensor],
) -> Draft:
    """Draft the tokens of a tree, one after the other.

    logits_before: Function that returns the logits of a token, [B, V], from its index and from all earlier tokens,
    [B] each.
    """
    ids: list[Tensor] = []
    q: list[Tensor] = []
    for token, parent in enumerate(parents):
        elder = [ids[i] for i in range(token) if parents[i] == parent]
        logits = logits_before(token, ids)
        child, drawn_from = draw_child(logits, elder, siblings, sampling, uniform[:, token])
        ids.append(child)
        q += [] if drawn_from is None else [drawn_from]
    return Draft(
        ids=torch.stack(ids, 1),
        q=torch.stack(q, 1) if q else None,
        counts=[len(ids)] * len(uniform),
        parents=tuple(parents),
        rule=recursive,
    )


def draft_levels(
    logits: Tensor,
    parents: Sequence[int],
    siblings: Siblings,
    sampling: SamplingParams,
    uniform: Tensor,
) -> Draft:
    """Draft a tree in which all tokens of a level come from the same logits.

    logits: Logits of each level, [B, levels, V].
    """
    levels = node_depths(parents)
    return draft_tree(parents, siblings, sampling, uniform, lambda token, _: logits[:, levels[token] - 1])


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
    """Return a PathShare that assumes that ranks do not depend on earlier tokens (Sequoia, 2402.12374).

    ranked: For each rank, the fraction of positions at which the target's token has this rank in the draft's
    distribution.
    """
    return lambda path: math.prod(ranked[rank] for rank in path)


def observed(texts: Sequence[np.ndarray], depth: int) -> PathShare:
    """Return a PathShare that counts whole paths in texts.

    In a parallel draft, later tokens are wrong more often after a wrong first token, so ranks are not independent.

    texts: Rank of each of a text's n tokens in the draft's distributions, with a column for each offset, [n, offsets].
    depth: Length of the longest counted paths, at most the number of offsets. Longer paths have the share 0.
    """
    paths = []
    for ranks in texts:
        # paths do not extend beyond the end of a text
        ahead = np.pad(ranks, [(0, depth), (0, 0)], constant_values=-1)
        paths.append(np.stack([ahead[age : age + len(ranks), age] for age in range(depth)], 1))
    starts = np.concatenate(paths)  # [positions, depth]
    shares: dict[tuple[int, ...], float] = {}
    for level in range(1, depth + 1):
        prefixes, counts = np.unique(starts[:, :level], axis=0, return_counts=True)
        shares |= dict(zip(map(tuple, prefixes.tolist()), (counts / len(starts)).tolist(), strict=True))
    return lambda path: shares.get(path, 0.0)


def best_tree(share: PathShare, siblings: int, nodes: int, depth: int) -> tuple[tuple[int, ...], float]:
    """Return the parents of the tree with the most expected tokens per target pass, and that number of tokens.

    The number includes the token of the target. The tree has at most `nodes` drafted tokens, `siblings` children per
    node and `depth` levels. It consists of the paths with the largest shares. Sequoia's dynamic program finds the same
    tree.
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
    """Return the parents of the tree with the most expected tokens per millisecond, and that speed (Sequoia).

    The tree has at most `nodes` drafted tokens, `siblings` children per node and `depth` levels. step_ms: Function from
    a tree's depth, number of drafted tokens and expected tokens per target pass to the milliseconds of drafting and
    verifying the tree.
    """
    trees = [best_tree(share, siblings, n, d) for n in range(1, nodes + 1) for d in range(1, min(n, depth) + 1)]

    def speed(tree: tuple[tuple[int, ...], float]) -> float:
        parents, tokens = tree
        return tokens / step_ms(max(node_depths(parents)), len(parents), tokens)

    best = max(trees, key=speed)
    return best[0], speed(best)
