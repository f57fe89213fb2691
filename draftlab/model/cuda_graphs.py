"""CUDA graphs of llama.py's narrow passes: one launch replays a pass, or the drafting of K tokens, for any lengths.

B rows, T new tokens, K drafted tokens, S cached + new, D hidden, V vocab. A graph has a fixed shape, cache memory and
bucket of S, and reads the rows' lengths from a tensor. On a CPU, as in tests, the same static tensors are used without
capture.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftlab.model.decoder import (
    AttentionMetadata,
    Drafted,
    Sampler,
    Tree,
    draft_chain,
    end_of_pass,
)
from draftlab.model.devices import staged
from draftlab.model.llama import Cache, LayerStates, Llama

BUCKET = 256  # S is rounded up to a multiple of it; positions after a row's end are masked
WIDE = 512  # wider passes are limited by arithmetic, not by launches

Result = TypeVar("Result")


@dataclass(slots=True)
class _Store:
    """Memory for one cache at a time. Later caches of the same or a shorter length reuse the memory and its graphs."""

    keys: Tensor
    values: Tensor
    user: weakref.ref[Tensor]
    # keys: layer ids
    layer_states: dict[tuple[int, ...], LayerStates] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Graph:
    ids: Tensor  # [B, T]
    used: Tensor  # [B, 1]
    logits: Tensor  # [B, last, V]
    states: Tensor | None  # states of an EAGLE-3 head, [B, T, D]; overwritten by its new states
    replay: Callable[[], object]


@dataclass(slots=True)
class _Chain:
    logits: Tensor  # [B, V], after the texts
    state: Tensor | None  # state of an EAGLE-3 head, [B, 1, D]
    used: Tensor  # [B, 1]
    uniform: Tensor  # [B, K]
    replay: Callable[[], Drafted]


class CudaGraphLlama(Llama):
    """A Llama whose narrow passes are replayed graphs. It shares the weights of another Llama.

    The next pass or chain of the same shape overwrites the outputs.
    """

    def __init__(self, model: Llama) -> None:
        vars(self).update(vars(model))
        self._stores: list[_Store] = []
        self._graphs: dict[tuple[int, ...], _Graph] = {}
        self._chains: dict[tuple[object, ...], _Chain] = {}
        # Graphs of passes share one pool, because their logits are in other memory. Each chain has its own pool.
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    @property
    def replays_passes(self) -> bool:
        return True

    def new_cache(self, rows: int, capacity: int) -> Cache:
        self.check_fits(capacity)
        length = -(-capacity // BUCKET) * BUCKET
        free = [s for s in self._stores if s.keys.shape[1] == rows and s.user() is None]
        store = min(
            (s for s in free if s.keys.shape[3] >= length),
            key=lambda s: s.keys.shape[3],
            default=None,
        )
        if store is None:
            self._drop(free)
            size = (self.shape.layers, rows, self.shape.kv_heads, length, self.shape.head_dim)
            keys, values = self.embed.new_zeros(size), self.embed.new_zeros(size)
            self._stores.append(store := _Store(keys, values, weakref.ref(keys)))
        keys = store.keys.view_as(store.keys)  # collected with the cache that uses it
        store.user = weakref.ref(keys)
        return Cache(keys, store.values)

    def _drop(self, stores: list[_Store]) -> None:
        """Free stores and the graphs that were captured on them."""
        places = {store.keys.data_ptr() for store in stores}
        self._stores = [store for store in self._stores if store.keys.data_ptr() not in places]
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] not in places}
        self._chains = {key: chain for key, chain in self._chains.items() if key[0] not in places}

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: Cache, last: int = 0, tree: Tree | None = None) -> Tensor:
        if (
            tree is not None or ids.numel() > WIDE or not any(cache.used)
        ):  # a graph would not pay for prompts, whose lengths differ
            return super().forward(ids, cache, last, tree)
        return self._replayed(ids, cache, last).logits

    def _replayed(
        self, ids: Tensor, cache: Cache, last: int, states: Tensor | None = None
    ) -> _Graph:
        """Replay a pass, and return the graph with its outputs. states: States of an EAGLE-3 head, [B, T, D]."""
        width = ids.shape[1]
        end, layers = (
            _end(cache, width),
            () if cache.layer_states is None else cache.layer_states.ids,
        )
        key = (cache.keys.data_ptr(), len(ids), width, last, end, *layers)
        if key not in self._graphs:
            self._graphs[key] = self._capture(ids, cache, last, end, states)
        graph = self._graphs[key]
        graph.ids.copy_(ids)
        graph.used.copy_(staged(cache.used, self.device).unsqueeze(1))
        if graph.states is not None and states is not None:
            graph.states.copy_(states)
        graph.replay()
        cache.used = [used + width for used in cache.used]
        return graph

    def new_layer_states(self, cache: Cache, ids: tuple[int, ...]) -> LayerStates:
        """Return LayerStates that belong to the cache's memory, so that graphs can write to them for every text."""
        store = next(
            store for store in self._stores if store.keys.data_ptr() == cache.keys.data_ptr()
        )
        if ids not in store.layer_states:
            store.layer_states[ids] = super().new_layer_states(cache, ids)
        return store.layer_states[ids]

    @torch.inference_mode()
    def draft(
        self,
        logits: Tensor,
        cache: Cache,
        uniform: Tensor,
        choose: Sampler,
        state: Tensor | None = None,
    ) -> Drafted:
        """Draft K tokens after the cached tokens, see draft_chain; all choices and passes are one graph.

        choose: Hashable sampler that does not synchronise with the device; equal samplers share a graph. state: State
        of an EAGLE-3 head at the last position of each text, [B, 1, D].
        """
        rows, count = uniform.shape
        end = _end(cache, count - 1)
        key = (cache.keys.data_ptr(), rows, count, end, choose)
        if key not in self._chains:
            self._chains[key] = self._capture_chain(logits, cache, uniform, choose, end, state)
        graph = self._chains[key]
        graph.logits.copy_(logits)
        if graph.state is not None and state is not None:
            graph.state.copy_(state)
        graph.uniform.copy_(uniform)
        graph.used.copy_(staged(cache.used, self.device).unsqueeze(1))
        drafted = graph.replay()
        cache.used = [used + count - 1 for used in cache.used]
        return drafted

    def _capture_chain(
        self,
        logits: Tensor,
        cache: Cache,
        uniform: Tensor,
        choose: Sampler,
        end: int,
        state: Tensor | None,
    ) -> _Chain:
        # a proxy, because a graph that refers to its model would keep it alive
        model = weakref.proxy(self)
        logits, uniform, used = (
            logits.clone(),
            uniform.to(self.device, copy=True),
            staged(cache.used, self.device).unsqueeze(1),
        )
        state = None if state is None else state.clone()
        memory = Cache(cache.keys.detach(), cache.values)

        def run() -> Drafted:
            length, own = used, state

            def following(token: Tensor) -> Tensor:
                nonlocal length, own
                metadata = model.attention_metadata(length, 1, end)
                length = length + 1
                logits, own = model._pass(token.unsqueeze(1), memory, metadata, 1, own)
                return logits[:, -1]

            return draft_chain(logits, uniform, choose, following)

        return _Chain(
            logits,
            state,
            used,
            uniform,
            capture(run, self.device) if self.device.type == "cuda" else run,
        )

    def _capture(
        self, ids: Tensor, cache: Cache, last: int, end: int, states: Tensor | None
    ) -> _Graph:
        model = weakref.proxy(self)
        ids, used = ids.clone(), staged(cache.used, self.device).unsqueeze(1)
        states = None if states is None else states.clone()
        # the cache may be collected before the graph
        memory = Cache(cache.keys.detach(), cache.values, layer_states=cache.layer_states)
        size = (len(ids), last or ids.shape[1], self.shape.vocab)
        logits = torch.empty(size, dtype=memory.keys.dtype, device=self.device)

        def run() -> None:
            metadata = model.attention_metadata(used, ids.shape[1], end)
            after, own = model._pass(ids, memory, metadata, last, states)
            logits.copy_(after)
            if states is not None and own is not None:
                states.copy_(own)

        replay = capture(run, self.device, self._pool) if self.device.type == "cuda" else run
        return _Graph(ids, used, logits, states, replay)

    def _pass(
        self,
        ids: Tensor,
        cache: Cache,
        metadata: AttentionMetadata,
        last: int,
        states: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run a pass; return the logits and the new states of an EAGLE-3 head, None for a Llama."""
        return self.decode(
            ids, cache.keys, cache.values, metadata, last, layer_states=cache.layer_states
        ), None


def _end(cache: Cache, width: int) -> int:
    """Return S of the graph for a pass of `width` tokens. Raises ValueError: the tokens do not fit the cache."""
    return min(cache.capacity, -(-end_of_pass(cache, width) // BUCKET) * BUCKET)


def capture(
    run: Callable[[], Result], device: torch.device, pool: Any = None
) -> Callable[[], Result]:
    """Capture `run` as a CUDA graph; return a function that replays the graph on the same tensors.

    pool: Memory pool that graphs share, if their results are in other memory.
    """
    with torch.cuda.device(device):  # streams and graphs are made on the current device
        side = _capture_stream(device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # libraries choose kernels and allocate before a capture
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=side):
            result = run()

    def replay(
        alive: Callable[[], Result] = run,
    ) -> Result:  # keeps the tensors that the graph uses alive
        with torch.cuda.device(device):
            graph.replay()
        return result

    return replay


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a device's stream for captures. torch's default stream belongs to the first device that captured."""
    return torch.cuda.Stream(device)
