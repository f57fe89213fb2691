"""The loop: resume is the same run, accumulation is the same step, teachers stay as they are, drafts learn."""

import copy
import itertools
import os
import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.builders import PASS_ROUNDING, altered, build, rounding, setup, until
from helpers.random_rows import RandomRows
from torch.optim.optimizer import register_optimizer_step_pre_hook

from draftlab.data import Batch, text_batch
from draftlab.training import trainer
from draftlab.training.checkpointer import deferred_signals
from draftlab.training.fused_loss import Dense
from draftlab.training.loop import Loop
from draftlab.training.on_policy import GeneratedRows, MixedBatches, StudentBatches
from draftlab.training.optimizers import training_dtype
from draftlab.training.teachers import LocalTeacher
from draftlab.training.trainer import EvalRecord, StepRecord, train

SETTINGS = Loop(
    steps=8,
    optimizer="adamw",
    lr=3e-3,
    dtype="float32",
    eval_steps=4,
    save_steps=3,
    warmup_ratio=0.2,
    weight_decay=0.1,
)


def student(seed: int = 0):
    return build("llama", seed, num_hidden_layers=2)


@pytest.fixture(scope="module")
def teacher():
    return build("llama", 9, num_hidden_layers=3)


def run(
    model,
    teacher,
    state: Path,
    settings: Loop = SETTINGS,
    batches=None,
    stop_after: int | None = None,
    loss: str = "fkl",
):
    heldout = [RandomRows(seq_len=12).batch(10_000)]
    given = setup(teacher, batches or RandomRows(seq_len=12, masked=True), heldout, loss)
    return list(until(stop_after, train(model, given, settings, state)))


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("optimizer", "stop_after"), [("adamw", 1), ("adamw", 4), ("muon", 7)])
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(tmp_path, teacher, optimizer, stop_after):
    settings = altered(SETTINGS, optimizer=optimizer)
    whole, resumed = student(), student()
    expected = run(whole, teacher, tmp_path / "a", settings)
    run(resumed, teacher, tmp_path / "b", settings, stop_after=stop_after)
    resumed = student()
    after = run(resumed, teacher, tmp_path / "b", settings)
    assert all(torch.equal(weights(whole)[n], w) for n, w in weights(resumed).items())
    assert [r for r in after if isinstance(r, EvalRecord)][-1] == expected[-1]
    # saved every 3 steps, after the record
    assert len([r for r in after if isinstance(r, StepRecord)]) == 8 - (stop_after - 1) // 3 * 3


@dataclass
class Counting:
    """A teacher that counts the batches of which it gives distributions."""

    teacher: LocalTeacher
    batches: int = 0

    @property
    def vocab(self) -> int:
        return self.teacher.vocab

    takes_packed = False

    def distributions(self, batch: Batch) -> Dense:
        self.batches += 1
        return self.teacher.distributions(batch)


def test_a_teacher_reads_held_out_text_once(tmp_path, teacher, monkeypatch):
    records, counts = [], []
    for most in (0, trainer.KEPT_BYTES):
        monkeypatch.setattr(trainer, "KEPT_BYTES", most)
        counting = Counting(LocalTeacher(teacher, 307, torch.device("cpu")))
        found = run(student(), counting, tmp_path / str(most))
        records.append([replace(r, seconds=0.0) if isinstance(r, StepRecord) else r for r in found])
        counts.append(counting.batches)
    evaluations = sum(isinstance(record, EvalRecord) for record in records[0])
    assert counts == [8 + evaluations, 8 + 1]  # a batch of each step, and one of held-out text
    assert records[0] == records[1]


def first_gradients(
    teacher, state: Path, settings: Loop = SETTINGS, batches=None, loss: str = "fkl"
) -> dict[str, torch.Tensor]:
    """Return the gradients of the first step. Weights would not do: Adam divides a small gradient by itself."""
    model, seen = student(), {}

    def look(*_) -> None:
        seen.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and n not in seen})

    handle = register_optimizer_step_pre_hook(look)
    try:
        run(model, teacher, state, altered(settings, steps=1), batches, loss=loss)
    finally:
        handle.remove()
    return seen


@pytest.mark.parametrize("loss", ["fkl", "rkl", "jsd(0.5)", "ce"])
def test_accumulating_over_micro_batches_is_the_same_step(tmp_path, teacher, loss):
    whole, *parts = (
        first_gradients(teacher, tmp_path / str(n), altered(SETTINGS, micro_batch_tokens=n), loss=loss)
        for n in (0, 1, 30)
    )
    half = first_gradients(teacher, tmp_path / "half", batches=RandomRows(2, 12, masked=True), loss=loss)
    assert len(whole) == 21
    for name, gradient in whole.items():
        # the longest sums are over the vocabulary
        allowed = rounding(torch.float32, 307, float(gradient.abs().max()))
        assert all(float((part[name] - gradient).abs().max()) <= allowed for part in parts), name
        assert float((half[name] - gradient).abs().max()) > 100 * allowed, name


def test_only_masked_in_tokens_count(tmp_path, teacher):
    """Changing ids that are masked out, as inputs to nothing that counts, changes nothing."""

    class LastMasked(RandomRows):
        # of which the last three tokens are masked
        garbage = 0

        def batch(self, step):
            batch = super().batch(step)
            batch.ids[:, -3:] = self.garbage
            batch.mask[:, -3:] = 0
            return batch

    batches, found = LastMasked(seq_len=12), []
    for batches.garbage in (5, 77):
        found.append(first_gradients(teacher, tmp_path / str(batches.garbage), batches=batches))
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())


def test_the_teacher_is_not_touched(tmp_path):
    teacher = build("llama", 9, num_hidden_layers=3).train()
    before = weights(teacher)
    run(student(), teacher, tmp_path)
    assert all(torch.equal(before[n], w) for n, w in weights(teacher).items())
    assert all(p.grad is None for p in teacher.parameters())
    assert not teacher.training


def test_a_copy_of_the_teacher_has_nothing_to_learn(tmp_path, teacher):
    model = copy.deepcopy(teacher)
    records = run(model, teacher, tmp_path, altered(SETTINGS, steps=1))
    assert records[0].loss == 0
    assert records[0].acceptance == pytest.approx(1, abs=PASS_ROUNDING)
    assert records[0].agreement == 1
    assert records[1].grad_norm == pytest.approx(0, abs=PASS_ROUNDING)


def test_cross_entropy_needs_none_and_reports_no_acceptance(tmp_path):
    records = run(student(), None, tmp_path, altered(SETTINGS, steps=2), loss="ce")
    assert records[-1].acceptance is None
    assert records[-1].cross_entropy == records[-1].loss


def test_schedule_warms_up_and_ends_at_zero():
    settings = altered(SETTINGS, steps=100, lr=3.0, warmup_ratio=0.1)
    rates = [settings.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(1 / 90)
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))


def test_generated_rows_mask_the_prompt_and_what_follows_the_text():
    ids = np.array([[5, 6, 7, 8, 1, 0, 0], [5, 6, 7, 8, 9, 9, 9]], dtype=np.uint32)
    batch = GeneratedRows(ids, np.array([2, 4]), prompt=3, rows=2).batch(0)
    assert batch.mask.tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]
    assert batch.ids.tolist() == ids.tolist()


class Numbered:
    """Rows that say which batch they are."""

    def __init__(self, tag: int) -> None:
        self.tag = tag

    def batch(self, step: int) -> Batch:
        return text_batch([np.array([self.tag, step, 0])])


def test_texts_are_mixed_by_weight_and_each_is_read_in_turn():
    mixed = MixedBatches.of({"data": Numbered(0), "draft": Numbered(1)}, {"data": 0.7, "draft": 0.3}, 100)
    seen = [tuple(mixed.batch(step).ids[0, :2]) for step in range(100)]
    for tag, share in ((0, 70), (1, 30)):
        assert [step for t, step in seen if t == tag] == list(range(share))
    for n in range(1, 100):
        assert abs(sum(t == 1 for t, _ in seen[:n]) - 0.3 * n) <= 1


def test_the_drafts_own_text_depends_on_seed_step_and_weights_alone():
    model = student()

    def rows(seed: int = 0, step: int = 0) -> Batch:
        return StudentBatches(model, RandomRows(seq_len=12), 4, 1.0, (1,), 307, seed).batch(step)

    first, state = rows(), torch.get_rng_state()
    rows(step=3)
    assert torch.equal(torch.get_rng_state(), state)  # the run's own randomness does not notice
    torch.rand(5)
    assert np.array_equal(first.ids, rows().ids)
    assert not np.array_equal(first.ids, rows(seed=1).ids)
    assert np.array_equal(first.ids[:, :4], RandomRows(seq_len=12).batch(0).ids[:, :4])
    assert (first.mask[:, :3] == 0).all()


@pytest.fixture
def heard(number):
    """Yield a shell's background job starts with SIGINT ignored, nohup's with SIGHUP; training does not hear them."""
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_goes_on_bit_for_bit(tmp_path, teacher, number, capsys, heard):
    before = signal.getsignal(number)
    whole, resumed = student(), student()
    run(whole, teacher, tmp_path / "a")
    settings = altered(SETTINGS, save_steps=100)
    given = setup(teacher, RandomRows(seq_len=12, masked=True), [RandomRows(seq_len=12).batch(10_000)])
    records = train(resumed, given, settings, tmp_path / "b")
    for record in records:
        if isinstance(record, StepRecord) and record.step == 5:
            os.kill(os.getpid(), number)
            break
    handler = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        next(records)
    assert signal.getsignal(number) is before  # what comes after training can be ended as ever
    assert handler is not before
    assert (tmp_path / "b" / "step-00000005").is_dir()
    resumed = student()
    run(resumed, teacher, tmp_path / "b", altered(SETTINGS, save_steps=100))
    assert re.search(r"\b5 of 8\b", capsys.readouterr().err)
    assert all(torch.equal(weights(whole)[n], w) for n, w in weights(resumed).items())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_was_ignored_stays_ignored(number, heard):
    """A shell ignores SIGINT for a job with &, nohup SIGHUP, and both mean it."""
    signal.signal(number, signal.SIG_IGN)
    with deferred_signals() as received:
        assert signal.getsignal(number) == signal.SIG_IGN
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]


@pytest.mark.parametrize("loss", ["fkl@0.5 -> lk(3)", "0.5*fkl + 0.5*ce"])
def test_schedules_and_mixtures_of_losses_learn_and_resume(tmp_path, teacher, loss):
    settings = altered(SETTINGS, steps=40, lr=1e-2, save_steps=15)
    whole = student()
    records = run(whole, teacher, tmp_path / "a", settings, loss=loss)
    evals = [r for r in records if isinstance(r, EvalRecord)]
    assert evals[-1].acceptance > evals[0].acceptance
    resumed = student()
    run(resumed, teacher, tmp_path / "b", settings, stop_after=20, loss=loss)
    resumed = student()
    run(resumed, teacher, tmp_path / "b", settings, loss=loss)
    assert all(torch.equal(weights(whole)[n], w) for n, w in weights(resumed).items())


@pytest.mark.parametrize(("fast", "wanted"), [(True, torch.bfloat16), (False, torch.float32)])
def test_dtype_auto_is_bfloat16_where_that_is_fast(fast, wanted, monkeypatch):
    """oneDNN decides: a CPU without AVX-512 emulates bfloat16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: fast)
    assert training_dtype("auto") == wanted
