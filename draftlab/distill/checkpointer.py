"""What a run leaves on disk while it trains: checkpoints to go on from, and the best weights so far."""

import atexit
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftlab.console import processes
from draftlab.errors import UserError

BEST = "best.safetensors"


def process_state(device: torch.device | None = None) -> PartialState:
    """The processes of this run, which are on CPUs where there is nothing else: accelerate must be told so.

    device: where a run in one process trains, if it is the first to ask; None leaves that to accelerate.
    """
    forced = parse_flag_from_env("ACCELERATE_USE_CPU") or (device is not None and device.type == "cpu")
    if device is not None and device.type == "cuda" and device.index is not None and processes() == 1:
        torch.cuda.set_device(device)
    return PartialState(cpu=forced or (processes() > 1 and not torch.accelerator.is_available()))


@atexit.register
def _leave() -> None:
    """End the group's threads while Python runs: one that lets go of a tensor later aborts the process."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


class Best:
    """The best evaluation of a run; accelerate keeps it in every checkpoint."""

    def __init__(self) -> None:
        self.merit, self.step, self.since = -math.inf, 0, 0  # since: evaluations that were no better

    def offer(self, merit: float, step: int, accelerator: Accelerator, module: nn.Module, state: Path) -> None:
        """Keep module's trained weights in state if nothing before was as good. Every process takes part."""
        if not merit > self.merit:
            self.since += 1
            return
        self.merit, self.step, self.since = merit, step, 0
        _save_weights(accelerator, module, state / BEST)

    def state_dict(self) -> dict[str, Any]:
        return {"merit": self.merit, "step": self.step, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.merit, self.step, self.since = state["merit"], state["step"], state["since"]


def best_weights(state: Path, part: str) -> dict[str, Tensor]:
    """Trained weights at the best evaluation, of one part of what was trained: ``student`` or ``constraint``."""
    prefix = part + "."
    return {n.removeprefix(prefix): w for n, w in load_file(state / BEST).items() if n.startswith(prefix)}


def save(accelerator: Accelerator, state: Path, step: int, keep_last: int) -> None:
    """Write step-N under a temporary name, rename it, and drop all but the newest keep_last.

    Raises:
        UserError: state cannot be written.
    """
    work = state / "writing"
    try:
        accelerator.save_state(str(work))
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors say a full disk their own way
        shutil.rmtree(work, ignore_errors=True)
        raise _unwritable(state, error) from error
    accelerator.wait_for_everyone()  # each process writes files of its own
    if accelerator.is_main_process:
        work.rename(state / f"step-{step:08d}")
        for checkpoint in _checkpoints(state)[:-keep_last]:
            shutil.rmtree(checkpoint)
    accelerator.wait_for_everyone()


def restore(accelerator: Accelerator, state: Path) -> int:
    """Load the newest checkpoint into what was prepared; the step to go on from, 0 when there is none.

    Raises:
        UserError: it does not fit, as one of another version of draftlab or torch, or a damaged one.
    """
    if accelerator.is_main_process:
        shutil.rmtree(state / "writing", ignore_errors=True)
    accelerator.wait_for_everyone()
    found = _checkpoints(state)
    if not found:
        return 0
    try:
        accelerator.load_state(str(found[-1]))
    except (ValueError, KeyError, RuntimeError, SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{found[-1]} cannot be gone on from ({reason}); remove {state} to start again") from error
    return int(found[-1].name.removeprefix("step-"))


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
