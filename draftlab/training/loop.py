"""Settings of a training loop: steps, learning rate, evaluations, checkpoints and hardware. No torch at import."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from draftlab.config.shared import Optimizer, TrainingDtype
from draftlab.data.batches import Batch

if TYPE_CHECKING:
    import torch


class Batches(Protocol):
    """The text of a run. The rows of a step are a pure function of the step."""

    def batch(self, step: int) -> Batch: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Where the target runs. memory: GB that the target's logits and KV caches may take."""

    device: str = "auto"
    device_map: str | None = None
    memory: float = 2.0

    @property
    def resolved(self) -> "torch.device":
        from draftlab.model.checkpoint import resolve_device

        return resolve_device(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Settings of the training loop, for every kind of student and text.

    batch_size: Sequences per step, over all processes. lr: Peak learning rate. warmup_ratio: Share of the steps in
    which the rate rises. dtype: bfloat16 is autocast with fp32 weights; auto takes bfloat16 on devices that are fast in
    it. micro_batch_tokens: Most tokens per forward pass; 0 feeds a step in one pass. eval_steps: Steps between held-out
    evaluations. save_steps: Steps between checkpoints.
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
        """Return a step's share of the peak rate: linear warm-up, then linear decay to 0 (Bergsma et al. 2025)."""
        warmup = max(1, round(self.warmup_ratio * self.steps))
        return min((step + 1) / warmup, (self.steps - step) / max(1, self.steps - warmup), 1.0)
