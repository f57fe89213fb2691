"""Costs of work on a target on this machine: measured rates, and estimates from them."""

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field

from draftlab.console import note_if_slow
from draftlab.engine.timing import bandwidth_gbs, matmul_tflops
from draftlab.model import checkpoint, memory
from draftlab.model.shape import Shape, resolve
from draftlab.model.size import ApproximateSize
from draftlab.reading import FileModel
from draftlab.searching.prompts import CHOOSE
from draftlab.training.optimizers import training_dtype

WRITTEN, SEQ_LEN, BATCH_SIZE = 96, 256, 8
START_SECONDS = 2.0  # a command takes them until its models are loaded
CANDIDATE_SECONDS = 2.0  # a shape of a search takes them whatever its size
TRAINING = {
    "float32": 1.5,
    "bfloat16": 3.0,
}  # over the machine's products: attention, optimizers, Python
WRITING = 3.0  # over the machine's products
LAW_SECONDS, LAW_PASSES = 8.0, 600  # passes as long as the target's
LAYER_SECONDS = 3e-5  # a layer of a pass takes them whatever its size
OFFSET_COST = 2.8  # tokens that a parallel draft reads for each token of the text
MAX_TOKENS = 64  # length of each scored answer
TTT_STEPS, HEAD_SHARE = 4, 1.5  # an EAGLE-3 head, in layers of the target


class Machine(FileModel, extra="ignore"):
    """The measured machine of a plan. slowdown is wall time over CPU time, above 1 where other work runs."""

    device: str
    cores: int
    dtype: str
    tflops: float
    training_dtype: str
    training_tflops: float
    gigabytes_per_second: float
    slowdown: float = Field(ge=1)
    free_memory: int
    free_disk: int

    def describe(self) -> str:
        return (
            f"{self.device}, {self.cores} core{'s' * (self.cores > 1)}, {self.tflops:.3g} TFLOP/s and "
            f"{self.gigabytes_per_second:.3g} GB/s in {self.dtype}, {self.training_tflops:.3g} TFLOP/s to train in "
            f"{self.training_dtype}; {self.free_memory / 1e9:.3g} GB of memory and "
            f"{self.free_disk / 1e9:.3g} GB of disk free"
            + (
                f"; other work makes it {self.slowdown:.1f} times slower"
                if self.slowdown > 1.5
                else ""
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds that work on a target takes on a machine."""

    machine: Machine
    size: Shape | ApproximateSize

    @property
    def bytes_per_weight(self) -> int:
        return checkpoint.DTYPES[self.machine.dtype].itemsize

    @property
    def start(self) -> float:
        """Return the seconds of a command outside its work."""
        return self.machine.slowdown * START_SECONDS

    def write(self, sequences: int, tokens: int, batch: int) -> float:
        """Return the seconds in which the target answers each of some prompts with this number of tokens."""
        passes = math.ceil(sequences / batch) * tokens
        read = self.size.weight_bytes(self.bytes_per_weight) / (
            1e9 * self.machine.gigabytes_per_second
        )
        layers = LAYER_SECONDS * self.size.layers
        computed = WRITING * batch * self._token_flops / (1e12 * self.machine.tflops)
        return passes * (max(read, computed) + self.machine.slowdown * layers)

    def read(self, tokens: int) -> float:
        """Return the seconds in which the target reads tokens and stores its most probable next tokens."""
        return WRITING * tokens * self._token_flops / (1e12 * self.machine.training_tflops)

    def train(self, draft: Shape, steps: int) -> float:
        return self._train(3 * draft.flops_per_token(SEQ_LEN // 2), steps)

    def train_head(self, steps: int) -> float:
        """Return the seconds of an EAGLE-3 head's training: the target's pass, and some layers of its size."""
        layer = HEAD_SHARE * self.size.params() / self.size.layers
        return self._train(self._token_flops + 6 * layer * TTT_STEPS, steps)

    def candidate(self, draft: Shape, first_steps: int) -> float:
        """Return the seconds of a shape in a search's first rungs: cut, replayed twice, trained a little."""
        tokens = 8192 * draft.flops_per_token(0) + CHOOSE * WRITTEN * draft.flops_per_token(64)
        seconds = self.machine.slowdown * CANDIDATE_SECONDS + self.train(draft, first_steps)
        return seconds + 2 * tokens / (1e12 * self.machine.tflops)

    def law(self) -> float:
        """Return the seconds of a latency law of this machine."""
        return self.machine.slowdown * LAW_SECONDS + LAW_PASSES * self.write(1, 1, 1)

    def score(self, arms: int, prompts: int, streams: Sequence[int], repeats: int = 1) -> float:
        """Return the seconds of ways to decode, with their warm-up of about five prompts each."""
        answer = self.write(1, MAX_TOKENS, 1)
        return self.start + len(streams) * arms * (5 + repeats * prompts) * answer

    @property
    def _token_flops(self) -> float:
        return self.size.flops_per_token(SEQ_LEN // 2)

    def _train(self, flops_per_token: float, steps: int) -> float:
        flops = flops_per_token * steps * BATCH_SIZE * SEQ_LEN
        return TRAINING[self.machine.training_dtype] * flops / (1e12 * self.machine.training_tflops)


def measure_machine(
    size: Shape | ApproximateSize, device: torch.device, dtype: torch.dtype, folder: Path
) -> Machine:
    """Time a large product, and the reading of the target's number of weights. Drafts will lie in folder."""
    trained = checkpoint.DTYPES[training_dtype("auto")]
    disk = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    started, used = time.perf_counter(), time.process_time()
    with note_if_slow("measuring this machine: products and memory"):
        tflops, bandwidth = (
            matmul_tflops(dtype, device),
            bandwidth_gbs(size.params(), dtype, device),
        )
        training_tflops = tflops if trained == dtype else matmul_tflops(trained, device)
    wall, busy = time.perf_counter() - started, time.process_time() - used
    return Machine(
        device=str(device),
        cores=torch.get_num_threads(),
        dtype=checkpoint.dtype_name(dtype),
        tflops=tflops,
        training_dtype=checkpoint.dtype_name(trained),
        training_tflops=training_tflops,
        gigabytes_per_second=bandwidth,
        slowdown=max(1.0, wall / busy) if device.type == "cpu" else 1.0,
        free_memory=memory.free_bytes(device),
        free_disk=shutil.disk_usage(disk).free,
    )


def guessed_draft(size: Shape | ApproximateSize) -> Shape:
    """Return a shape of a sixth of the target's layers: a plan counts with it before the search."""
    assert isinstance(size, Shape)
    return resolve(size, layers=max(1, size.layers // 6))
