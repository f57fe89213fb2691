"""Files of an unfinished training run: checkpoints to resume from, and the best weights so far."""

import atexit
import contextlib
import gc
import math
import os
import shutil
import signal
import socket
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedType,
    GradientAccumulationPlugin,
    gather_object,
    parse_flag_from_env,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from draftlab.console import LAUNCHER, is_main_process, launched, note, processes
from draftlab.errors import UserError, one_line
from draftlab.model.devices import resolve_device
from draftlab.reading import reading
from draftlab.runs.atomic import replacing, run_identity, sync
from draftlab.trust import trusts_remote_code

BEST = "best.pt"
CONTENT = "state.pt"
WRITING = "writing"
# timeout of processes that wait while one process generates text; NCCL's default is ten minutes
PATIENCE = timedelta(days=1)
MEETING_SECONDS = 60.0
# variables from which accelerate would conclude that a launcher started this process
MISLEADING = (*LAUNCHER[:3], "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def process_state(*, cpu: bool = False) -> PartialState:
    """Return accelerate's PartialState, which the first call creates. Without a GPU, training runs on CPUs.

    A process that no launcher started trains alone, even if the environment has some variables of a launcher.

    cpu: Whether to train on CPUs even if there is a GPU. Only the first call can choose this.
    """
    cpu = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
    if processes() == 1:
        with contextlib.nullcontext() if launched() else _without(MISLEADING):
            return PartialState(cpu=cpu)
    _meet()
    return PartialState(cpu=cpu or not torch.accelerator.is_available(), timeout=PATIENCE)


def _meet() -> None:
    """Wait until rank 0 or its launcher listens, because torch would wait for PATIENCE and ignore Ctrl-C.

    Raises:
        UserError: Nobody listens for MEETING_SECONDS.
    """
    host = os.environ["MASTER_ADDR"]
    port = os.environ["MASTER_PORT"]
    last = time.monotonic() + MEETING_SECONDS
    while not is_main_process() and not dist.is_initialized():
        try:
            socket.create_connection((host, int(port)), timeout=MEETING_SECONDS).close()
            return
        except (OSError, OverflowError, ValueError) as error:
            if time.monotonic() > last:
                raise UserError(
                    f"WORLD_SIZE is {processes()}, but no process answers at MASTER_ADDR:MASTER_PORT {host}:{port} "
                    f"({one_line(error)}); start training with torchrun, or unset WORLD_SIZE to train in one process"
                ) from None
            time.sleep(1)


@contextlib.contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    """Return a context without some environment variables."""
    values = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(values)


def select_device(name: str) -> torch.device:
    """Set the device to train on, and return it. Call this before any use of accelerate.

    name: Device such as cuda:1, or auto. With auto, accelerate chooses.
    """
    if name == "auto":
        return cast(torch.device, process_state().device)
    device = resolve_device(name)
    if device.type == "cuda" and device.index is not None and processes() == 1:
        torch.cuda.set_device(device)
    return cast(torch.device, process_state(cpu=device.type == "cpu").device)


@atexit.register
def _destroy_process_group() -> None:
    """Destroy the process group before Python ends. Otherwise a thread may free a tensor later and abort Python."""
    if dist.is_available() and dist.is_initialized():
        gc.collect()  # because FSDP2 keeps its last transfers in reference cycles
        dist.destroy_process_group()


class Best:
    """The metric and the step of the best evaluation so far. Checkpoints store both."""

    def __init__(self) -> None:
        self.metric = -math.inf
        self.step = 0

    def offer(self, metric: float, step: int, accelerator: Accelerator, module: nn.Module, state: Path) -> None:
        """Save the trained weights to the directory `state` if `metric` is the highest so far.

        Every process of a distributed run must call this.
        """
        if not metric > self.metric:
            return
        self.metric = float(metric)
        self.step = step
        trained = {name for name, p in accelerator.unwrap_model(module).named_parameters() if p.requires_grad}
        weights: dict[str, Any] = accelerator.get_state_dict(module)  # gathers sharded weights
        if accelerator.is_main_process:
            own = {name: weight.cpu() for name, weight in weights.items() if name in trained}
            save(state, BEST, own)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


def best_weights(state: Path, part: str) -> dict[str, Tensor]:
    """Return the trained weights of the best evaluation, by parameter name.

    Args:
        state: Directory with the checkpoints of the training run.
        part: Name of the module whose weights are returned: "student", or "constraint" for pruning masks.
    """
    prefix = part + "."
    return {n.removeprefix(prefix): w for n, w in load(state, BEST).items() if n.startswith(prefix)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The objects of a training run that checkpoints save and restore.

    counters: Objects whose state_dict has plain values, no tensors.
    """

    accelerator: Accelerator
    module: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    counters: Sequence[Stateful]

    @property
    def sharded(self) -> bool:
        """Return whether FSDP or DeepSpeed shards the weights.

        Accelerate saves sharded weights in files with pickles, which are loaded only with --trust-remote-code.
        """
        return self.accelerator.distributed_type in (
            DistributedType.FSDP,
            DistributedType.DEEPSPEED,
        )

    def save(self, state: Path, step: int, *, ended: bool = False) -> None:
        """Write the checkpoint step-N to the directory `state`, and remove earlier checkpoints.

        The checkpoint has a temporary name until it is complete. It keeps the best weights so far.

        ended: Whether training has ended. If so, the checkpoint has no weights.

        Raises:
            UserError: `state` cannot be written.
        """
        work = state / WRITING
        main = self.accelerator.is_main_process
        with reading(f"cannot write a checkpoint to {state}"):
            if main:
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            if self.sharded and not ended:
                self.accelerator.save_state(str(work))  # each process writes its own files
            content = self._content(step, ended)
            self.accelerator.wait_for_everyone()
            if main:
                save(state, f"{WRITING}/{CONTENT}", content)
                if (state / BEST).exists():
                    _share(state / BEST, work / BEST)
                sync(state)  # with the log, so that it has every step of the checkpoint
                work.rename(state / f"step-{step:08d}")
                sync(state)
                for earlier in _checkpoints(state)[:-1]:
                    shutil.rmtree(earlier)
        self.accelerator.wait_for_everyone()

    def restore(self, state: Path) -> int | None:
        """Load the newest checkpoint in the directory `state`, and return its step, or None if there is no checkpoint.

        Raises:
            UserError: The checkpoint is damaged, or it is from another run or version of draftlab or torch, or it has
                pickles and --trust-remote-code is not set.
        """
        if self.accelerator.is_main_process:
            shutil.rmtree(state / WRITING, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        newest = next(reversed(_checkpoints(state)), None)
        if newest is None:
            return None
        content = load(state, f"{newest.name}/{CONTENT}")
        load(state, BEST)  # needed only at the end, but read now to check it
        self._restore_best(state, newest)
        with reading(f"cannot resume from {newest} (remove {state} to start again)"):
            for counter, values in zip(self.counters, content["counters"], strict=True):
                counter.load_state_dict(values)
            if not content["ended"]:
                self._restore(newest, content)
            return int(content["step"])

    def _restore_best(self, state: Path, checkpoint: Path) -> None:
        """Put back the best weights of a checkpoint, to which its counters belong.

        An evaluation after the checkpoint may have replaced them. A run that resumes with a smaller learning rate does
        not repeat that evaluation.
        """
        kept = checkpoint / BEST
        main = self.accelerator.is_main_process
        if main and kept.exists() and not kept.samefile(state / BEST):
            with replacing(state / BEST) as part:
                part.unlink(missing_ok=True)
                _share(kept, part)
        self.accelerator.wait_for_everyone()

    def _content(self, step: int, ended: bool) -> dict[str, Any]:
        """Return the content of state.pt: all parts of a checkpoint that draftlab saves without accelerate."""
        content = {
            "step": step,
            "ended": ended,
            "counters": [counter.state_dict() for counter in self.counters],
        }
        if ended:
            return content
        # training uses no global random generators except these
        random = {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
        content["random"] = gather_object([random])
        if not self.sharded:
            content["weights"] = self._own_weights()
            content["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        return content

    def _restore(self, folder: Path, content: dict[str, Any]) -> None:
        if self.sharded:
            if not trusts_remote_code():
                raise UserError(
                    f"{folder} is a checkpoint of FSDP or DeepSpeed with pickle files, which can run code; if you made "
                    f"it, add --trust-remote-code; otherwise remove {folder.parent} to start again"
                )
            self.accelerator.load_state(str(folder))
        else:
            if content["weights"].keys() != self._own_weights().keys():
                raise ValueError("the stored weights have other names than the model's weights")
            self.accelerator.unwrap_model(self.module).load_state_dict(content["weights"], strict=False)
            for optimizer, values in zip(self.optimizers, content["optimizers"], strict=True):
                optimizer.load_state_dict(values)
        before = len(content["random"])
        now = self.accelerator.num_processes
        if before == now:
            random = content["random"][self.accelerator.process_index]
            torch.set_rng_state(random["torch"])
            torch.cuda.set_rng_state_all(random["cuda"][: torch.cuda.device_count()])
        else:
            note(
                f"the checkpoint comes from a run with {before} processes, but this run has {now}, so results may "
                "differ slightly"
            )

    def _own_weights(self) -> dict[str, Tensor]:
        """Return the trained parameters and the buffers. Frozen parameters are not saved: they come from the inputs."""
        module = self.accelerator.unwrap_model(self.module)
        named = module.named_parameters(remove_duplicate=False)
        frozen = {name for name, p in named if not p.requires_grad}
        return {name: value for name, value in module.state_dict().items() if name not in frozen}


def save(state: Path, name: str, content: Mapping[str, Any]) -> None:
    """Write tensors and numbers to the file `name` in `state`, the state directory of the run, atomically.

    Raises:
        UserError: The file cannot be written.
    """
    file = state / name
    with reading(f"cannot write {file}; the disk may be full"):
        file.parent.mkdir(parents=True, exist_ok=True)
        # an open file, because torch hides the error of a full disk if it gets a path
        with replacing(file) as part, part.open("wb") as stream:
            torch.save({"run": run_identity(state), "content": dict(content)}, stream)


def load(state: Path, name: str) -> dict[str, Any]:
    """Return the content of a file that `save` wrote. Code in pickles is not run.

    Raises:
        UserError: The file is missing or damaged, or belongs to another run.
    """
    file = state / name
    with reading(f"{file} cannot be read (remove {state} to start again)"):
        with zipfile.ZipFile(file) as parts:
            if parts.testzip():  # checked here, because torch does not compare checksums
                raise ValueError("the file is damaged")
        stored = torch.load(file, map_location="cpu", weights_only=True)
        if stored["run"] != run_identity(state):
            raise ValueError("the file belongs to another run")
        return {**stored["content"]}


def load_or_make(state: Path, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the tensors, numbers and lists that `make` computes, by name.

    They are stored in the file `name` of the directory `state`. If the file exists, it is read, and `make` is not
    called. A resumed run thus gets the same values. Of several processes, only the main process calls `make`.
    """
    with process_state().main_process_first():
        if not (state / name).exists():
            save(state, name, make())
    return load(state, name)


def _share(file: Path, other: Path) -> None:
    """Give a file a second name, or copy it where a file system has no hard links."""
    try:
        os.link(file, other)
    except OSError:
        shutil.copyfile(file, other)


def _checkpoints(state: Path) -> list[Path]:
    return sorted(state.glob("step-*"))


@contextlib.contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Yield a list to which SIGTERM, SIGHUP and the first Ctrl-C are added, so that a run can stop with a checkpoint.

    A second Ctrl-C raises KeyboardInterrupt.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def handler(number: int, _: object) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)
        if number == signal.SIGINT:
            note(
                "stopping after this step and saving a checkpoint; press Ctrl-C again to stop at once without a "
                "checkpoint"
            )

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def check(*, optimizer: str = "adamw", masks: bool = False) -> None:
    """Check that the launcher's choice of DeepSpeed or FSDP can run this training.

    masks: Whether pruning masks are trained.

    Raises:
        UserError: The optimizer is Muon with DeepSpeed or FSDP, or masks are trained with DeepSpeed.
    """
    chosen = next((name for name in ("DeepSpeed", "FSDP") if _chosen(name)), None)
    if chosen and optimizer == "muon":
        raise UserError(
            f"--optimizer muon trains with Muon and AdamW together, but {chosen} can run only one optimizer; use "
            "--optimizer adamw, or launch with DDP"
        )
    if chosen == "DeepSpeed" and masks:
        raise UserError(
            "--method masks does not work with DeepSpeed, which trains copies of the masks; launch with DDP or FSDP2"
        )


def new_accelerator(dtype: torch.dtype, clip: float) -> Accelerator:
    """Return an Accelerator that computes in `dtype` with fp32 weights.

    The command's settings take precedence over the settings of the launcher and of DeepSpeed's configuration.

    clip: Largest gradient norm. Only DeepSpeed uses it here, because DeepSpeed clips gradients itself.
    """
    if not _chosen("DeepSpeed"):
        # the training loop accumulates gradients, so the launcher's setting is overwritten
        alone = GradientAccumulationPlugin(num_steps=1)
        return Accelerator(
            mixed_precision="bf16" if dtype == torch.bfloat16 else "no",
            gradient_accumulation_plugin=alone,
        )
    accelerator = Accelerator(mixed_precision="no")  # DeepSpeed's bf16 rounds the weights, too
    # otherwise transformers shards the models that one process loads later
    unset_hf_deepspeed_config()
    plugin: Any = accelerator.deepspeed_plugin
    config: dict[str, Any] = plugin.deepspeed_config
    for name in ("optimizer", "scheduler"):
        config.pop(name, None)
    config |= {
        # DeepSpeed requires this setting, but the training loop distributes the rows
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": accelerator.num_processes,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "torch_autocast": {"enabled": dtype == torch.bfloat16, "dtype": "bfloat16"},
    }
    # despite its name, this setting also gathers fp32 weights
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return accelerator


def _chosen(name: str) -> bool:
    """Return whether the launcher chose `name`, "DeepSpeed" or "FSDP". On CPUs the choice has no effect."""
    return parse_flag_from_env(f"ACCELERATE_USE_{name.upper()}") and not parse_flag_from_env("ACCELERATE_USE_CPU")
