"""Arithmetic and copies on accelerators: exact sums and products, and copies that nothing waits for."""

import contextlib
from collections.abc import Iterator, Sequence

import torch


def staged(values: Sequence[object], device: torch.device) -> torch.Tensor:
    """Return numbers as a tensor on the device, in a copy that neither side waits for."""
    return torch.tensor(values, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of long sums: float64, which Apple's GPUs lack."""
    return torch.float32 if device.type == "mps" else torch.float64


def exact(values: torch.Tensor) -> torch.Tensor:
    """Return values in float64, on the CPU if their device has none."""
    return (values.cpu() if values.device.type == "mps" else values).double()


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Keep float32 products from TF32, whatever the image of a vendor set: normal equations square its error."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
