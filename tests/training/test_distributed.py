"""Two processes compute what one does: the loop under DDP and DeepSpeed, commands, a step and its teacher under FSDP2.

accelerate takes FSDP2 for accelerators only, so on a CPU the step is sharded by torch itself.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.distributed_worker import main
from helpers.errors import raises_option
from safetensors.torch import load_file
from typer.testing import CliRunner

from draftlab.cli import app
from draftlab.training import checkpointer

HERE = Path(__file__).parents[1]
PATHS = os.pathsep.join(map(str, (HERE.parent, HERE)))


def launch(words: list[str], processes: int, where: Path, **environment: str) -> str:
    """Python with words in so many processes; what they print."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    torchrun = f"-m torch.distributed.run --nproc_per_node {processes} --master_port {port}".split()
    done = subprocess.run(
        [sys.executable, *(torchrun if processes > 1 else []), *words],
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"} | environment,
        cwd=where,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run(out: Path, processes: int, *kinds: str, **environment: str) -> list[dict[str, torch.Tensor]]:
    """Return the files that each kind of work wrote, in turn in the same processes. One process is this one."""
    if processes == 1:
        main(out, *kinds)
    else:
        launch(
            [str(HERE / "helpers" / "distributed_worker.py"), str(out), *kinds],
            processes,
            out.parent,
            **environment,
        )
    return [load_file(out.with_suffix(f".{kind}")) for kind in kinds]


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert float((found[name] - one).abs().max()) <= 2e-4 * float(one.abs().max()) + 1e-7, name


def test_two_processes_compute_what_one_does(tmp_path):
    alone, together = (run(tmp_path / str(processes), processes, "train", "step", "skip") for processes in (1, 2))
    assert together[-1]["skipped"].tolist() == [n in (2, 5) for n in range(1, 10)]
    for one in alone[:2]:
        assert any("log_odds" in name or "ffn" in name for name in one)
    for one, two in zip(alone, together, strict=True):
        assert_close(two, one)


@pytest.mark.slow
def test_two_processes_share_the_text_that_a_draft_writes(tmp_path):
    """Their rows end at different tokens, and every pass of FSDP2 needs both."""
    kinds = ("write", "write-sharded")
    alone, together = (run(tmp_path / str(processes), processes, *kinds) for processes in (1, 2))
    for one, two in zip(alone, together, strict=True):
        assert torch.equal(two["ids"], one["ids"])
        assert torch.equal(two["masks"], one["masks"])
    assert [int(each["rows"]) for each in (*alone, *together)] == [3, 3, 2, 2]


@pytest.mark.slow
def test_deepspeed_computes_what_one_process_does_and_goes_on_where_it_stopped(tmp_path):
    pytest.importorskip("deepspeed")
    (alone,) = run(tmp_path / "alone", 1, "distil")
    for stage in (1, 2, 3):
        # shards even what is small
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        other = {
            "optimizer": {"type": "Adam", "params": {"lr": 1}},
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 9,
        }
        chosen = {
            "ACCELERATE_USE_CPU": "false",  # accelerate would take DDP; without an accelerator it is CPUs anyway
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": json.dumps({"zero_optimization": zero} | other),
        }
        (together,) = run(tmp_path / f"zero-{stage}", 2, "distil", **chosen)
        assert_close(together, alone)


@pytest.mark.parametrize(
    ("launcher", "words", "said"),
    [
        ("DEEPSPEED", "distill --loss ce --data stdlib --draft tiny", "--optimizer muon"),
        ("FSDP", "distill --data stdlib --draft tiny --target tiny", "--optimizer muon"),
        ("DEEPSPEED", "prune --method masks --layers 3 --source tiny --data stdlib", "FSDP2"),
    ],
)
def test_what_a_launcher_cannot_train_is_refused_at_once(launcher, words, said, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{launcher}", "true")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    result = CliRunner().invoke(app, words.split())
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert said in result.stderr


@pytest.mark.slow
def test_the_commands_write_once_and_what_one_process_writes(family_dirs, tmp_path):
    source = family_dirs["llama"]
    (tmp_path / "text.txt").write_text(
        "\n\n".join(f"def f{i}(x, y):\n    return [x + {i}, y * {i}]\n" * 8 for i in range(200))
    )
    same = "--data text.txt --batch-size 4 --steps 4"
    distilled = (
        f"distill --draft {source} --target {family_dirs['llama3_tied']} {same} --seq-len 48 --lr 1e-3 "
        "--text data=0.5,draft=0.5 --prompt-tokens 8 --training-dtype float32 --micro-batch-tokens 64 "
        "--eval-steps 2 --optimizer adamw"
    )
    masked = (
        f"prune --method masks --source {source} {same} --layers 3 --width 48 --seq-len 32 "
        "--refit layers --calibration-tokens 256 --lr 1e-4"
    )
    for words in (distilled, masked):
        made = {}
        for processes in (1, 2):
            out = tmp_path / f"{words.split()[0]}-{processes}"
            typed = f"-m draftlab {words} --out {out}".split()
            printed = launch(typed, processes, tmp_path)
            assert printed.count(str(out)) == 1
            made[processes] = load_file(out / "model.safetensors")
            assert not (tmp_path / f".{out.name}.state").exists()
        assert {n: w.shape for n, w in made[2].items()} == {n: w.shape for n, w in made[1].items()}
        if words is masked:  # in the machine's own dtype, whose rounding decides between near ties
            continue
        for name, wanted in made[1].items():
            scale = float(wanted.abs().max())
            assert float((made[2][name] - wanted).abs().max()) <= 1e-3 * scale + 1e-6, name


LAUNCHED = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_command_of_one_process_is_refused_in_several_by_each_of_them(rank, monkeypatch):
    for name, value in (LAUNCHED | {"RANK": rank, "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["score", "--draft", "tiny", "--target", "tiny", "--data", "stdlib"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "WORLD_SIZE" in result.stderr


@pytest.mark.parametrize(
    "stray",
    [
        {"RANK": "1"},
        {"WORLD_SIZE": "many"},
        {"LOCAL_RANK": "1"},
        {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        {name: LAUNCHED[name] for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")},
        LAUNCHED | {"MASTER_PORT": "1", "RANK": "2"},
    ],
)
def test_variables_of_a_launcher_that_started_nothing_silence_nothing(stray, monkeypatch):
    """An operator of a cluster sets some of them in the shell of a pod."""
    for name, value in stray.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["prune", "--source", "nosuch", "--data", "stdlib", "--out", "x"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "nosuch" in result.stderr


STRAY_STATE = """
from draftlab.training.checkpointer import process_state
state = process_state(cpu=True)
print(state.num_processes, state.process_index, state.is_main_process)
"""


@pytest.mark.parametrize(
    "stray",
    [
        {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        {"LOCAL_RANK": "x", "WORLD_SIZE": "many"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMI_SIZE": "2"},
    ],
)
def test_training_without_a_launcher_runs_alone(stray, tmp_path):
    assert launch(["-c", STRAY_STATE], 1, tmp_path, **stray).split() == ["1", "0", "True"]


def test_training_does_not_wait_for_a_launcher_that_is_gone(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("localhost", 0))  # a port on which nobody listens
        for name, value in (LAUNCHED | {"MASTER_PORT": str(closed.getsockname()[1])}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(checkpointer, "MEETING_SECONDS", 0.1)
        with raises_option("WORLD_SIZE"):
            checkpointer.process_state(cpu=True)
