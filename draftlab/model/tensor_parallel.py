"""Models that transformers splits over torchrun's processes: the first process leads, the others run its passes.

The leader runs the command, with models that are not split, the clocks and all choices; so nothing that differs between
processes, such as a time, can make them run different passes. B rows, T new tokens, V vocab.
"""

import contextlib
import functools
import itertools
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from draftlab.console import processes
from draftlab.errors import UserError
from draftlab.model import TENSOR_PARALLEL, checkpoint
from draftlab.model.hf_decoder import HFCache, HFDecoder
from draftlab.model.llama import Tree
from draftlab.trust import remote_code, trusts_remote_code

PATIENCE = timedelta(days=1)  # of a process that waits for the next pass


@dataclass(frozen=True, slots=True)
class _Load:
    """Load a checkpoint; models are numbered in the order in which they are loaded."""

    directory: Path
    dtype: torch.dtype
    threads: int
    trusted: bool  # to run code of its own


@dataclass(frozen=True, slots=True)
class _Pass:
    """Run a pass over ids [B, T] after used cached tokens. dropped: caches that nobody uses any more."""

    model: int
    cache: int
    used: list[int]
    ids: list[list[int]]
    last: int
    dropped: list[int]


@dataclass(frozen=True, slots=True)
class _UncachedPass:
    """Run a pass over whole texts [B, T]."""

    model: int
    ids: list[list[int]]
    last: int
    tree: Tree | None


@dataclass
class SplitCache(HFCache):
    """The leader's cache; the others have one of the same number."""

    number: int


class SplitDecoder(HFDecoder):
    """A split model in the leader: every pass is announced to the other processes, which run it, too."""

    def __init__(self, model: Any, number: int) -> None:
        super().__init__(model)
        self._number, self._caches, self._dropped = number, itertools.count(), list[int]()

    def new_cache(self, rows: int, capacity: int) -> SplitCache:
        whole = super().new_cache(rows, capacity)
        cache = SplitCache(whole.past, whole.used, next(self._caches))
        weakref.finalize(cache, self._dropped.append, cache.number)
        return cache

    def run(self, ids: Tensor, cache: HFCache, last: int) -> Tensor:
        assert isinstance(cache, SplitCache)  # made here
        dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
        _broadcast(_Pass(self._number, cache.number, cache.used, ids.tolist(), last, dropped))
        return super().run(ids, cache, last)

    def forward_uncached(self, ids: Tensor, last: int, tree: Tree | None = None) -> Tensor:
        host_tree = None if tree is None else Tree(tree.depth.cpu(), tree.mask.cpu())
        _broadcast(_UncachedPass(self._number, ids.tolist(), last, host_tree))
        return super().forward_uncached(ids, last, tree)


@dataclass
class _Followed:
    """The models and caches of a process that follows."""

    decoders: list[HFDecoder] = field(default_factory=list)
    caches: dict[tuple[int, int], HFCache] = field(default_factory=dict)

    def run(self, request: _Pass) -> None:
        decoder, key = self.decoders[request.model], (request.model, request.cache)
        for number in request.dropped:
            self.caches.pop((request.model, number), None)
        if key not in self.caches:
            self.caches[key] = decoder.new_cache(len(request.used), 0)
        self.caches[key].used = request.used
        decoder.forward(torch.tensor(request.ids, device=decoder.device), self.caches[key], request.last)

    def run_uncached(self, request: _UncachedPass) -> None:
        decoder, tree = self.decoders[request.model], request.tree
        tree = None if tree is None else Tree(tree.depth.to(decoder.device), tree.mask.to(decoder.device))
        decoder.forward_uncached(torch.tensor(request.ids, device=decoder.device), request.last, tree)


def load(directory: Path, dtype: torch.dtype) -> SplitDecoder:
    """Load a checkpoint, a part of every matrix in each process.

    Raises:
        UserError: there is one process, or a model that these cannot share, or that one of them cannot load.
    """
    check(directory)
    _broadcast(_Load(directory, dtype, torch.get_num_threads(), trusts_remote_code()))
    return SplitDecoder(_load(directory, dtype), next(_numbers()))


def check(directory: Path) -> None:
    """Raises UserError: there is one process, or a model that these cannot share."""
    if processes() == 1:
        raise UserError(
            "--device-map tensor-parallel splits the target over processes; start it with torchrun --nproc-per-node 4 "
            "-m draftlab and the command"
        )
    config = checkpoint.text_config(directory)
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    if isinstance(heads, int) and heads % processes():
        fit = ", ".join(str(n) for n in range(2, heads + 1) if heads % n == 0) or "none"
        raise UserError(f"{processes()} processes cannot share the {heads} key-value heads of {directory}; want {fit}")


@contextlib.contextmanager
def leading() -> Iterator[None]:
    """Lead the other processes, which follow until the block ends."""
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # they are gone
            _broadcast(None)
            dist.destroy_process_group()  # while Python runs: a thread that frees a tensor later aborts the process


def follow() -> None:
    """Run the passes of the leader until it has done."""
    followed = _Followed()
    while (request := _broadcast(None)) is not None:
        if isinstance(request, _Load):
            torch.set_num_threads(request.threads)
            with contextlib.suppress(UserError), remote_code(request.trusted):  # the leader raises the error
                followed.decoders.append(HFDecoder(_load(request.directory, request.dtype)))
        elif isinstance(request, _Pass):
            followed.run(request)
        else:
            followed.run_uncached(request)
    dist.destroy_process_group()


@functools.cache
def _numbers() -> Iterator[int]:
    return itertools.count()


def _load(directory: Path, dtype: torch.dtype) -> Any:
    """Load the part of this process. Raises UserError: in every process, if one of them cannot."""
    problem, model = None, None
    try:
        model = checkpoint.load_model(directory, dtype, device_map=TENSOR_PARALLEL).eval()
    except UserError as error:
        problem = str(error)
    problems: list[Any] = [None] * processes()
    dist.all_gather_object(problems, problem, group=_control())
    if first := next(filter(None, problems), None):
        raise UserError(first)
    return model


def _broadcast(message: object) -> Any:
    """Return the leader's message, in every process."""
    box = [message]
    dist.broadcast_object_list(box, src=0, group=_control())
    return box[0]


@functools.cache
def _control() -> Any:
    """Return the group of messages on CPUs; the first call starts all groups, that of the model's passes on GPUs."""
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device else "gloo", timeout=PATIENCE, device_id=device)
    return dist.new_group(backend="gloo", timeout=PATIENCE)
