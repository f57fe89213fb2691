"""Two processes compute what one does: the loop and the commands under DDP, a step and its teacher under FSDP2.

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


def launch(words: list[str], processes: int, where: Path) -> str:
    """Python with words in so many processes; what they print."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", port]
    done = subprocess.run(
        [sys.executable, *(torchrun if processes > 1 else []), *words],
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        cwd=where,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run(kind: str, out: Path, processes: int) -> dict[str, torch.Tensor]:
    launch([str(HERE / "distributed_worker.py"), kind, str(out)], processes, out.parent)
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


@pytest.mark.slow
def test_the_commands_write_once_and_what_one_process_writes(family_dirs, tmp_path):
    source = family_dirs["llama"]
    (tmp_path / "text.txt").write_text(
        "\n\n".join(f"def f{i}(x, y):\n    return [x + {i}, y * {i}]\n" * 8 for i in range(200))
    )
    same = ["--data", "text.txt", "--rows", "4", "--dtype", "float32", "--steps", "4", "--eval-every", "2"]
    distilled = ["distill", "--draft", str(source), "--target", str(family_dirs["llama3_tied"]), *same]
    distilled += ["--seq-len", "48", "--text", "data=0.5,draft=0.5", "--prompt-tokens", "8", "--micro-tokens", "64"]
    masked = ["prune", "--method", "masks", "--source", str(source), "--layers", "3", "--width", "48", "--heads", "4"]
    masked += [*same, "--seq-len", "32", "--tokens", "256", "--train", "full"]
    for words in (distilled, masked):
        made = {}
        for processes in (1, 2):
            out = tmp_path / f"{words[0]}-{processes}"
            printed = launch(["-m", "draftlab", *words, "--out", str(out)], processes, tmp_path)
            assert printed.count(str(out)) == 1
            made[processes] = load_file(out / "model.safetensors")
            assert not (tmp_path / f".{out.name}.state").exists()
        for name, wanted in made[1].items():
            scale = float(wanted.abs().max())
            assert float((made[2][name] - wanted).abs().max()) <= 1e-3 * scale + 1e-6, name
