"""Two processes compute what one does: the loop under DDP, and a step with masks under FSDP2.

accelerate takes FSDP2 for accelerators only, so on a CPU the step is sharded by torch itself.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent


def run(kind: str, out: Path, processes: int) -> dict[str, torch.Tensor]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", port]
    done = subprocess.run(
        [*(launch if processes > 1 else [sys.executable]), str(HERE / "distributed_worker.py"), kind, str(out)],
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(out)


@pytest.mark.parametrize("kind", ["train", "step"])
def test_two_processes_compute_what_one_does(kind, tmp_path):
    alone = run(kind, tmp_path / "alone.safetensors", 1)
    together = run(kind, tmp_path / "together.safetensors", 2)
    assert together.keys() == alone.keys()
    assert any("log_odds" in name or "ffn" in name for name in alone)
    for name, wanted in alone.items():
        scale = float(wanted.abs().max())
        assert float((together[name] - wanted).abs().max()) <= 2e-4 * scale + 1e-7, name
