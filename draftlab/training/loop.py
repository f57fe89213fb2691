"""The loop of a training as values: how long, how fast, how often. No torch."""

from dataclasses import dataclass

from draftlab.config.shared import Optimizer, TrainingDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """How a student is trained, whatever it is and reads.

    batch_size: sequences of a step, over all processes. lr: peak learning rate. warmup_ratio: share of the steps in
    which the rate rises. dtype: bfloat16 is autocast with fp32 weights; auto takes it where it is fast.
    micro_batch_tokens: most tokens per forward pass; 0: all of a step at once. eval_steps, save_steps: steps between
    evaluations on held-out text, and between checkpoints. patience: evaluations without a better one after which the
    run stops; 0: never.
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
    patience: int = 0

    def rate(self, step: int) -> float:
        """Return the share of the peak rate at a step: linear warm-up, then linear to zero (Bergsma et al. 2025)."""
        warmup = max(1, round(self.warmup_ratio * self.steps))
        return min((step + 1) / warmup, (self.steps - step) / max(1, self.steps - warmup), 1.0)
