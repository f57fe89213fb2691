"""Describe the machine of gpu.sh (clocks, power, driver, libraries, attention backends), or run the GPU tests on it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import environment

ROOT = Path(__file__).parents[1]
QUERIED = (
    "name",
    "driver_version",
    "pstate",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "memory.total",
    "memory.used",
    "ecc.mode.current",
    "mig.mode.current",
)


def main(
    tests: Annotated[bool, typer.Option("--tests", help="Run pytest -m gpu, and count the tests that passed.")] = False,
) -> None:
    print(json.dumps(tested() if tests else machine()))


def machine() -> dict[str, object]:
    return {
        "benchmark": "gpu_machine",
        "gpus": [dict(zip(QUERIED, row.split(", "), strict=True)) for row in queried()],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "capabilities": [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())],
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "sdpa": {
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
            "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),  # the engine does not use it
            "math": torch.backends.cuda.math_sdp_enabled(),
        },
        **environment(torch.get_num_threads()),
    }


def queried() -> list[str]:
    """Return the values of QUERIED for each GPU as a line of nvidia-smi. Without nvidia-smi, return no lines."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERIED)}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def tested() -> dict[str, object]:
    """Run the tests that need a GPU, and print a line when each test ends. Exit with 1 if a test fails."""
    command = [sys.executable, "-u", "-m", "pytest", "-m", "gpu", "-n0", "-vv", "-rf", "tests"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        lines = []
        for line in run.stdout or ():
            sys.stderr.write(line)
            lines.append(line)
    if run.returncode:
        raise typer.Exit(1)
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|skipped|deselected)", lines[-1])}
    return {"benchmark": "gpu_tests", **counts}


if __name__ == "__main__":
    typer.run(main)
