"""llama.py's narrow passes as CUDA graphs: one launch replays a pass, or all that drafts K tokens, for any lengths.

B rows, T new tokens, K drafted tokens, S cached + new, V vocab. A graph is fixed to a shape, a cache's memory and a
bucket of S; where the rows stand is data. On a CPU the same static tensors are used and nothing is captured, which is
how its tests run.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.model.llama import Cache, Llama, Tree

BUCKET = 256  # S is rounded up to a multiple: what lies behind a row's own length is masked
WIDE = 64  # a pass over more tokens is bound by arithmetic, not by launches

Sampler = Callable[
    [Tensor, Tensor], tuple[Tensor, Tensor | None]
]  # of logits [B, V] and draws [B]: tokens, and their q


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


@dataclass(slots=True)
class _Chain:
    logits: Tensor  # [B, V], behind the texts
    used: Tensor  # [B, 1]
    uniform: Tensor  # [B, K]
    drafted: tuple[Tensor, Tensor | None]
    replay: Callable[[], object]


class CudaGraphLlama(Llama):
    """A Llama whose narrow passes are replayed. Shares the weights of the model it is made from.

    What a pass or a chain gives is overwritten by the next one of its shape.
    """

    def __init__(self, model: Llama) -> None:
        vars(self).update(vars(model))
        self._stores: list[_Store] = []
        self._graphs: dict[tuple[int, ...], _Graph] = {}
        self._chains: dict[tuple[object, ...], _Chain] = {}

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
        if tree is not None or ids.numel() > WIDE or not any(cache.used):  # prompts come in every length, and once
            return super().forward(ids, cache, last, tree)
        width = ids.shape[1]
        end = _end(cache, width)
        key = (cache.keys.data_ptr(), len(ids), width, last, end)
        if key not in self._graphs:
            self._graphs[key] = self._capture(ids, cache, last, end)
        graph = self._graphs[key]
        graph.ids.copy_(ids)
        graph.used.copy_(torch.tensor(cache.used).unsqueeze(1))
        graph.replay()
        cache.used = [used + width for used in cache.used]
        return graph.logits

    @torch.inference_mode()
    def draft_chain(
        self, logits: Tensor, cache: Cache, uniform: Tensor, choose: Sampler
    ) -> tuple[Tensor, Tensor | None]:
        """As chain, behind what the cache holds: the K choices and the K - 1 passes between them are one graph.

        choose: hashable; equal ones share a graph. Nothing in it may wait for the device.
        """
        rows, count = uniform.shape
        end = _end(cache, count - 1)
        key = (cache.keys.data_ptr(), rows, count, end, choose)
        if key not in self._chains:
            self._chains[key] = self._capture_chain(logits, cache, uniform, choose, end)
        graph = self._chains[key]
        graph.logits.copy_(logits)
        graph.uniform.copy_(uniform)
        graph.used.copy_(torch.tensor(cache.used).unsqueeze(1))
        graph.replay()
        cache.used = [used + count - 1 for used in cache.used]
        return graph.drafted

    def _capture_chain(self, logits: Tensor, cache: Cache, uniform: Tensor, choose: Sampler, end: int) -> _Chain:
        used = torch.tensor(cache.used, device=self.device).unsqueeze(1)
        keys, values = cache.keys.detach(), cache.values
        made = _Chain(logits.clone(), used, uniform.clone(), (used, None), lambda: None)

        def run() -> None:
            place = used

            def following(token: Tensor) -> Tensor:
                nonlocal place
                found = self.decode(token.unsqueeze(1), keys, values, self.attention_metadata(place, 1, end), 1)[:, -1]
                place = place + 1
                return found

            made.drafted = draft_chain(made.logits, made.uniform, choose, following)

        made.replay = capture(run) if self.device.type == "cuda" else run
        return made

    def _capture(self, ids: Tensor, cache: Cache, last: int, end: int) -> _Graph:
        ids, used = ids.clone(), torch.tensor(cache.used, device=self.device).unsqueeze(1)
        keys, values = cache.keys.detach(), cache.values  # the cache that is lent may die before the graph
        logits = torch.empty(
            *ids.shape[:1], last or ids.shape[1], self.shape.vocab, dtype=keys.dtype, device=self.device
        )

        def run() -> None:
            place = self.attention_metadata(used, ids.shape[1], end)
            logits.copy_(self.decode(ids, keys, values, place, last))

        return _Graph(ids, used, logits, capture(run) if self.device.type == "cuda" else run)


def _end(cache: Cache, width: int) -> int:
    """S of a graph that feeds so many tokens. Raises ValueError: they do not fit the cache."""
    end = max(cache.used) + width
    if end > cache.capacity:
        raise ValueError(f"{end} tokens do not fit a cache of {cache.capacity}")
    return min(cache.capacity, -(-end // BUCKET) * BUCKET)


def draft_chain(
    logits: Tensor, uniform: Tensor, choose: Sampler, following: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Tokens drafted one behind the other, [B, K], and the distributions they were drawn from, [B, K, V], if any.

    logits: behind the texts, [B, V]. uniform: draws in [0, 1), [B, K]. following: logits behind one more token, [B].
    """
    ids, q = [], []
    for draws in uniform.unbind(1):
        token, drawn_from = choose(following(ids[-1]) if ids else logits, draws)
        ids.append(token)
        q += [] if drawn_from is None else [drawn_from]
    return torch.stack(ids, 1), torch.stack(q, 1) if q else None


def capture(run: Callable[[], object]) -> Callable[[], object]:
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
