"""A second device for machines without one: tensors that claim to be elsewhere, and hold their values on the CPU.

An operation on tensors of both devices fails as it would on a GPU, and so does .numpy(). Unlike fake tensors these have
values, so that whole functions run, and what they compute can be compared.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")  # the one besides the CPU that autograd needs no driver for
CROSSES = ("aten::_to_copy", "aten::copy_")  # what may read from one device and write to the other
INDEXES = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class Elsewhere(Tensor):
    """A tensor of DEVICE; its values are in local."""

    local: Tensor
    is_meta = False

    @staticmethod
    def __new__(cls, local: Tensor) -> "Elsewhere":
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            local.shape,
            local.stride(),
            local.storage_offset(),
            dtype=local.dtype,
            device=DEVICE,
        )
        made.local = local
        return made

    def tolist(self) -> Any:
        return self.local.tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Elsewhere({self.local})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class SecondDevice(TorchDispatchMode):
    """A block in which DEVICE exists. Inference mode, which knows no such tensors, does nothing."""

    def __enter__(self) -> Any:
        self.patches = contextlib.ExitStack()
        for name in ("__enter__", "__exit__"):
            self.patches.enter_context(mock.patch.object(torch.inference_mode, name, return_value=None))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name
    leaves, _ = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    away = any(isinstance(tensor, Elsewhere) for tensor in tensors)
    if name in INDEXES:  # indices may be on the CPU
        own, indices = args[0], [index for index in args[1] if index is not None]
        tensors = [own, *args[2:3], *(index for index in indices if index.device.type != "cpu")]
        away = isinstance(own, Elsewhere)
    placed = {tensor.device for tensor in tensors if tensor.dim()}
    if name not in CROSSES and len(placed) > 1:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found {placed}")
    if name == "aten::_local_scalar_dense":
        # a wait, like .tolist()
        return args[0].tolist() if isinstance(args[0], Elsewhere) else func(*args)
    asked = kwargs.get("device")
    if asked is not None:
        away, kwargs = (
            torch.device(asked).type == DEVICE.type,
            kwargs | {"device": torch.device("cpu")},
        )
    if name == "aten::copy_":
        away = isinstance(args[0], Elsewhere)
    inner = tree_map(lambda leaf: leaf.local if isinstance(leaf, Elsewhere) else leaf, (args, kwargs))
    out = func(*inner[0], **inner[1])
    if not away:
        return out
    out = tree_map(lambda leaf: Elsewhere(leaf) if isinstance(leaf, Tensor) else leaf, out)
    return return_and_correct_aliasing(func, args, kwargs, out)


@contextlib.contextmanager
def without_second_device() -> Iterator[None]:
    """Leave the second device for a while."""
    with _disable_current_modes():
        yield
