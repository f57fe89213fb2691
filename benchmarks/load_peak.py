"""Measure the peak memory of loading a checkpoint, divided by the size of its weights.

The checkpoint has the shape of Llama-3.2-1B and random weights. Each way of loading runs in a separate process. The
ratio is the largest increase of the process's resident memory, divided by the bytes of the weights in the requested
dtype.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import environment
from benchmarks.tiny_target import llama_config
from draftlab.errors import UserError
from draftlab.model import checkpoint, devices, saving
from draftlab.model.shape import Shape

SHAPE = Shape(
    layers=16,
    hidden=2048,
    heads=32,
    kv_heads=8,
    head_dim=64,
    ffn=8192,
    vocab=128256,
    tied=True,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    qk_layernorm=False,
)
WAYS = ("llama", "native", "transformers")
CHILD = """
import json, sys
from pathlib import Path
import torch
from benchmarks.load_peak import loaded, resident, reset
from draftlab.model import checkpoint, llama, native_cpu
import transformers.models.llama.modeling_llama
way, directory, dtype = sys.argv[1:]
if way == "native":
    native_cpu.library()
before = resident("VmRSS")
reset()
model = loaded(way, Path(directory), devices.DTYPES[dtype])
print(json.dumps(resident("VmHWM") - before))
"""


def main(
    directory: Annotated[Path | None, typer.Option(help="Checkpoint to load. Default: random weights.")] = None,
    stored: Annotated[str, typer.Option(help="dtype in which random weights are stored.")] = "bfloat16",
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = directory or Path(folder) / "1b"
        if directory is None:
            write_random(SHAPE, place, devices.DTYPES[stored])
        peaks = {f"{way} {dtype}": peak(way, place, dtype) for way in WAYS for dtype in ("bfloat16", "float32")}
    found = {"peak_over_weights": peaks, "load_peak_ratio": max(peaks.values()), "stored": stored}
    print(json.dumps({"benchmark": "load_peak", **found} | environment(1)))


def load_peak_ratio(directory: Path, dtype: str = "float32") -> float:
    """Return the largest ratio of peak memory to the size of the weights over all ways to load a checkpoint."""
    return max(peak(way, directory, dtype) for way in WAYS)


def peak(way: str, directory: Path, dtype: str) -> float:
    """Return the ratio of peak memory to the size of the weights for one way to load, measured in a child process."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, way, str(directory), dtype],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UserError(f"loading {directory} by {way} failed: {done.stderr.strip()[-300:]}")
    weights = checkpoint.read_shape(directory).params() * devices.DTYPES[dtype].itemsize
    return int(done.stdout.strip().splitlines()[-1]) / weights


def loaded(way: str, directory: Path, dtype: torch.dtype) -> object:
    from draftlab.model import llama
    from draftlab.model.modes import with_mode

    if way == "transformers":
        return checkpoint.load_model(directory, dtype)
    model = llama.load(directory, dtype)
    return with_mode(model, "native") if way == "native" else model


def write_random(shape: Shape, directory: Path, dtype: torch.dtype) -> None:
    """Write a LLaMA checkpoint with random weights, one tensor at a time."""
    directory.mkdir(parents=True)
    config = llama_config(shape, context=8192, bos=1, eos=2, pad=None)
    weights = (
        (
            name,
            torch.ones(shape.dims(axes), dtype=dtype) if len(axes) == 1 else _matrix(shape.dims(axes), dtype),
        )
        for name, axes in shape.axes().items()
    )
    saving.write_checkpoint(directory, config, weights, None)


def _matrix(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype).normal_(std=size[-1] ** -0.5)


def resident(what: str) -> int:
    """Return the process's resident bytes: `what` is VmRSS for now, or VmHWM for the peak since the last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return 1024 * int(line.split()[1])


def reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    typer.run(main)
