"""Masked is extracted: a model with masks gives the logits of the smaller one that they cut out."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.builders import FAMILIES, PASS_ROUNDING, altered, build, setup, until
from helpers.masks import IDS, SETTINGS, both, error, masks_for, smaller
from helpers.small_files import copy_tokenizer, write_functions
from transformers import AutoModelForCausalLM

from draftlab.commands import PRUNE
from draftlab.data import Batch
from draftlab.model import checkpoint, devices
from draftlab.model.shape import Shape, write_shape_file
from draftlab.pruning.masks.hard_concrete import (
    BETA,
    BOUND,
    HIGH,
    LOW,
    WARM_UP,
    Masks,
    keep_probability,
    sample,
)
from draftlab.pruning.masks.masked_model import masked
from draftlab.training.loop import Loop
from draftlab.training.trainer import StepRecord, train


@pytest.mark.parametrize(
    ("family", "untied"),
    [*((f, False) for f in FAMILIES), ("qwen2_tied", True), ("llama3_tied", True)],
)
def test_masked_equals_extracted(family, untied, family_dirs):
    have = checkpoint.read_shape(family_dirs[family])
    have = have.model_copy(update={"tied": have.tied and not untied})
    masks = masks_for(have, smaller(have))
    model = build(family)
    there, here = both(family_dirs[family], model, masks)
    assert error(there, here) < PASS_ROUNDING
    assert error(there, model(IDS).logits) > 1e-3  # and the masks are gone afterwards


@pytest.mark.parametrize("odds", [-3.0, 1.5])
def test_hard_concrete_samples_have_their_closed_form(odds):
    torch.manual_seed(0)
    n = 100_000
    z = sample(torch.full((n,), odds))
    assert z.min() >= 0
    assert z.max() <= 1
    chance = float(keep_probability(torch.tensor(odds)))
    assert abs(float((z > 0).float().mean()) - chance) < 3 * math.sqrt(chance * (1 - chance) / n)
    # P(z > 1/2): s > (1/2 - LOW) / (HIGH - LOW), which is 1/2 here, so log u/(1-u) > -odds
    assert pytest.approx(0.5) == (0.5 - LOW) / (HIGH - LOW)
    half = 1 / (1 + math.exp(-odds))
    assert abs(float((z > 0.5).float().mean()) - half) < 3 * math.sqrt(half * (1 - half) / n)
    assert chance == pytest.approx(1 / (1 + math.exp(-(odds + 1.5986))), abs=1e-4)
    assert (math.exp(BOUND), BETA) == pytest.approx((100, 2 / 3))


def test_deterministic_masks_have_exactly_the_targets_counts(family_dirs):
    have = checkpoint.read_shape(family_dirs["qwen3"])
    shape = smaller(have)
    for spread in (0.0, 0.01, 3.0, 100.0):
        masks = masks_for(have, shape, spread)
        values, keep = masks.deterministic(), masks.keep()
        assert int((values.hidden > 0).sum()) == 48
        assert int((values.layers > 0).sum()) == 3
        assert ((values.heads > 0).sum(-1) == shape.heads).all()
        assert ((values.ffn > 0).sum(-1) == 40).all()
        assert keep.hidden == values.hidden.nonzero().flatten().tolist()
        for j, layer in enumerate(keep.layers):
            assert keep.heads[j] == values.heads[layer].nonzero().flatten().tolist()
            assert keep.ffn[j] == values.ffn[layer].nonzero().flatten().tolist()


def test_the_lagrangian_wants_what_it_should_and_multipliers_climb_the_gap():
    have = Shape(layers=4, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=96, vocab=100)
    masks = Masks(have, have.model_copy(update={"hidden": 32}), 0)
    sparsity = 1 - float(keep_probability(masks.log_odds["hidden"].detach()).mean())
    for progress, wanted in ((0.0, 0.0), (WARM_UP / 2, 0.25), (WARM_UP, 0.5), (1.0, 0.5)):
        masks.progress = progress
        masks.zero_grad()
        masks.penalty().backward()
        gap = sparsity - wanted
        gradient = masks.multipliers["hidden"].grad.tolist()
        assert gradient == pytest.approx([gap, gap**2], abs=PASS_ROUNDING)
    assert masks.groups()[1]["maximize"]


def test_a_tied_model_gets_hard_hidden_masks_with_soft_gradients():
    have = Shape(layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=96, vocab=100, tied=True)
    masks = masks_for(have, have.model_copy(update={"hidden": 32}))
    hidden = masks.deterministic().hidden
    assert set(hidden.tolist()) == {0.0, 1.0}
    hidden.sum().backward()
    assert masks.log_odds["hidden"].grad.abs().sum() > 0


class Rows:
    def __init__(self, vocab: int) -> None:
        self.ids = np.random.default_rng(0).integers(3, vocab, (64, 4, 17))
        # every second token can be known
        self.ids[:, :, 1::2] = (self.ids[:, :, ::2][:, :, :8] * 7 + 3) % vocab

    def batch(self, step: int) -> Batch:
        ids = self.ids[step % len(self.ids)]
        return Batch(ids, np.ones((4, 16), dtype=np.float32))


def run(tmp_path: Path, settings: Loop, *, stop: int | None = None, weights: str = "full"):
    have = Shape(layers=5, hidden=64, heads=8, kv_heads=4, head_dim=12, ffn=88, vocab=307)
    model, masks = build("mistral", seed=1), Masks(have, smaller(have), 0)
    model.requires_grad_(weights == "full")
    with masked(model, masks, 1e-6):
        data = Rows(307)
        given = setup(build("mistral", seed=1), data, [data.batch(60)])
        records = list(until(stop, train(model, given, settings, tmp_path, masks)))
    return model, masks, records


def test_the_constraint_is_met_at_the_end_of_a_short_run(tmp_path):
    longer = altered(SETTINGS, steps=300, save_steps=1000, eval_steps=300)
    _, masks, _ = run(tmp_path, longer, weights="frozen")
    assert max(masks.gaps().values()) < 0.01


def test_log_odds_at_a_bound_can_leave_it():
    log_odds = torch.tensor([-BOUND, 0.0, BOUND, BOUND + 1], requires_grad=True)
    keep_probability(log_odds).sum().backward()
    assert (log_odds.grad[:3] > 0).all()
    assert log_odds.grad[3] == 0


def test_frozen_weights_stay_and_masks_move(tmp_path):
    model, masks, _ = run(tmp_path, SETTINGS, weights="frozen")
    fresh = dict(build("mistral", seed=1).named_parameters())
    assert all(torch.equal(p, fresh[name]) for name, p in model.named_parameters())
    start = Masks(masks.source, masks.shape, 0)
    assert all(not torch.equal(p, start.log_odds[name]) for name, p in masks.log_odds.items())


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    whole, masks, _ = run(tmp_path / "a", SETTINGS)
    run(tmp_path / "b", SETTINGS, stop=5)
    again, resumed, records = run(tmp_path / "b", SETTINGS)
    assert next(r for r in records if isinstance(r, StepRecord)).step == 5
    for a, b in ((whole, again), (masks, resumed)):
        assert all(map(torch.equal, a.parameters(), b.parameters()))


@pytest.mark.parametrize(("lr", "dtype", "family"), [(None, "bfloat16", "qwen3"), (1e-4, "float32", "qwen2_tied")])
def test_a_masks_prune_on_disk_is_a_plain_checkpoint(lr, dtype, family, family_dirs, tmp_path):
    source = tmp_path / "source"
    build(family).to(devices.DTYPES[dtype]).save_pretrained(source)
    copy_tokenizer(family_dirs[family], source)
    text = write_functions(tmp_path / "text.txt", 120, 8)
    have = checkpoint.read_shape(source)
    shape = smaller(have).model_copy(update={"tied": False})
    refit = {"refit": "layers", "calibration_tokens": 128} if lr is None else {}
    write_shape_file(shape, tmp_path / "shape.yaml", "for a test")
    made = PRUNE(
        method="masks",
        source=str(source),
        shape=tmp_path / "shape.yaml",
        data=text,
        seq_len=32,
        batch_size=2,
        steps=3,
        lr=lr,
        untie=have.tied,
        out=tmp_path / "out",
        device="cpu",
        **refit,
    )
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert checkpoint.read_shape(tmp_path / "out") == shape
    assert "acceptance" in made.data
    assert not (tmp_path / ".out.state").exists()


def test_weights_that_are_trained_with_the_masks_are_not_fitted_to_the_source(family_dirs, tmp_path):
    """The fit would undo what they learnt: masks at 3e-3 of SmolLM2 fell from acceptance 0.23 to 0.13."""
    text = write_functions(tmp_path / "text.txt", 30, 8)
    settings = {
        "method": "masks",
        "source": str(family_dirs["qwen3"]),
        "layers": 1,
        "data": text,
        "seq_len": 32,
        "batch_size": 2,
        "steps": 2,
        "device": "cpu",
    }
    written = {}
    for refit in ("default", "none", "layers"):
        chosen = {} if refit == "default" else {"refit": refit}
        PRUNE(**settings, **chosen, lr=1e-2, out=tmp_path / refit)
        written[refit] = (tmp_path / refit / "model.safetensors").read_bytes()
    assert written["default"] == written["none"]
    assert written["default"] != written["layers"]
    PRUNE(**settings, lr=1e-2, calibration_tokens=64, out=tmp_path / "unread")
    assert (tmp_path / "unread/model.safetensors").read_bytes() == written["default"]
