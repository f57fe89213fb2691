"""llama.py's narrow passes as CUDA graphs: one launch replays a whole pass, for any lengths of its rows.

B rows, T new tokens, S cached + new, V vocab. A graph is fixed to a shape, a cache's memory and a bucket of S; where
the rows stand is data. On a CPU the same static tensors are used and nothing is captured, which is how its tests run.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.llama import Cache, Llama, Tree

BUCKET = 256  # S is rounded up to a multiple: what lies behind a row's own length is masked
WIDE = 64  # a pass over more tokens is bound by arithmetic, not by launches


@dataclass(slots=True)
class _Store:
    """A cache's memory, lent to one cache at a time, so that its graphs serve the next text, too."""

    keys: Tensor
    values: Tensor
    lent: weakref.ref[Tensor]


@dataclass(frozen=True, slots=True)
class _Graph:
    ids: Tensor  # [B, T]
    used: Tensor  # [B, 1]
    logits: Tensor  # [B, last, V]
    replay: Callable[[], object]


class Graphed(Llama):
    """A Llama whose narrow passes are replayed. Shares the weights of the model it is made from.

    The logits of a pass are overwritten by the next one of its shape.
    """

    def __init__(self, model: Llama) -> None:
        vars(self).update(vars(model))
        self._stores: list[_Store] = []
        self._graphs: dict[tuple[int, ...], _Graph] = {}

    def new_cache(self, rows: int, capacity: int) -> Cache:
        self.check_fits(capacity)
        size = (self.shape.layers, rows, self.shape.kv_heads, -(-capacity // BUCKET) * BUCKET, self.shape.head_dim)
        free = (s for s in self._stores if s.keys.shape == size and s.lent() is None)
        store = next(free, None)
        if store is None:
            keys, values = self.embed.new_zeros(size), self.embed.new_zeros(size)
            self._stores.append(store := _Store(keys, values, weakref.ref(keys)))
        lent = store.keys.view_as(store.keys)  # dies with the cache that it is lent to
        store.lent = weakref.ref(lent)
        return Cache(lent, store.values)

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: Cache, last: int = 0, tree: Tree | None = None) -> Tensor:
        width, end = ids.shape[1], max(cache.used) + ids.shape[1]
        if tree is not None or ids.numel() > WIDE:
            return super().forward(ids, cache, last, tree)
        if end > cache.capacity:
            raise ValueError(f"{end} tokens do not fit a cache of {cache.capacity}")
        end = min(cache.capacity, -(-end // BUCKET) * BUCKET)
        key = (cache.keys.data_ptr(), len(ids), width, last, end)
        if key not in self._graphs:
            self._graphs[key] = self._capture(ids, cache, last, end)
        graph = self._graphs[key]
        graph.ids.copy_(ids)
        graph.used.copy_(torch.tensor(cache.used).unsqueeze(1))
        graph.replay()
        cache.used = [used + width for used in cache.used]
        return graph.logits

    def _capture(self, ids: Tensor, cache: Cache, last: int, end: int) -> _Graph:
        ids, used = ids.clone(), torch.tensor(cache.used, device=self.device).unsqueeze(1)
        keys, values = cache.keys.detach(), cache.values  # the cache that is lent may die before the graph
        logits = torch.empty(
            *ids.shape[:1], last or ids.shape[1], self.shape.vocab, dtype=keys.dtype, device=self.device
        )

        def run() -> None:
            place = self.placed(used, ids.shape[1], end)
            logits.copy_(self.decode(ids, keys, values, place, last))

        return _Graph(ids, used, logits, captured(run) if self.device.type == "cuda" else run)


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """run as one CUDA graph, to be replayed on the tensors that it holds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # libraries choose kernels and allocate before they may be captured
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(alive: Callable[[], object] = run) -> None:  # the graph reads and writes the tensors that run holds
        graph.replay()

    return replay
