"""Files of an unfinished run: checkpoints to resume from, and the best weights so far."""

import atexit
import contextlib
import math
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftlab.console import note, processes
from draftlab.errors import UserError
from draftlab.model.checkpoint import resolve_device

BEST = "best.safetensors"


def process_state(device: torch.device | None = None) -> PartialState:
    """Return accelerate's state of the processes of this run, set to CPUs where there is nothing else.

    device: where a run in one process trains, if this is the first call; None leaves it to accelerate.
    """
    forced = parse_flag_from_env("ACCELERATE_USE_CPU") or (device is not None and device.type == "cpu")
    if device is not None and device.type == "cuda" and device.index is not None and processes() == 1:
        torch.cuda.set_device(device)
    return PartialState(cpu=forced or (processes() > 1 and not torch.accelerator.is_available()))


def select_device(name: str) -> torch.device:
    """Choose the device to train on, before anything else does, and return it; auto leaves it to accelerate."""
    state = process_state(None if name == "auto" else resolve_device(name))
    return cast(torch.device, state.device)


@atexit.register
def _destroy_process_group() -> None:
    """End the group's threads while Python runs: a thread that frees a tensor later aborts the process."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


class Best:
    """The best evaluation of a run, which accelerate saves in every checkpoint."""

    def __init__(self) -> None:
        self.metric, self.step, self.evaluations_since = -math.inf, 0, 0

    def offer(self, metric: float, step: int, accelerator: Accelerator, module: nn.Module, state: Path) -> None:
        """Save the trained weights of module in state if the metric is the highest so far; call it in every process."""
        if not metric > self.metric:
            self.evaluations_since += 1
            return
        self.metric, self.step, self.evaluations_since = metric, step, 0
        _save_weights(accelerator, module, state / BEST)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


def best_weights(state: Path, part: str) -> dict[str, Tensor]:
    """Return the trained weights at the best evaluation. part: student or constraint."""
    prefix = part + "."
    return {n.removeprefix(prefix): w for n, w in load_file(state / BEST).items() if n.startswith(prefix)}


def save(accelerator: Accelerator, state: Path, step: int, limit: int) -> None:
    """Write step-N under a temporary name, rename it, and remove all but the newest checkpoints.

    limit: checkpoints to keep.

    Raises:
        UserError: state cannot be written.
    """
    work = state / "writing"
    try:
        accelerator.save_state(str(work))
    except (OSError, RuntimeError, SafetensorError) as error:  # how torch and safetensors report a full disk
        shutil.rmtree(work, ignore_errors=True)
        raise _unwritable(state, error) from error
    accelerator.wait_for_everyone()  # each process writes files of its own
    if accelerator.is_main_process:
        work.rename(state / f"step-{step:08d}")
        for checkpoint in _checkpoints(state)[:-limit]:
            shutil.rmtree(checkpoint)
    accelerator.wait_for_everyone()


def restore(accelerator: Accelerator, state: Path) -> int:
    """Load the newest checkpoint into what was prepared, and return its step; 0 if there is none.

    Raises:
        UserError: it is damaged, or of another version of draftlab or torch.
    """
    if accelerator.is_main_process:
        shutil.rmtree(state / "writing", ignore_errors=True)
    accelerator.wait_for_everyone()
    checkpoints = _checkpoints(state)
    if not checkpoints:
        return 0
    newest = checkpoints[-1]
    try:
        accelerator.load_state(str(newest))
    except (ValueError, KeyError, RuntimeError, SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"cannot resume from {newest} ({reason}); remove {state} to start again") from error
    return int(newest.name.removeprefix("step-"))


def _save_weights(accelerator: Accelerator, module: nn.Module, file: Path) -> None:
    trained = {name for name, p in accelerator.unwrap_model(module).named_parameters() if p.requires_grad}
    weights: dict[str, Any] = accelerator.get_state_dict(module)  # gathers what is sharded
    if not accelerator.is_main_process:
        return
    writing = file.with_suffix(".writing")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({n: w.detach().cpu().contiguous() for n, w in weights.items() if n in trained}, writing)
    except (OSError, SafetensorError) as error:
        raise _unwritable(file.parent, error) from error
    writing.rename(file)


def _unwritable(state: Path, error: Exception) -> UserError:
    return UserError(f"cannot write a checkpoint to {state}: {' '.join(str(error).split())[:200]}")


def _checkpoints(state: Path) -> list[Path]:
    return sorted(state.glob("step-*"))


@contextlib.contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Yield a list to which SIGTERM and the first Ctrl-C are added, so that a checkpoint is saved before the end."""
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

    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)
