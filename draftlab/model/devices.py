"""Helpers for devices: exact sums and products, asynchronous copies, free memory."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import psutil
import torch

from draftlab.errors import UserError
from draftlab.model.cgroups import OWN, Cgroups
from draftlab.quantities import format_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SYMMETRIC_BLOCK = 256  # columns of a block of add_lower; products of smaller blocks are slower


def resolve_device(name: str) -> torch.device:
    """Return the device with a name such as "cpu" or "cuda:1". "auto" is a CUDA GPU if there is one, else the CPU.

    Raises:
        UserError: this machine lacks the device, or torch was built without support for it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"this machine cannot use the device {name!r} ({str(error).splitlines()[0]}); use --device auto"
        ) from None
    return device


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that a dtype has in configs and options, such as float32."""
    return str(dtype).removeprefix("torch.")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype with a name from DTYPES. "auto" stands for bfloat16 on a GPU, else float32."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]


def is_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch multiplies matrices of this dtype at full speed on the device.

    On CPUs with AVX-512, products in float16 take 3 times as long as in float32, and bfloat16 is fast. On CPUs without
    AVX-512, products in float16 and bfloat16 take 6 to 70 times as long as in float32.
    """
    if device.type != "cpu" or dtype.itemsize > 2:
        return True
    return dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def staged(values: Sequence[object], device: torch.device) -> torch.Tensor:
    """Return numbers, or nested lists of numbers, as a tensor on the device. A copy to a GPU is asynchronous."""
    return torch.tensor(values, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which long sums are computed: float64, or float32 on Apple's GPUs, which lack float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def exact(values: torch.Tensor) -> torch.Tensor:
    """Return values in float64. They are moved to the CPU if they are on an Apple GPU, which lacks float64."""
    return (values.cpu() if values.device.type == "mps" else values).double()


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Return a context in which float32 matrix products do not use TF32, whose error normal equations would square."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def add_lower(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: int = 1) -> None:
    """Add the lower triangle of a symmetric product a b to the lower triangle of `total`, [N, N]. TF32 is not used.

    Blocks above the diagonal are left out, which saves almost half of the time. Elements of `total` above the diagonal
    have no meaning, see mirror_lower.

    Args:
        total: Sum of symmetric products.
        a, b: Matrices, [N, T] and [T, N], such as X' and X.
        beta: Factor of `total` before the addition. With 0, its values are not read.
    """
    with exact_products():
        for start in range(0, len(total), SYMMETRIC_BLOCK):
            columns = slice(start, start + SYMMETRIC_BLOCK)
            total[start:, columns].addmm_(a[start:], b[:, columns], beta=beta)


def mirror_lower(matrix: torch.Tensor) -> torch.Tensor:
    """Copy the blocks that add_lower computes below the diagonal to those above it, and return the matrix, [N, N]."""
    for start in range(0, len(matrix), SYMMETRIC_BLOCK):
        rows = slice(start, start + SYMMETRIC_BLOCK)
        below = slice(start + SYMMETRIC_BLOCK, None)
        matrix[rows, below] = matrix[below, rows].T
    return matrix


def symmetric_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a product a b that is symmetric, [N, N], in a bit more than half of the time of a @ b."""
    total = a.new_empty(len(a), len(a))
    add_lower(total, a, b, beta=0)
    return mirror_lower(total)


def free_bytes(device: torch.device, cgroups: Cgroups = OWN) -> int:
    """Return how many bytes can be allocated on a device. On a CPU, the limits of this process's cgroups count."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    available = psutil.virtual_memory().available
    limit = cgroups.free_memory()
    return available if limit is None else min(available, limit)


def listed(needs: Mapping[str, float]) -> str:
    """Return `needs`, bytes by purpose, as text for a message. Purposes that need less than 5 MB are left out."""
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in needs.items() if size >= 5e6)


def less_memory(dtype: torch.dtype, otherwise: str) -> str:
    """Return advice for check_fits, which names a dtype only if its weights are smaller. otherwise: Other advice."""
    return f"--dtype bfloat16, {otherwise}" if dtype.itemsize > torch.bfloat16.itemsize else otherwise


def check_fits(needs: Mapping[str, float], device: torch.device, advice: str) -> None:
    """Raise UserError if the sum of `needs`, bytes by purpose, exceeds the free memory of a device.

    advice: What to use instead, as the end of the message.
    """
    free = free_bytes(device)
    total = sum(needs.values())
    if total > free:
        raise UserError(
            f"not enough memory on {device}: {format_bytes(free)} are free, but this needs {listed(needs)}; "
            f"use {advice}"
        )
