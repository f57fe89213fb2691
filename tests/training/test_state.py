"""State of an unfinished run: every bit comes back, damage and other runs' checkpoints do not; no pickles."""

import math
import resource
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from helpers.errors import raises_option
from torch import nn

from draftlab.errors import UserError
from draftlab.runs.atomic import claim_state, run_identity
from draftlab.runs.provenance import LOG_FILE
from draftlab.training import checkpointer, run
from draftlab.training.checkpointer import BEST, CONTENT, Best, Training
from draftlab.trust import remote_code


def training(seed: int = 0) -> Training:
    """Return two optimizers after a step, random generators in the middle of their streams, and a frozen layer."""
    torch.manual_seed(seed)
    AcceleratorState._reset_state()  # tests before this one may have chosen another dtype
    accelerator = checkpointer.new_accelerator(torch.float32, 1.0)
    first, last = nn.Linear(3, 4), nn.Linear(4, 2).requires_grad_(False)
    module = nn.Sequential(first, nn.BatchNorm1d(4), last)
    optimizers = [torch.optim.AdamW([first.weight]), torch.optim.SGD([first.bias], momentum=0.9)]
    prepared, *optimizers = accelerator.prepare(module, *optimizers)
    return Training(accelerator=accelerator, module=prepared, optimizers=optimizers, counters=[Best()])


def step(one: Training) -> list[float]:
    """Take a step on random input; return what decides the next ones."""
    one.module(torch.randn(8, 3)).square().sum().backward()
    for optimizer in one.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    weights = [value.double().sum().item() for value in one.module.state_dict().values()]
    return [*weights, torch.rand(()).item()]


def saved(state: Path, lr: float = 1.0) -> Training:
    """Claim a state and save a checkpoint after step 1."""
    claim_state(state, {"lr": lr})
    one = training()
    step(one)
    best: Any = one.counters[0]
    best.offer(math.pi, 1, one.accelerator, one.module, state)
    one.save(state, 1)
    return one


@pytest.fixture
def state(tmp_path) -> Path:
    saved(tmp_path / ".out.state")
    return tmp_path / ".out.state"


def test_what_comes_back_goes_on_in_the_same_bits(tmp_path):
    state = tmp_path / ".out.state"
    one = saved(state)
    wanted = [step(one), step(one)]
    other = training(7)
    assert other.restore(state) == 1
    frozen = {name: value for name, value in one.module.state_dict().items() if name.startswith("2.")}
    other.module.load_state_dict(frozen, strict=False)  # the inputs' own
    assert [step(other), step(other)] == wanted
    assert vars(other.counters[0]) == {"metric": math.pi, "step": 1}


def test_the_best_weights_are_those_of_the_checkpoint_that_is_restored(state):
    """Whatever was evaluated after it: with a smaller rate a resumed run does not come to that evaluation again."""
    before = checkpointer.load(state, BEST)
    later = {name: weight + 1 for name, weight in before.items()}
    checkpointer.save(state, BEST, later)
    assert training().restore(state) == 1
    restored = checkpointer.load(state, BEST)
    assert restored.keys() == before.keys()
    assert all(torch.equal(restored[name], weight) for name, weight in before.items())


def test_every_damaged_value_is_noticed(state):
    for file in (state / "step-00000001" / CONTENT, state / BEST):
        whole, damaged = file.read_bytes(), []
        with zipfile.ZipFile(file) as parts:
            sized = [part for part in parts.infolist() if part.file_size]
        for part in sized:
            name, extra = struct.unpack_from("<HH", whole, part.header_offset + 26)
            at = part.header_offset + 30 + name + extra + part.file_size // 2
            damaged.append(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        for content in (*damaged, whole[:-1], b"", None):
            file.unlink() if content is None else file.write_bytes(content)
            with raises_option(f"remove {state}"):
                training().restore(state)
        file.write_bytes(whole)
    assert training().restore(state) is not None


@pytest.mark.parametrize("moved", ["step-00000001", BEST])
def test_the_checkpoint_of_another_run_is_not_resumed(state, tmp_path, moved):
    other = tmp_path / ".other.state"
    saved(other, lr=2.0)
    target = other / moved
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    (state / moved).rename(target)
    with raises_option(f"remove {other}"):
        training().restore(other)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": []},
        {"weights": {"0.weight": 3}},
        {"optimizers": [{}, {}]},
        {"counters": [3]},
        {"random": [7]},
        {"step": None},
        None,
    ],
)
def test_a_checkpoint_with_other_content_is_one_line(state, change):
    """The file is whole, and its checksums are right."""
    file = f"step-00000001/{CONTENT}"
    content = checkpointer.load(state, file)
    if change is None:
        torch.save({"run": run_identity(state), "content": [1]}, state / file)
    else:
        checkpointer.save(state, file, content | change)
    with raises_option(f"remove {state}"):
        training().restore(state)


def test_the_end_of_training_needs_no_weights(state):
    one = training()
    one.save(state, 2, ended=True)
    assert training().restore(state) == 2
    assert "weights" not in checkpointer.load(state, f"step-00000002/{CONTENT}")


def test_pickles_of_sharded_training_need_trust(state, monkeypatch):
    one = training()
    monkeypatch.setattr(type(one.accelerator), "distributed_type", DistributedType.FSDP)
    loaded = []
    monkeypatch.setattr(one.accelerator, "load_state", loaded.append)
    with raises_option("--trust-remote-code"):
        one.restore(state)
    assert not loaded
    with remote_code(True):
        one.restore(state)
    assert loaded == [str(state / "step-00000001")]


class Bomb:
    """A pickle that leaves a file where it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


def test_code_in_a_checkpoint_is_not_run(state):
    ran = state.parent / "ran"
    torch.save({"run": run_identity(state), "content": Bomb(ran)}, state / "step-00000001" / CONTENT)
    with raises_option(f"remove {state}"):
        training().restore(state)
    assert not ran.exists()


def test_a_damaged_log_is_one_line(tmp_path):
    log = tmp_path / LOG_FILE
    line = '{"step": 0, "tokens": 1, "loss": 1.0, "cross_entropy": 1.0}\n'
    log.write_text(line * 2)
    assert [record.step for record in run.read_log(log)] == [0]
    for damaged in (line + "half\n" + line, ""):
        log.write_text(damaged)
        with raises_option("log.jsonl", f"remove {tmp_path}"):
            run.read_log(log)


@pytest.mark.parametrize("limit", [100, 3000])
def test_a_full_disk_is_said_in_one_line_and_leaves_no_file(tmp_path, limit):
    """A limit of the size of files stands for the disk: a write beyond it fails in the same place."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises((UserError, OSError)):
            checkpointer.save(tmp_path, "weights", {"ids": torch.arange(2000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
