"""A target split over processes by transformers writes what one process writes; the draft runs in each of them."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from draftlab.cli import app

PROMPTS = '{"prompt": "def parse(line):"}\n{"prompt": "return [int(part)"}\n'


def score(target: Path, folder: Path, processes: int, *more: str) -> dict[str, Any]:
    """Return what score prints, run by torchrun on CPUs where there are several processes."""
    (folder / "prompts.jsonl").write_text(PROMPTS)
    words = ["score", "--target", str(target), "--draft", "draft", "--prompt-file", "prompts.jsonl", "--json", *more]
    words += [
        "--k",
        "2",
        "--max-tokens",
        "12",
        "--repeats",
        "1",
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--out",
        "out",
    ]
    shutil.copytree(target, folder / "draft")  # the target itself, whole in every process
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", port]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *(torchrun if processes > 1 else []), "-m", "draftlab", *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_a_split_target_writes_the_text_of_a_whole_one(processes, family_dirs, tmp_path):
    alone, split = tmp_path / "alone", tmp_path / "split"
    alone.mkdir()
    split.mkdir()
    target = family_dirs["llama"]  # 4 kv heads
    expected = score(target, alone, 1, "--device-map", "cpu")
    found = score(target, split, processes, "--device-map", "tensor-parallel")
    (one,), (other,) = expected["scores"], found["scores"]
    assert other["identical"]
    assert other["draft_acceptance_rate"] == one["draft_acceptance_rate"] == 1  # the draft is the target, whole
    texts = [json.loads(next((at / "out").glob("*/score.json")).read_text()) for at in (alone, split)]
    assert [g["tokens"] for g in texts[0]["plain"]] == [g["tokens"] for g in texts[1]["plain"]]
    assert texts[0]["example"]["first"] == texts[1]["example"]["first"]
    assert texts[0]["example"]["steps"] == texts[1]["example"]["steps"]
    assert sorted(path.name for path in split.iterdir()) == ["draft", "out", "prompts.jsonl"]  # one process writes


def refused(*words: str, **environ: str) -> str:
    result = CliRunner(env=environ).invoke(app, list(words))
    assert result.exit_code == 1, result.output
    return result.stderr


def test_one_process_splits_nothing(family_dirs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(family_dirs["llama"])
    text = refused("profile", model, "--device-map", "tensor-parallel", "--mode", "eager", "--device", "cpu")
    assert "start it with torchrun" in text


def test_several_processes_without_a_split_are_refused():
    assert "or in several with --device-map tensor-parallel" in refused("score", WORLD_SIZE="2", RANK="0")
    assert "does not split the target" in refused(
        "distill", "--device-map", "tensor-parallel", WORLD_SIZE="2", RANK="0"
    )
