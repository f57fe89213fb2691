"""Choose the layers, hidden dimensions, heads and neurons to keep, by importance or by the rule of a baseline.

Shapes: H query heads, K kv heads, G query heads per kv head.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from draftlab.model.shape import Shape
from draftlab.pruning.cut import Keep
from draftlab.pruning.importance import Scores


def choose(scores: Scores, source: Shape, shape: Shape, layers: list[int]) -> Keep:
    """Return the hidden dimensions, heads and neurons with the highest scores, as many as the draft's shape has.

    The function first chooses the kv heads whose query heads have the highest total score. Then it chooses the query
    heads with the highest scores in each chosen kv head, the same number in all of them.

    Args:
        source: Shape of the source.
        shape: Shape of the draft.
        layers: Layers of the source to keep.
    """
    picked = [_keep_heads(scores.heads[layer], source, shape) for layer in layers]
    return Keep(
        layers=layers,
        hidden=top(scores.hidden, shape.hidden),
        heads=[heads for heads, _ in picked],
        kv_heads=[kv_heads for _, kv_heads in picked],
        ffn=[top(scores.ffn[layer], shape.ffn) for layer in layers],
    )


def top(scores: Tensor, count: int) -> list[int]:
    """Return the indices of the `count` largest scores, ascending. Ties go to the lower index."""
    return sorted(scores.argsort(descending=True, stable=True)[:count].tolist())


def influential(layers: Tensor, count: int) -> list[int]:
    """Return the `count` layers that change the direction of the residual stream most.

    The first and the last layer are always among them. With count=1, the first layer is returned. The layers that are
    returned for the scores of the first layers of a model include all of these that are returned for all layers.

    layers: Scores of the layers, [L].
    """
    turns = layers.clone()
    turns[0] = torch.inf
    if count > 1:
        turns[-1] = torch.inf
    return top(turns, count)


def even(total: int, count: int) -> list[int]:
    """Return `count` out of `total` layers, evenly spaced from the first to the last."""
    return [round(i * (total - 1) / (count - 1)) for i in range(count)] if count > 1 else [0]


def random_scores(shape: Shape, seed: int) -> Scores:
    rng = torch.Generator().manual_seed(seed)
    return _scores(shape, lambda *size: torch.rand(size, generator=rng))


def first_scores(shape: Shape) -> Scores:
    """Return scores with which choose() keeps the lowest indices."""
    return _scores(shape, lambda *size: -torch.arange(size[-1], dtype=torch.float32).expand(size))


def _scores(shape: Shape, fill: Callable[..., Tensor]) -> Scores:
    return Scores(
        layers=fill(shape.layers),
        hidden=fill(shape.hidden),
        heads=fill(shape.layers, shape.heads),
        ffn=fill(shape.layers, shape.ffn),
    )


def _keep_heads(scores: Tensor, source: Shape, shape: Shape) -> tuple[list[int], list[int]]:
    """Return the query heads and kv heads to keep in a layer. scores: Scores of the H query heads, [H]."""
    by_group = scores.unflatten(0, (source.kv_heads, -1))  # [K, G]
    kv_heads = top(by_group.sum(1), shape.kv_heads)
    per_group = shape.heads // shape.kv_heads
    group = by_group.shape[1]
    heads: list[int] = []
    for kv in kv_heads:
        heads += [kv * group + i for i in top(by_group[kv], per_group)]
    return heads, kv_heads
