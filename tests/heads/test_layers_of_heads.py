"""The layers that a head reads: they are compared with the target before its weights are read."""

import shutil
from pathlib import Path

import pytest
from helpers.errors import raises_option

from draftlab.heads.base import TargetSizes
from draftlab.heads.training import HeadStudent, open_teacher
from draftlab.training.loop import Loop
from draftlab.training.run import Distillation
from draftlab.training.texts import TrainingText


class Reader(HeadStudent):
    """A student that reads any layers."""

    free = frozenset()
    layers: tuple[int, ...]

    def layers_of(self, job: Distillation) -> tuple[int, ...]:
        return self.layers


@pytest.fixture
def bare(target, tmp_path):
    """Return the target without its weights."""
    folder = tmp_path / "target"
    shutil.copytree(target, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def job_of(target: Path, *layers: int) -> Distillation:
    return Distillation(
        name="reader",
        student=Reader(text="reader:x", layers=layers),
        draft=None,
        target=target,
        text=TrainingText(data="stdlib", shares={"data": 1.0}, seq_len=32),
        loop=Loop(steps=1, lr=0.1),
    )


def test_a_head_may_read_the_embeddings_and_the_last_layer(bare):
    last = TargetSizes.of(bare).layers
    job = job_of(bare, 0, last)
    job.student.check(job)


@pytest.mark.parametrize("layers", [(1, 40), (2, 1), (1, 1)])
def test_a_layer_that_is_missing_or_out_of_order_is_refused(bare, layers):
    job = job_of(bare, *layers)
    with raises_option("--student reader:x", ", ".join(map(str, layers))):
        job.student.check(job)
    with raises_option("--student reader:x"):  # a student without layers_of
        open_teacher(job, layers, None)
