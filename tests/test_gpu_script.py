"""benchmarks/gpu.sh runs every part with small shapes on whatever device there is."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GPU = ["bash", str(ROOT / "benchmarks" / "gpu.sh")]
PARTS = {
    "machine",
    "ceilings",
    "sweep",
    "target",
    "drafts",
    "served",
    "live",
    "live_text",
    "engine",
    "score",
    "masks",
}
PARTS |= {"engine_target", "engine_larger", "loss_256"}


@pytest.mark.slow
def test_every_part_writes_its_json(tmp_path):
    subprocess.run([*GPU, "--small", "--out", str(tmp_path)], check=True)
    found = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    lengths = {f"predict_{length}" for length in ("2", "2.5", "3", "3.5", "4")}
    assert set(found) - {"cut"} == PARTS | lengths  # which is made once in a clone
    assert len(found["sweep"]["rows"]["eager"]) == 3
    assert set(found["live"]["speedup"]["0.9"]) == {"tiny-3x256", "tiny-12x128"}
    assert (found["live"]["layers"], found["live"]["of_layers"]) == (16, 16)
    assert (
        found["live_text"]["layers"],
        found["live_text"]["rows"]["tiny-16x256"][0]["same_tokens"],
    ) == (16, 1)
    for name in lengths:
        assert [p["name"].split(",")[0] for p in found[name]["predictions"]] == [
            "tiny-3x256",
            "tiny-12x128",
        ]


def test_a_part_for_which_no_time_is_left_is_said_and_not_started(tmp_path):
    command = [*GPU, "--small", "--out", str(tmp_path), *["--minutes", "0", "loss"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "failed: loss_256")
    assert (tmp_path / "loss_256.failed").read_text() == "0 minutes are over\n"


def test_clocks_are_watched_as_long_as_parts_run(tmp_path):
    """A program in nvidia-smi's place goes on until it is stopped."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho timestamp, index\nexec sleep 600\n")
    program.chmod(0o755)
    command = [*GPU, "--out", str(tmp_path / "out"), *["--minutes", "0", "loss"]]
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    # until its output is closed
    subprocess.run(command, env=environ, capture_output=True, check=False, timeout=60)
    assert (tmp_path / "out" / "clocks.csv").read_text() == "timestamp, index\n"
    starts = (tmp_path / "out" / "starts.csv").read_text().splitlines()
    assert [line.partition(", ")[0] for line in starts] == ["loss_32000", "loss_128256"]
