"""Steps of training on random rows, for tests of bad steps and of several processes."""

from pathlib import Path

import torch
from torch import Tensor

from draftlab.data import Batch
from draftlab.training.loop import Loop
from draftlab.training.trainer import train
from helpers.builders import build, setup, until
from helpers.random_rows import RandomRows

SETTINGS = Loop(
    steps=9,
    optimizer="adamw",
    lr=3e-3,
    dtype="float32",
    eval_steps=9,
    save_steps=2,
    weight_decay=0.1,
)
BAD = 7  # an id whose embedding is so small that the gradient of the first norm overflows in float32


class Rows(RandomRows):
    """Rows that have the id BAD in some steps only."""

    def __init__(self, *bad: int) -> None:
        super().__init__(seq_len=12)
        self.bad = bad

    def batch(self, step: int) -> Batch:
        batch = super().batch(step)
        batch.ids[batch.ids == BAD] = BAD + 1
        if step + 1 in self.bad:
            batch.ids[2, 5] = BAD
        return batch


def student():
    model = build("llama", 0, num_hidden_layers=2)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-45
    with torch.no_grad():
        model.get_input_embeddings().get_parameter("weight")[BAD] = 1e-20
    return model


def weights(model) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def go(model, state: Path, *bad: int, settings: Loop = SETTINGS, stop: int | None = None):
    """Return the records of a run, and the weights after each."""
    teacher = build("llama", 9, num_hidden_layers=2)
    given = setup(teacher, Rows(*bad), [Rows().batch(100)])
    records = until(stop, train(model, given, settings, state))
    return [(record, weights(model)) for record in records]
