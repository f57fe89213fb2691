"""The machine of gpu.sh's results (clocks, power, driver, libraries, attention backends), or a run of the GPU tests."""

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
QUERIED = ("name", "driver_version", "pstate", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit",
           "temperature.gpu", "memory.total", "memory.used", "ecc.mode.current", "mig.mode.current")  # fmt: skip


def main(
    tests: Annotated[
        bool, typer.Option("--tests", help="Run pytest -m gpu, and count what passed.")
    ] = False,
) -> None:
    print(json.dumps(tested() if tests else machine()))


def machine() -> dict[str, object]:
    return {
        "benchmark": "gpu_machine",
        "gpus": [dict(zip(QUERIED, row.split(", "), strict=True)) for row in queried()],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "capabilities": [
            torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())
        ],
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "sdpa": {
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
            "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),  # not used by the engine
            "math": torch.backends.cuda.math_sdp_enabled(),
        },
        **environment(torch.get_num_threads()),
    }


def queried() -> list[str]:
    """Return a line of nvidia-smi for each GPU, or no lines without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERIED)}", "--format=csv,noheader"]
    try:
        return (
            subprocess.run(command, capture_output=True, text=True, check=True)
            .stdout.strip()
            .splitlines()
        )
    except (OSError, subprocess.CalledProcessError):
        return []


def tested() -> dict[str, object]:
    """Run the tests that need a GPU, and print a line as each test ends. Exits with 1 if a test fails."""
    command = [sys.executable, "-u", "-m", "pytest", "-m", "gpu", "-n0", "-vv", "-rf", "tests"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        lines = []
        for line in run.stdout or ():
            sys.stderr.write(line)
            lines.append(line)
    if run.returncode:
        raise typer.Exit(1)
    counts = {
        kind: int(n) for n, kind in re.findall(r"(\d+) (passed|skipped|deselected)", lines[-1])
    }
    return {"benchmark": "gpu_tests", **counts}


if __name__ == "__main__":
    typer.run(main)
