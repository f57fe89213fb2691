"""A step that is not finite changes nothing, three in a row end the run, and no NaN is written."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import cast

import pytest
import torch
from helpers.builders import altered, setup, training_killed_at
from helpers.errors import raises_option
from helpers.small_files import write_functions
from helpers.training_steps import SETTINGS, Rows, go, student
from torch import Tensor

from draftlab.commands import COMMANDS
from draftlab.model import saving
from draftlab.runs.provenance import read_record
from draftlab.training.loop import Loop
from draftlab.training.trainer import StepRecord, train


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("optimizer", "part"), [("adamw", 0), ("adamw", 24), ("muon", 0)])
def test_a_step_with_an_infinite_gradient_changes_no_weight(tmp_path, optimizer, part, capsys):
    settings = altered(SETTINGS, optimizer=optimizer, micro_batch_tokens=part)
    seen = go(student(), tmp_path, 4, settings=settings)
    steps = [pair for pair in seen if isinstance(pair[0], StepRecord)]
    assert [cast(StepRecord, r).skipped for r, _ in steps] == [n == 4 for n in range(1, 10)]
    record = cast(StepRecord, steps[3][0])
    assert record.loss is not None  # the forward pass was finite
    assert record.grad_norm is None
    assert [same(a, b) for (_, a), (_, b) in pairwise(steps)] == [n == 4 for n in range(2, 10)]
    assert all(tensor.isfinite().all() for tensor in seen[-1][1])
    assert "step 4" in capsys.readouterr().err


@pytest.mark.parametrize("stop", [5, 7])
def test_a_run_that_skipped_steps_resumes_bit_for_bit(tmp_path, stop):
    """The checkpoint of step 4 is left out, because steps 3 and 4 are skipped."""
    whole = go(student(), tmp_path / "a", 3, 4)
    go(student(), tmp_path / "b", 3, 4, stop=stop)
    resumed = go(student(), tmp_path / "b", 3, 4)
    assert len(resumed) == 1 + SETTINGS.steps - {5: 2, 7: 6}[stop]
    assert same(whole[-1][1], resumed[-1][1])
    assert whole[-1][0] == resumed[-1][0]


def test_three_steps_in_a_row_end_the_run_with_the_last_good_checkpoint(tmp_path):
    with raises_option("step 6", "--lr", "step 2"):
        go(student(), tmp_path, 4, 5, 6, settings=altered(SETTINGS, eval_steps=4))
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]
    lower = altered(SETTINGS, lr=SETTINGS.lr / 10)
    records = [record for record, _ in go(student(), tmp_path, settings=lower)]
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [step.lr for step in steps] == [lower.rate(n) * lower.lr for n in range(2, 9)]
    # the update of AdamW is about as large as the rate
    first = go(student(), tmp_path / "plain", settings=SETTINGS, stop=3)[-2:]
    second = go(student(), tmp_path / "low", settings=lower, stop=3)[-2:]
    moved = [max(float((x - y).abs().max()) for x, y in zip(a[1], b[1], strict=True)) for a, b in (first, second)]
    assert moved[1] < moved[0] / 5


def test_a_student_that_is_not_finite_is_not_trained(tmp_path):
    model = student()
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with raises_option("--training-dtype"):
        go(model, tmp_path)
    assert not list(tmp_path.glob("*.pt"))


def test_weights_that_overflow_in_the_written_dtype_are_not_kept(tmp_path):
    model = student()
    with torch.no_grad():
        model.lm_head.weight[:, 0] = 1e6  # beyond float16
    given = setup(None, Rows(), [Rows().batch(100)], "ce")
    given = replace(given, rounded=lambda _, weight: weight.half())
    with raises_option("not finite"):
        list(train(model, given, SETTINGS, tmp_path))
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_checkpoint_is_written_with_nan(tmp_path, value):
    weight = torch.zeros(3)
    weight[1] = value
    with raises_option("norm.weight"):
        saving.write_checkpoint(tmp_path, {}, [("norm.weight", weight)], None)
    assert not list(tmp_path.iterdir())


def test_a_command_goes_on_with_a_smaller_rate_only(family_dirs, tmp_path):
    words = {
        "draft": str(family_dirs["llama"]),
        "data": write_functions(tmp_path / "text.txt"),
        "loss": "ce",
        "steps": 6,
        "batch_size": 2,
        "seq_len": 32,
        "save_steps": 2,
        "optimizer": "adamw",
        "training_dtype": "float32",
        "out": tmp_path / "out",
    }
    distill = COMMANDS["distill"]
    with raises_option("--lr"):
        distill(**words, lr=1e30)
    assert not (tmp_path / "out").exists()
    with training_killed_at(3):
        distill(**words, lr=1e-3, force=True)
    with raises_option("lr"):
        distill(**words, lr=2e-3)
    distill(**words, lr=5e-4)
    record = read_record(tmp_path / "out")
    assert record is not None
    assert record.config["lr"] == 5e-4
    assert (record.notes["lr_from_step"], record.notes["skipped_steps"]) == (3, 0)
    lines = map(json.loads, (tmp_path / "out" / "log.jsonl").read_text().splitlines())
    rates = [line["lr"] for line in lines if "lr" in line]
    loops = [Loop(steps=6, lr=lr) for lr in (1e-3, 1e-3, *[5e-4] * 4)]
    assert rates == [loop.rate(n) * loop.lr for n, loop in enumerate(loops)]
