"""Parallel drafts: a packed pass is K separate ones, COD is nested, a step is the sum of its parts, resume is exact."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.builders import (
    FAMILIES,
    PASS_ROUNDING,
    PASS_TERMS,
    altered,
    assert_rounds,
    build,
    rounding,
    setup,
)
from helpers.random_rows import RandomRows
from torch import Tensor

from draftlab.acceptance import expected
from draftlab.data import Batch
from draftlab.model.parallel import pack
from draftlab.training.fused_loss import Dense
from draftlab.training.loop import Loop
from draftlab.training.losses import parse_loss
from draftlab.training.objectives import DistillStep, Offsets
from draftlab.training.trainer import train

MASK = 2
K = 4
OFFSETS = Offsets(count=K, token=MASK, share=0.7, floor=0.2, seed=3)
SETTINGS = Loop(steps=2, optimizer="adamw", lr=3e-3, dtype="float32", eval_steps=2, save_steps=2)


def ordinary(model, ids: Tensor, at: int, offset: int) -> Tensor:
    """Logits of an offset from position at of one text, [V]: an ordinary pass over the text up to there and masks."""
    fed = torch.cat([ids[: at + 1], torch.full((offset - 1,), MASK)])
    return model(input_ids=fed.unsqueeze(0), use_cache=False).logits[0, -1]


def layout(packed) -> dict[str, Tensor]:
    return {"position_ids": packed.positions, "attention_mask": packed.mask.unsqueeze(1)}


def drawn(step: int = 0) -> Batch:
    return OFFSETS.drawn(RandomRows(3, 14, prompt=5).batch(step), step)


def answers() -> Batch:
    """Sequences that share rows."""
    rng, lengths = np.random.default_rng(4), np.array([20, 4, 9, 11, 6, 7])
    mask = (np.arange(20) < lengths[:, None]).astype(np.float32)
    return OFFSETS.drawn(Batch(rng.integers(3, 300, (6, 21)), mask).packed(), 0)


@pytest.mark.parametrize(("family", "batch"), [*((family, drawn()) for family in FAMILIES), ("llama", answers())])
@torch.no_grad()
def test_a_packed_pass_predicts_what_separate_passes_predict(family, batch):
    model, (rows, width) = build(family), batch.mask.shape
    plain = np.arange(width)[None].repeat(rows, 0)
    positions = torch.from_numpy(plain if batch.positions is None else batch.positions)
    ids, depths = torch.from_numpy(batch.ids[:, :-1]), torch.from_numpy(batch.depths)
    packed = pack(ids, depths, MASK, None if batch.positions is None else positions)

    def predicted(packed) -> Tensor:
        logits = model(input_ids=packed.ids, use_cache=False, **layout(packed)).logits
        return logits.flatten(0, 1)[packed.predicting]

    wanted = []
    for place, offset in zip(packed.predicted.tolist(), packed.offset.tolist(), strict=True):
        row, at = divmod(place, width)
        first = at - int(positions[row, at])
        wanted.append(ordinary(model, ids[row, first:], at - first - offset + 1, offset))
    assert len(wanted) == batch.depths.sum()
    logits = predicted(packed)
    bound = rounding(torch.float32, 64 * 5, float(logits.abs().max()))
    assert torch.stack(wanted).sub(logits).abs().max() < bound
    causal = torch.ones_like(packed.mask).tril()
    wrong = predicted(replace(packed, mask=causal))  # a control: masks see those of other positions
    assert torch.stack(wanted).sub(wrong).abs().max() > 100 * bound


@pytest.mark.parametrize(("share", "floor"), [(0.7, 0.2), (1.0, 0.0), (0.5, 0.0)])
def test_an_offset_is_predicted_only_where_the_ones_before_it_are(share, floor):
    mask = np.zeros((5, 60), dtype=np.float32)
    for row in range(5):  # two answers each
        mask[row, 2 + row : 9 + 4 * row] = mask[row, 35:55] = 1
    offsets = replace(OFFSETS, count=8, share=share, floor=floor)
    batch = offsets.drawn(Batch(np.zeros((5, 61), dtype=np.int64), mask), 7)
    depths = batch.depths
    counted = mask > 0
    assert np.array_equal(depths >= 1, counted)
    for j in range(2, 9):
        kept = depths >= j  # [s]: offset j is predicted from position s
        assert (kept.sum(1) <= (counted.sum(1) * max(share ** (j - 1), floor)).astype(int)).all()
        for row, start in zip(*np.nonzero(kept), strict=True):
            assert counted[row, start : start + j].all()
    whole = offsets.drawn(Batch(np.zeros((1, 201), dtype=np.int64), np.ones((1, 200), dtype=np.float32)), 7).depths
    if share < 1:  # without ends, the shares are those wanted, up to positions near the end of the text
        share_of_3 = (whole[0, :190] >= 3).mean()
        assert abs(share_of_3 - share**2) < 0.08
    assert np.array_equal(depths, offsets.drawn(batch, 7).depths)
    assert share == 1 or not np.array_equal(depths, offsets.drawn(batch, 8).depths)


DIVERGENCES = {
    "fkl": lambda p, q: (p * (p / q).log()).sum(),
    "tvd": lambda p, q: (p - q).abs().sum() / 2,
    "ce": lambda p, q: 0.0,
}


@pytest.mark.parametrize("loss", [{"fkl": 1.0}, {"tvd": 1.0}, {"fkl": 0.5, "ce": 0.5}, {"ce": 1.0}])
def test_a_step_is_that_of_separate_passes(loss):
    batch, target, student = drawn(), build("llama", 9), build("llama", 1, num_hidden_layers=2)
    ids, mask = torch.from_numpy(batch.ids), torch.from_numpy(batch.mask)
    with torch.no_grad():
        states = target.get_decoder()(input_ids=ids[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
        logits_p = target(input_ids=ids[:, :-1], use_cache=False).logits
    counted = mask.flatten().nonzero().squeeze(1)
    teacher = Dense(states[counted], target.get_output_embeddings().weight)
    parsed = parse_loss(" + ".join(f"{weight}*{name}" for name, weight in loss.items()))
    step = DistillStep(student, parsed, 1.0, offsets=OFFSETS)
    sums = step(ids, mask, teacher, depths=torch.from_numpy(batch.depths))
    sums[0, 5].backward()
    ours = torch.cat([p.grad.flatten() for p in student.parameters()])
    student.zero_grad()
    total = torch.zeros(())
    for row in range(len(ids)):
        for at in range(mask.shape[1]):
            for offset in range(1, int(batch.depths[row, at]) + 1):
                q = torch.softmax(ordinary(student, ids[row], at, offset), -1)
                p = torch.softmax(logits_p[row, at + offset - 1], -1)
                total = total + sum(weight * DIVERGENCES[name](p, q) for name, weight in loss.items())
                total = total - loss.get("ce", 0) * q[ids[row, at + offset]].log()
    total.backward()
    wanted = torch.cat([p.grad.flatten() for p in student.parameters()])
    assert abs(float(sums[0, 5].detach() - total.detach())) < PASS_ROUNDING * abs(float(total.detach()))
    assert (ours - wanted).norm() < PASS_ROUNDING * wanted.norm()
    with torch.no_grad():
        by_offset = step(ids, mask, teacher, depths=torch.from_numpy(batch.depths))
    assert len(by_offset) == K
    assert_rounds(by_offset.sum(0), sums[0].detach())


def test_micro_batches_make_the_same_step_and_every_offset_is_evaluated(tmp_path):
    text, found = RandomRows(3, 14, prompt=5), []
    for tokens in (0, 40):
        model = build("llama", 1, num_hidden_layers=2)
        given = replace(setup(build("llama", 9), text, [text.batch(999)]), offsets=OFFSETS)
        loop = altered(SETTINGS, micro_batch_tokens=tokens)
        records: list[Any] = list(train(model, given, loop, tmp_path / str(tokens)))
        assert len(records[-1].offsets) == K
        found.append(dict(model.named_parameters()))
    for name, weight in found[0].items():
        # two steps, forward and backward; AdamW divides a gradient by its size, so its rounding is relative to 1
        assert_rounds(found[1][name], weight, 4 * PASS_TERMS, magnitude=1)


def test_expected_passes_by_age_are_those_of_simulation():
    rng = np.random.default_rng(2)
    chances = rng.random((15, 4))
    passes, runs = 0, 20_000
    for _ in range(runs):
        at = 0
        while at < 15:
            passes += 1
            room, age = min(4, 15 - at - 1), 0
            while age < room and rng.random() < chances[at + age, age]:
                age += 1
            at += age + 1
    counted = expected.chain(expected.texts_of([chances]), 4).passes[0]
    assert passes / runs == pytest.approx(counted, rel=0.01)
