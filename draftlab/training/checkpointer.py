"""Files of an unfinished run: checkpoints to resume from, and the best weights so far."""

import atexit
import contextlib
import hashlib
import json
import math
import random
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, parse_flag_from_env
from safetensors import SafetensorError
from torch import Tensor, nn

from draftlab.atomic import run_identity, sync
from draftlab.console import note, processes
from draftlab.errors import UserError, one_line
from draftlab.model.checkpoint import resolve_device
from draftlab.provenance import file_sha256
from draftlab.reading import FileModel, parse_json
from draftlab.training import sealed
from draftlab.trust import trusts_remote_code

BEST, WEIGHTS, WRITING = "best.safetensors", "weights.safetensors", "writing"
RECORD, SEAL = "checkpoint.json", "checkpoint.sha256"
PATIENCE = timedelta(days=1)  # of a process that waits while another writes text; NCCL's own is ten minutes
WITHOUT_PICKLES = (".safetensors", ".json", ".sha256")  # files of checkpoints that are not sharded


def process_state(device: torch.device | None = None) -> PartialState:
    """Return accelerate's state of the processes of this run, set to CPUs where there is nothing else.

    device: where a run in one process trains, if this is the first call; None leaves it to accelerate.
    """
    forced = parse_flag_from_env("ACCELERATE_USE_CPU") or (device is not None and device.type == "cpu")
    if device is not None and device.type == "cuda" and device.index is not None and processes() == 1:
        torch.cuda.set_device(device)
    together: dict[str, Any] = {"timeout": PATIENCE} if processes() > 1 else {}
    return PartialState(cpu=forced or (processes() > 1 and not torch.accelerator.is_available()), **together)


def select_device(name: str) -> torch.device:
    """Choose the device to train on, before anything else does, and return it; auto leaves it to accelerate."""
    state = process_state(None if name == "auto" else resolve_device(name))
    return cast(torch.device, state.device)


@atexit.register
def _destroy_process_group() -> None:
    """End the group's threads while Python runs: a thread that frees a tensor later aborts the process."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


class Counter(Protocol):
    """State of a run beside tensors, as JSON has it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Best:
    """The best evaluation of a run, which every checkpoint has."""

    def __init__(self) -> None:
        self.metric, self.step, self.evaluations_since = -math.inf, 0, 0

    def offer(self, metric: float, step: int, accelerator: Accelerator, module: nn.Module, state: Path) -> None:
        """Save the trained weights of module in state if the metric is the highest so far; call it in every process."""
        if not metric > self.metric:
            self.evaluations_since += 1
            return
        self.metric, self.step, self.evaluations_since = metric, step, 0
        trained = {name for name, p in accelerator.unwrap_model(module).named_parameters() if p.requires_grad}
        weights: dict[str, Any] = accelerator.get_state_dict(module)  # gathers what is sharded
        if accelerator.is_main_process:
            sealed.save(state / BEST, {name: weight for name, weight in weights.items() if name in trained})

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


def best_weights(state: Path, part: str) -> dict[str, Tensor]:
    """Return the trained weights at the best evaluation. part: student or constraint."""
    prefix = part + "."
    return {n.removeprefix(prefix): w for n, w in sealed.load(state / BEST).items() if n.startswith(prefix)}


class Checkpoint(FileModel):
    """The record of a checkpoint. run: see run_identity. files: sha256 of each.

    ended: training is over, and what it leads to is in the best weights: there are none in the checkpoint.
    """

    run: str
    step: int
    ended: bool
    processes: int
    counters: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]
    files: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training, to save and to restore."""

    accelerator: Accelerator
    module: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    counters: Sequence[Counter]

    @property
    def sharded(self) -> bool:
        """Return whether accelerate alone can save it, in a format with pickles."""
        return self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)

    def save(self, state: Path, step: int, limit: int, *, ended: bool = False) -> None:
        """Write step-N under a temporary name, rename it, and remove all but the newest checkpoints.

        limit: checkpoints to keep. ended: see Checkpoint.

        Raises:
            UserError: state cannot be written.
        """
        work, main = state / WRITING, self.accelerator.is_main_process
        try:
            if main:
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            groups = [] if ended else self._write(work, run_identity(state))
            self.accelerator.wait_for_everyone()  # each process writes files of its own
            if main:
                self._seal(work, state, step, groups, ended=ended)
                for checkpoint in _checkpoints(state)[:-limit]:
                    shutil.rmtree(checkpoint)
        except (OSError, RuntimeError, SafetensorError, UserError) as error:  # how torch and safetensors report it
            shutil.rmtree(work, ignore_errors=True)
            raise UserError(f"cannot write a checkpoint to {state}: {one_line(error, 200)}") from error
        self.accelerator.wait_for_everyone()

    def restore(self, state: Path) -> Checkpoint | None:
        """Load the newest checkpoint into what was prepared, and return it; None if there is none.

        Raises:
            UserError: it is damaged, of another run, or of another version of draftlab or torch.
        """
        if self.accelerator.is_main_process:
            shutil.rmtree(state / WRITING, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        checkpoints = _checkpoints(state)
        if not checkpoints:
            return None
        newest = checkpoints[-1]
        checkpoint = _checked(newest, state)
        sealed.load(state / BEST)  # read at the end, and checked now
        try:
            for counter, content in zip(self.counters, checkpoint.counters, strict=True):
                counter.load_state_dict(content)
            if not checkpoint.ended:
                self._read(newest, checkpoint)
        except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError, OSError) as error:
            raise UserError(f"cannot resume from {newest} ({one_line(error, 200)}); --force starts again") from error
        return checkpoint

    def _write(self, work: Path, run: str) -> list[dict[str, Any]]:
        """Write weights, optimizers and random states; return what optimizers have besides tensors."""
        sealed.save(work / _random_file(self.accelerator.process_index), _random_states(), run)
        if self.sharded:
            self.accelerator.save_state(str(work))
            return []
        if not self.accelerator.is_main_process:
            return []
        sealed.save(work / WEIGHTS, self._own_weights(), run)
        groups = []
        for number, optimizer in enumerate(self.optimizers):
            tensors, rest = _split(optimizer.state_dict())
            sealed.save(work / f"optimizer-{number}.safetensors", tensors, run)
            groups.append(rest)
        return groups

    def _seal(self, work: Path, state: Path, step: int, groups: list[dict[str, Any]], *, ended: bool) -> None:
        checkpoint = Checkpoint(
            run=run_identity(state), step=step, ended=ended, processes=self.accelerator.num_processes,
            counters=[counter.state_dict() for counter in self.counters], optimizers=groups, files=_hashes(work),
        )  # fmt: skip
        write_record(work, checkpoint)
        sync(work)
        for file in state.iterdir():
            if file.is_file():
                sync(file)  # the log: it must not be behind its checkpoint
        final = state / f"step-{step:08d}"
        shutil.rmtree(final, ignore_errors=True)
        work.rename(final)
        sync(state)

    def _read(self, folder: Path, checkpoint: Checkpoint) -> None:
        if self.sharded:
            _check_trusted(folder)
            self.accelerator.load_state(str(folder))
        else:
            self._read_own(folder, checkpoint)
        if checkpoint.processes == self.accelerator.num_processes:
            file = folder / _random_file(self.accelerator.process_index)
            _set_random_states(sealed.load(file, checkpoint.run))
        else:
            count = self.accelerator.num_processes
            note(f"the checkpoint is of {checkpoint.processes} processes, and this run has {count}: it may differ")

    def _read_own(self, folder: Path, checkpoint: Checkpoint) -> None:
        weights = sealed.load(folder / WEIGHTS, checkpoint.run)
        if weights.keys() != self._own_weights().keys():
            raise ValueError("its weights have other names")
        self.accelerator.unwrap_model(self.module).load_state_dict(weights, strict=False)
        for number, (optimizer, rest) in enumerate(zip(self.optimizers, checkpoint.optimizers, strict=True)):
            tensors = sealed.load(folder / f"optimizer-{number}.safetensors", checkpoint.run)
            optimizer.load_state_dict(_joined(tensors, rest))

    def _own_weights(self) -> dict[str, Tensor]:
        """Return the parameters that are trained, and the buffers: the others are the inputs' own."""
        module = self.accelerator.unwrap_model(self.module)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        trained = {name for name, p in module.named_parameters() if p.requires_grad}  # tied ones once
        return {n: value for n, value in module.state_dict().items() if n in trained or n not in parameters}


def _split(content: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state, and the rest."""
    entries = {f"{i}.{name}": value for i, state in content["state"].items() for name, value in state.items()}
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    return tensors, {
        "numbers": {n: v for n, v in entries.items() if n not in tensors},
        "groups": content["param_groups"],
    }


def _joined(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> dict[str, Any]:
    states: dict[int, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *rest["numbers"].items()]:
        index, _, entry = name.partition(".")
        states.setdefault(int(index), {})[entry] = value
    groups = [
        {name: tuple(v) if isinstance(v, list) and name != "params" else v for name, v in group.items()}
        for group in rest["groups"]
    ]
    return {"state": states, "param_groups": groups}


def _random_states() -> dict[str, Tensor]:
    """Return the states of all generators of this process."""
    _, words, gauss = random.getstate()
    state: Any = np.random.get_state(legacy=False)
    numbers = [state["state"]["pos"], state["has_gauss"], state["gauss"], math.nan if gauss is None else gauss]
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": torch.tensor(words), "numpy": torch.from_numpy(state["state"]["key"].astype(np.int64)),
        "numbers": torch.tensor(numbers, dtype=torch.float64), "torch": torch.get_rng_state(),
        **{f"cuda.{i}": value for i, value in enumerate(cuda)},
    }  # fmt: skip


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    position, has_gauss, cached, gauss = states["numbers"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), None if math.isnan(gauss) else gauss))
    keys = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    torch.set_rng_state(states["torch"])
    for i in range(torch.cuda.device_count()):
        if f"cuda.{i}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{i}"], i)


def _random_file(process: int) -> str:
    return f"random-{process}.safetensors"


def _hashes(folder: Path) -> dict[str, str]:
    return {str(f.relative_to(folder)): file_sha256(f) for f in sorted(folder.rglob("*")) if f.is_file()}


def write_record(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the record of a checkpoint, with its hash."""
    content = json.dumps(checkpoint.model_dump()).encode()  # pydantic's JSON has no infinity
    (folder / RECORD).write_bytes(content)
    (folder / SEAL).write_text(hashlib.sha256(content).hexdigest())


def _checked(folder: Path, state: Path) -> Checkpoint:
    """Return the record of a checkpoint. Raises UserError: it is damaged, or of another run."""
    advice = f"--force starts again, or remove {state}"
    try:
        content = (folder / RECORD).read_bytes()
        if hashlib.sha256(content).hexdigest() != (folder / SEAL).read_text("ascii"):
            raise ValueError
        checkpoint = Checkpoint.model_validate(parse_json(content))
    except (OSError, ValueError):
        raise UserError(f"{folder} is damaged, or of another version of draftlab; {advice}") from None
    hashes = {name: digest for name, digest in _hashes(folder).items() if name not in (RECORD, SEAL)}
    if different := sorted(dict(hashes.items() ^ checkpoint.files.items())):
        raise UserError(f"{folder / different[0]} is damaged: its hash is not the stored one; {advice}")
    if checkpoint.run != run_identity(state):
        raise UserError(f"{folder} is of another run; {advice}")
    return checkpoint


def check_resumable(state: Path) -> None:
    """Raises UserError: the newest checkpoint has pickles, and nobody trusts them; said before models are loaded."""
    for checkpoint in _checkpoints(state)[-1:]:
        if any(file.is_file() and file.suffix not in WITHOUT_PICKLES for file in checkpoint.rglob("*")):
            _check_trusted(checkpoint)


def _check_trusted(folder: Path) -> None:
    if not trusts_remote_code():
        raise UserError(
            f"{folder} is a checkpoint of FSDP or DeepSpeed: these have pickles, which can run code; give "
            "--trust-remote-code if it is yours"
        )


def _checkpoints(state: Path) -> list[Path]:
    return sorted(state.glob("step-*"))


@contextlib.contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Yield a list to which SIGTERM, SIGHUP and the first Ctrl-C are added, so that a checkpoint is saved first."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def handler(number: int, _: object) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)
        if number == signal.SIGINT:
            note("stopping after this step and its checkpoint; Ctrl-C again stops at once")

    signals = [n for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)
