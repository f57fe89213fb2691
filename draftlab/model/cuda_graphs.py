"""CUDA graphs for llama.py: one launch replays a pass with few tokens, or all passes that draft K tokens.

B rows (texts of a batch), T new tokens, K drafted tokens, S cached + new tokens, D hidden, V vocab. Each graph is
captured for one shape of the inputs, one cache, and one value of S, which is rounded up to a multiple of BUCKET. The
graph reads the length of each row from a tensor. On a CPU, as in tests, the same code runs without a capture.
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
    TokenChooser,
    Tree,
    draft_chain,
    end_of_pass,
)
from draftlab.model.devices import staged
from draftlab.model.llama import Cache, LayerStates, Llama

BUCKET = 256  # S is rounded up to a multiple of BUCKET; positions after a row's end are masked
WIDE = 512  # most tokens of a captured pass; passes with more tokens are limited by arithmetic, not by launches

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _Store:
    """The memory of a KV cache. It outlives the cache: a later cache that fits reuses the memory and its graphs.

    Args:
        user: Weak reference to the keys of the cache that uses the memory. If it is dead, the memory is free.
        layer_states: By the ids of the layers.
        graphs: Graphs that were captured on this memory, by the shape of the pass or draft.
    """

    keys: Tensor
    values: Tensor
    user: weakref.ref[Tensor]
    layer_states: dict[tuple[int, ...], LayerStates] = field(default_factory=dict)
    graphs: "dict[tuple[object, ...], _Graph]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured function. A call copies its arguments to `inputs`, and replays the graph.

    The next call overwrites the outputs.
    """

    inputs: tuple[Tensor | None, ...]
    replay: Callable[[], Any]

    @classmethod
    def of(
        cls,
        run: Callable[..., Any],
        inputs: tuple[Tensor | None, ...],
        device: torch.device,
        pool: "torch.cuda._POOL_HANDLE | None" = None,
    ) -> "_Graph":
        """Capture `run` on copies of the inputs. On a CPU, store `run` without a capture. pool: Same as in capture."""
        copies = tuple(None if given is None else given.clone() for given in inputs)
        run = functools.partial(run, *copies)
        return cls(copies, capture(run, device, pool) if device.type == "cuda" else run)

    def __call__(self, *inputs: Tensor | None) -> Any:
        for copy, given in zip(self.inputs, inputs, strict=True):
            if copy is not None and given is not None:
                copy.copy_(given)
        return self.replay()


class CudaGraphLlama(Llama):
    """A Llama whose passes of at most WIDE tokens replay CUDA graphs. It shares the weights of the original Llama.

    The outputs of a pass, or of draft(), are overwritten by the next call with the same shapes.
    """

    def __init__(self, model: Llama) -> None:
        vars(self).update(vars(model))
        self.rope.reach(self.context)  # once, because a graph keeps the place of its tensors
        self._stores: list[_Store] = []
        # Graphs of passes can share one memory pool, because their logits are outside it. Each graph of draft() has
        # its own pool.
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
            self._stores = [store for store in self._stores if store not in free]
            size = (self.shape.layers, rows, self.shape.kv_heads, length, self.shape.head_dim)
            keys = self.embed.new_zeros(size)
            values = self.embed.new_zeros(size)
            self._stores.append(store := _Store(keys, values, weakref.ref(keys)))
        # this view is freed together with the cache that uses it
        keys = store.keys.view_as(store.keys)
        store.user = weakref.ref(keys)
        return Cache(keys, store.values)

    def _store(self, cache: Cache) -> _Store:
        memory = cache.keys.data_ptr()
        return next(store for store in self._stores if store.keys.data_ptr() == memory)

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: Cache, last: int = 0, tree: Tree | None = None) -> Tensor:
        if self._has_graph(ids, cache, tree):
            return self._replayed(ids, cache, last)[0]
        return super().forward(ids, cache, last, tree)

    def _has_graph(self, ids: Tensor, cache: Cache, tree: Tree | None) -> bool:
        # prompts have many lengths, so their graphs would cost more time than they save
        return tree is None and ids.numel() <= WIDE and any(cache.used)

    def _replayed(
        self, ids: Tensor, cache: Cache, last: int, states: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Replay the graph of a pass, and return the logits and the new states. The first call captures the graph.

        states: States that an EAGLE-3 head reads, [B, T, D]. None for a Llama; the new states are then None, too.
        """
        width = ids.shape[1]
        end = _end(cache, width)
        layers = () if cache.layer_states is None else cache.layer_states.ids
        key = (len(ids), width, last, end, layers)
        graphs = self._store(cache).graphs
        inputs = ids, staged(cache.used, self.device).unsqueeze(1), states
        if key not in graphs:
            run = self._static_pass(cache, len(ids), width, last, end)
            graphs[key] = _Graph.of(run, inputs, self.device, self._pool)
        outputs = graphs[key](*inputs)
        cache.used = [used + width for used in cache.used]
        return outputs

    def new_layer_states(self, cache: Cache, ids: tuple[int, ...]) -> LayerStates:
        """Return LayerStates for every position of a cache.

        Caches that reuse the same memory also get the same LayerStates, because graphs write to its tensor.

        ids: Ids of the layers, see LayerStates.
        """
        store = self._store(cache)
        if ids not in store.layer_states:
            store.layer_states[ids] = super().new_layer_states(cache, ids)
        return store.layer_states[ids]

    @torch.inference_mode()
    def draft(
        self,
        logits: Tensor,
        cache: Cache,
        uniform: Tensor,
        choose: TokenChooser,
        state: Tensor | None = None,
    ) -> Drafted:
        """Draft K tokens after the cached tokens, see draft_chain. One graph runs all K samplings and K - 1 passes.

        choose: Hashable sampler that does not synchronise with the device. Equal samplers share a graph.
        state: State of an EAGLE-3 head at the last position of each text, [B, 1, D]. None for a Llama.
        """
        rows, count = uniform.shape
        end = _end(cache, count - 1)
        key = (rows, count, end, choose)
        graphs = self._store(cache).graphs
        inputs = (
            logits,
            staged(cache.used, self.device).unsqueeze(1),
            uniform.to(self.device),
            state,
        )
        if key not in graphs:
            run = self._static_chain(cache, choose, end)
            graphs[key] = _Graph.of(run, inputs, self.device)
        drafted = graphs[key](*inputs)
        cache.used = [used + count - 1 for used in cache.used]
        return drafted

    def _static_chain(self, cache: Cache, choose: TokenChooser, end: int) -> Callable[..., Drafted]:
        # a weak proxy, because otherwise a graph would keep its model alive
        model = weakref.proxy(self)
        memory = Cache(cache.keys.detach(), cache.values)

        def run(logits: Tensor, used: Tensor, uniform: Tensor, state: Tensor | None) -> Drafted:
            def following(token: Tensor) -> Tensor:
                nonlocal used, state
                metadata = model.attention_metadata(used, 1, end)
                used = used + 1
                logits, state = model._pass(token.unsqueeze(1), memory, metadata, 1, state)
                return logits[:, -1]

            return draft_chain(logits, uniform, choose, following)

        return run

    def _static_pass(
        self, cache: Cache, rows: int, width: int, last: int, end: int
    ) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """Return a function to capture: a pass on static tensors, which overwrites `states` with the new states."""
        model = weakref.proxy(self)
        # the cache may be freed before the graph
        memory = Cache(cache.keys.detach(), cache.values, layer_states=cache.layer_states)
        logits = self.embed.new_empty(rows, last or width, self.shape.vocab)

        def run(ids: Tensor, used: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
            metadata = model.attention_metadata(used, width, end)
            after, own = model._pass(ids, memory, metadata, last, states)
            logits.copy_(after)
            if states is not None and own is not None:
                states.copy_(own)
            return logits, states

        return run

    def _pass(
        self,
        ids: Tensor,
        cache: Cache,
        metadata: AttentionMetadata,
        last: int,
        states: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run a pass. Return the logits, and the new states of an EAGLE-3 head or None for a Llama."""
        return self.decode(ids, cache, metadata, last), None


def _end(cache: Cache, width: int) -> int:
    """Return S for the graph of a pass: the longest row's length after `width` more tokens, in steps of BUCKET.

    The length is rounded up to a multiple of BUCKET, but the result is at most the capacity of the cache.

    Raises:
        ValueError: the tokens do not fit the cache.
    """
    return min(cache.capacity, -(-end_of_pass(cache, width) // BUCKET) * BUCKET)


def capture(
    run: Callable[[], Result], device: torch.device, pool: "torch.cuda._POOL_HANDLE | None" = None
) -> Callable[[], Result]:
    """Capture `run` as a CUDA graph; return a function that replays the graph on the same tensors.

    pool: Memory pool to share with other graphs. Graphs may share a pool only if their results are not in it.
    """
    with torch.cuda.device(device):  # streams and graphs are made on the current device
        side = _capture_stream(device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # before a capture, libraries must have chosen kernels and allocated memory
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=side):
            result = run()

    def replay(
        alive: Callable[[], Result] = run,
    ) -> Result:  # this closure keeps the graph's tensors alive
        with torch.cuda.device(device):
            graph.replay()
        return result

    return replay


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for captures on a device. torch has only one default for all devices."""
    return torch.cuda.Stream(device)
