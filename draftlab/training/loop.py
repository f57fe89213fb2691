"""The loop of a training as values: how long, how fast, how often, on what. Importing it imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from draftlab.config.shared import Optimizer, TrainingDtype
from draftlab.data.batches import Batch

if TYPE_CHECKING:
    import torch


class Batches(Protocol):
    """The text of a run: the rows of each step are a pure function of the step."""

    def batch(self, step: int) -> Batch: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Where the target runs. Its logits and KV caches may take memory GB."""

    device: str = "auto"
    device_map: str | None = None
    memory: float = 2.0

    @property
    def resolved(self) -> "torch.device":
        from draftlab.model.checkpoint import resolve_device

        return resolve_device(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """How a student is trained, whatever it is and reads.

    batch_size: sequences of a step, over all processes. lr: peak learning rate. warmup_ratio: share of the steps in
    which the rate rises. dtype: bfloat16 is autocast with fp32 weights; auto takes it where it is fast.
    micro_batch_tokens: most tokens per forward pass; 0: all of a step at once. eval_steps, save_steps: steps between
    evaluations on held-out text, and between checkpoints.
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
        """Return the share of the peak rate at a step: linear warm-up, then linear to zero (Bergsma et al. 2025)."""
        warmup = max(1, round(self.warmup_ratio * self.steps))
        return min((step + 1) / warmup, (self.steps - step) / max(1, self.steps - warmup), 1.0)
