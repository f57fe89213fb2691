"""Settings of a training loop: steps, learning rate, evaluations, checkpoints and hardware."""

from dataclasses import dataclass
from typing import Protocol

import torch

from draftlab.config.shared import Optimizer, TrainingDtype
from draftlab.data.batches import Batch
from draftlab.model.devices import resolve_device


class Batches(Protocol):
    """The text of a training run, as a batch for each step. The same step always gives the same batch."""

    def batch(self, step: int) -> Batch: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The device to run on, and how accelerate spreads the target over devices.

    memory: Gigabytes that the target's logits and KV caches may take.
    """

    device: str = "auto"
    device_map: str | None = None
    memory: float = 2.0

    @property
    def resolved(self) -> torch.device:
        return resolve_device(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Settings of the training loop, for every kind of student and text.

    Attributes:
        lr: Peak learning rate.
        batch_size: Number of sequences per step, over all processes.
        warmup_ratio: Share of the steps in which the learning rate rises.
        dtype: float32, or bfloat16 for autocast with fp32 weights. auto means bfloat16 on devices that compute bfloat16
            fast, and float32 on all other devices.
        micro_batch_tokens: Largest number of tokens of a forward pass in a process. With 0, a step is a single forward
            pass.
        eval_steps: Number of steps between held-out evaluations.
        save_steps: Number of steps between checkpoints.
    """

    steps: int
    lr: float
    batch_size: int = 16
    seed: int = 0
    optimizer: Optimizer = "muon"
    weight_decay: float = 0.0
    warmup_ratio: float = 0.03
    dtype: TrainingDtype = "auto"
    micro_batch_tokens: int = 4096
    torch_compile: bool = False
    eval_steps: int = 100
    save_steps: int = 100

    def rate(self, step: int) -> float:
        """Return the learning rate of a step as a share of the peak rate.

        The rate rises linearly during the warm-up, and then falls linearly towards 0 (Bergsma et al. 2025).
        """
        warmup = max(1, round(self.warmup_ratio * self.steps))
        return min((step + 1) / warmup, (self.steps - step) / max(1, self.steps - warmup), 1.0)
