"""Measure the limits of a device: GB/s of a large matrix-vector product, and TFLOP/s of a square matrix product."""

import json
from typing import Annotated

import torch
import typer

from benchmarks import environment
from draftlab.engine.timing import bandwidth_gbs, matmul_tflops
from draftlab.latency.machine_state import device_name
from draftlab.model import devices


def main(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtypes: Annotated[str, typer.Option(help="Dtypes, separated by commas.")] = "float32,bfloat16",
    gigabytes: Annotated[float, typer.Option(help="Size of the matrix to read, in GB; at most 1 GiB is read.")] = 1.0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    torch.set_num_threads(threads)
    place = devices.resolve_device(device)
    chosen = {name: devices.DTYPES[name] for name in dtypes.split(",")}
    weights = {name: int(gigabytes * 1e9 / dtype.itemsize) for name, dtype in chosen.items()}
    result = {
        "benchmark": "ceilings",
        "device": device_name(place),
        "bandwidth_gbs": {name: bandwidth_gbs(weights[name], dtype, place) for name, dtype in chosen.items()},
        "matmul_tflops": {name: matmul_tflops(dtype, place) for name, dtype in chosen.items()},
    }
    print(json.dumps(result | environment(threads)))


if __name__ == "__main__":
    typer.run(main)
