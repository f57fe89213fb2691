"""Which layers, hidden dimensions, heads and neurons stay: by importance, or by a baseline's rule.

L layers, D hidden, H heads, K kv heads, F ffn.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from draftlab.model.checkpoint import layer_of
from draftlab.model.shape import Shape
from draftlab.prune.cut import Keep
from draftlab.prune.importance import Importance, Scores
from draftlab.prune.walk import Walk

Depth = Literal["influence", "contiguous", "even", "greedy"]


def choose(scores: Scores, source: Shape, shape: Shape, layers: list[int]) -> Keep:
    """The best parts that make shape, in the given layers.

    Heads go by group, so that every kept kv head serves equally many queries: the best kv groups first, then the best
    heads inside each.
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
    """Indices of the count largest, ascending; of equals the lower index."""
    return sorted(scores.argsort(descending=True, stable=True)[:count].tolist())


def influential(importance: Importance, count: int) -> list[int]:
    """The layers that turn their input most; the first and the last stay as long as two do."""
    scores = importance.scores.layers.clone()
    scores[0] = torch.inf
    if count > 1:
        scores[-1] = torch.inf
    return top(scores, count)


def contiguous(importance: Importance, count: int) -> list[int]:
    """All but the run of layers that together turn the stream least (Gromov et al., 2403.17887); the ends stay."""
    total = len(importance.distance) - 1
    gone = total - count
    starts = range(1, max(2, count))
    start = min(starts, key=lambda i: float(importance.distance[i, min(i + gone, total)]))
    return [i for i in range(total) if not start <= i < start + gone]


def even(total: int, count: int) -> list[int]:
    """Evenly spaced from the first to the last."""
    return [round(i * (total - 1) / (count - 1)) for i in range(count)] if count > 1 else [0]


@torch.inference_mode()
def greedy(walk: Walk, chunks: list[Tensor], count: int, advance: Callable[[int], None]) -> list[int]:
    """Drop one layer at a time: the one without which the model stays nearest to the whole one, by KL(whole || rest).

    SLEB (2402.09025) with the whole model's own output as the measure. Runs L + (L - 1) + ... partial models over
    chunks of token ids [1, T]: for sources that fit in memory.
    """
    total = len(walk.layers)
    streams = walk.embed(chunks)

    def log_probs(layers: list[int]) -> Tensor:
        found = streams
        for index in layers:
            with walk.layer(index) as (_, run):
                found = [run(stream) for stream in found]
        with walk.head() as (_, run):
            return torch.cat([run(stream)[0].float().log_softmax(-1) for stream in found])  # [N, V]

    kept = list(range(total))
    whole = log_probs(kept)
    while len(kept) > count:
        rest = [[i for i in kept if i != gone] for gone in kept]
        kept = min(rest, key=lambda layers: float((whole.exp() * (whole - log_probs(layers))).sum()))
        advance(total - len(kept))
    return kept


def random_scores(shape: Shape, seed: int) -> Scores:
    rng = torch.Generator().manual_seed(seed)
    return Scores(
        layers=torch.rand(shape.layers, generator=rng),
        hidden=torch.rand(shape.hidden, generator=rng),
        heads=torch.rand(shape.layers, shape.heads, generator=rng),
        ffn=torch.rand(shape.layers, shape.ffn, generator=rng),
    )


def first_scores(shape: Shape) -> Scores:
    """Whatever has the lower index."""

    def falling(*size: int) -> Tensor:
        return -torch.arange(size[-1], dtype=torch.float32).expand(size)

    return Scores(
        layers=falling(shape.layers),
        hidden=falling(shape.hidden),
        heads=falling(shape.layers, shape.heads),
        ffn=falling(shape.layers, shape.ffn),
    )


def magnitude_scores(weights: Mapping[str, Tensor], shape: Shape) -> Scores:
    """Norms of the weights alone: of all rows and columns that a part owns."""
    squares = Scores(
        layers=torch.zeros(shape.layers),
        hidden=torch.zeros(shape.hidden),
        heads=torch.zeros(shape.layers, shape.heads),
        ffn=torch.zeros(shape.layers, shape.ffn),
    )
    for name, axes in shape.axes().items():
        square = weights[name].float().square()
        layer = layer_of(name)
        for dim, axis in enumerate(axes):
            others = [d for d in range(len(axes)) if d != dim]
            along = square.sum(others) if others else square
            if axis == "hidden":
                squares.hidden.add_(along)
            elif axis == "q" and layer is not None:
                squares.heads[layer].add_(along.unflatten(0, (shape.heads, shape.head_dim)).sum(-1))
            elif axis == "ffn" and layer is not None:
                squares.ffn[layer].add_(along)
        if layer is not None:
            squares.layers[layer] += square.sum()
    return squares


def _keep_heads(scores: Tensor, source: Shape, shape: Shape) -> tuple[list[int], list[int]]:
    """Query heads and kv heads of one layer, group by group. scores: [H]."""
    by_group = scores.unflatten(0, (source.kv_heads, -1))  # [K, G]
    kv_heads = top(by_group.sum(1), shape.kv_heads)
    per_group, group = shape.heads // shape.kv_heads, by_group.shape[1]
    heads = [kv * group + i for kv in kv_heads for i in top(by_group[kv], per_group)]
    return heads, kv_heads
