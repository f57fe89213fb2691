"""Keep: what of a source survives. Choosing it from importance, and cutting weights by it through the axis table.

Not exact on one axis: fewer hidden dimensions change the mean in every RMSNorm. All other cuts of silent parts are.
"""

from collections.abc import Callable, Mapping

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from draftlab.checkpoint import layer_of
from draftlab.prune.importance import Importance
from draftlab.shape import Axis, Shape


class Keep(BaseModel):
    """Kept indices into the source, ascending. heads, kv_heads and ffn have one list per kept layer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: list[int]
    hidden: list[int]
    heads: list[list[int]]
    kv_heads: list[list[int]]
    ffn: list[list[int]]


def choose(importance: Importance, source: Shape, shape: Shape) -> Keep:
    """The most important parts that make shape; the first and the last layer stay as long as two do.

    Heads go by group, so that every kept kv head serves equally many queries: the best kv groups first, then the best
    heads inside each.
    """
    layers = _keep_layers(importance.layers, shape.layers)
    picked = [_keep_heads(importance.heads[layer], source, shape) for layer in layers]
    return Keep(
        layers=layers,
        hidden=_top(importance.hidden, shape.hidden),
        heads=[heads for heads, _ in picked],
        kv_heads=[kv_heads for _, kv_heads in picked],
        ffn=[_top(importance.ffn[layer], shape.ffn) for layer in layers],
    )


def keep_all(shape: Shape) -> Keep:
    every = list(range(shape.layers))
    return Keep(
        layers=every,
        hidden=list(range(shape.hidden)),
        heads=[list(range(shape.heads)) for _ in every],
        kv_heads=[list(range(shape.kv_heads)) for _ in every],
        ffn=[list(range(shape.ffn)) for _ in every],
    )


def cut(weights: Mapping[str, Tensor], shape: Shape, keep: Keep, advance: Callable[[int], None]) -> dict[str, Tensor]:
    """The tensors of the draft, of the given shape, read from the source's one at a time."""
    draft: dict[str, Tensor] = {}
    for done, (name, axes) in enumerate(shape.axes().items(), 1):
        layer = layer_of(name)
        source_name = name if layer is None else name.replace(f".{layer}.", f".{keep.layers[layer]}.", 1)
        tensor = weights[source_name]
        for dim, axis in enumerate(axes):
            kept = _kept_on(axis, layer, shape, keep)
            tensor = tensor if kept is None else tensor.index_select(dim, kept)
        draft[name] = tensor.contiguous()
        advance(done)
    return draft


def _kept_on(axis: Axis, layer: int | None, shape: Shape, keep: Keep) -> Tensor | None:
    """Source indices along an axis of a draft's layer; None where nothing is cut."""
    if axis == "hidden":
        return torch.tensor(keep.hidden)
    if layer is None or axis in ("vocab", "head_dim"):
        return None
    if axis == "ffn":
        return torch.tensor(keep.ffn[layer])
    heads = torch.tensor(keep.heads[layer] if axis == "q" else keep.kv_heads[layer])
    return (heads.unsqueeze(1) * shape.head_dim + torch.arange(shape.head_dim)).flatten()


def _keep_layers(scores: Tensor, count: int) -> list[int]:
    last = len(scores) - 1
    ends = [0, last] if count > 1 else [0]
    inner = [i for i in scores.argsort(descending=True, stable=True).tolist() if i not in (0, last)]
    return sorted((ends + inner)[:count])


def _keep_heads(scores: Tensor, source: Shape, shape: Shape) -> tuple[list[int], list[int]]:
    """Query heads and kv heads of one layer, group by group. scores: [H]."""
    by_group = scores.unflatten(0, (source.kv_heads, -1))  # [K, G]
    kv_heads = _top(by_group.sum(1), shape.kv_heads)
    per_group = shape.heads // shape.kv_heads
    group = by_group.shape[1]
    heads = [kv * group + i for kv in kv_heads for i in _top(by_group[kv], per_group)]
    return heads, kv_heads


def _top(scores: Tensor, count: int) -> list[int]:
    """Indices of the count largest, ascending; of equals the lower index."""
    return sorted(scores.argsort(descending=True, stable=True)[:count].tolist())
