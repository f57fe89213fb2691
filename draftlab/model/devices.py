"""Arithmetic and copies on accelerators: exact sums and products, copies that nothing waits for, several processes."""

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist


def staged(values: Sequence[object], device: torch.device) -> torch.Tensor:
    """Return numbers as a tensor on the device, in a copy that neither side waits for."""
    return torch.tensor(values, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def bind_local_device() -> None:
    """Make the GPU of this process the current one, where a launcher started several."""
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def wait_for_all() -> None:
    """Wait for the processes of a split model, whose last pass needs all of them alive."""
    if dist.is_initialized():
        dist.barrier()


def agreed(seconds: float) -> float:
    """Return the first process's time in all processes of a split model, so that all decide alike."""
    if not dist.is_initialized():
        return seconds
    box = [seconds]
    dist.broadcast_object_list(box)
    return box[0]


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of long sums: float64, which Apple's GPUs lack."""
    return torch.float32 if device.type == "mps" else torch.float64


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Keep float32 products from TF32, whatever the image of a vendor set: normal equations square its error."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
