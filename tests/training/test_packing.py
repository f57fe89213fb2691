"""Sequences packed into rows teach what they teach apart, and waste little."""

import numpy as np
import pytest
import torch
from helpers.builders import FAMILIES, build, rounding
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
)

from draftlab.data import Batch, TopLogprobs
from draftlab.training.losses import parse_loss
from draftlab.training.objectives import DistillStep
from draftlab.training.teachers import LocalTeacher, OutputHead, StoredTeacher

CPU = torch.device("cpu")


def answers(rows: int = 9, width: int = 40, listed: int = 8, seed: int = 0) -> Batch:
    """Return prompts and answers of many lengths, padded; of the last row nothing counts."""
    rng = np.random.default_rng(seed)
    ids, mask = rng.integers(3, 300, (rows, width + 1)), np.zeros((rows, width), np.float32)
    for row, end in enumerate(rng.integers(3, width // 2, rows)):
        mask[row, rng.integers(1, end) - 1 : end] = 1
    mask[0], mask[-1] = 1, 0
    ids[1:, width // 2 + 1 :] = 0
    log_p = np.log(rng.dirichlet(np.ones(307), (rows, width)).astype(np.float32))
    top = np.argsort(-log_p, -1)[..., :listed]
    values = np.take_along_axis(log_p, top, -1)
    return Batch(ids, mask, TopLogprobs(top, values, np.log1p(-np.exp(values).sum(-1))))


def gradients(model, teacher, batch: Batch) -> dict[str, torch.Tensor]:
    step = DistillStep(model, parse_loss("fkl"), 1.0)
    positions = None if batch.positions is None else torch.from_numpy(batch.positions)
    listed = teacher.distributions(batch)
    step(torch.from_numpy(batch.ids), torch.from_numpy(batch.mask), listed, positions)[0, -1].backward()
    named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return named


@pytest.mark.parametrize("teacher", ["stored", "local"])
@pytest.mark.parametrize("family", [*FAMILIES, "gpt2"])
def test_the_gradient_of_packed_sequences_is_theirs_apart(family, teacher):
    if family == "gpt2":
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=307, n_embd=64, n_layer=2, n_head=4, n_positions=128)).eval()
    else:
        model = build(family)
    source = StoredTeacher(307) if teacher == "stored" else LocalTeacher(build("llama", 7), 307, CPU)
    assert OutputHead.of(model, 307).takes_packed
    assert source.takes_packed
    batch = answers()
    packed = batch.packed()
    assert len(packed.ids) < len(batch.ids)
    apart, together = gradients(model, source, batch), gradients(model, source, packed)
    mixed = gradients(model, source, Batch(packed.ids, packed.mask, packed.top_logprobs))
    off = 0.0
    for name, gradient in apart.items():
        allowed = rounding(torch.float32, 307, float(gradient.abs().max()), factor=8)
        assert float((together[name] - gradient).abs().max()) <= allowed, name
        off = max(off, float((mixed[name] - gradient).abs().max()) / allowed)
    assert off > 100  # without positions the sequences of a row would see each other


@pytest.mark.parametrize("rows", [16, 64])
def test_rows_of_answers_are_nearly_full(rows):
    lengths = np.clip(np.random.default_rng(1).lognormal(4.6, 0.9, rows), 5, 400).astype(int)
    mask = (np.arange(400) < lengths[:, None]).astype(np.float32)
    packed = Batch(np.zeros((rows, 401), np.int64), mask).packed()
    assert mask.sum() / mask.size < 0.45
    assert packed.mask.sum() / packed.mask.size > 0.92


@pytest.mark.parametrize(
    "model",
    [
        MambaForCausalLM(MambaConfig(vocab_size=307, hidden_size=32, num_hidden_layers=2, state_size=8)),
        BloomForCausalLM(BloomConfig(vocab_size=307, hidden_size=32, n_layer=2, n_head=4)),
    ],
    ids=["mamba", "bloom"],
)
def test_models_that_would_mix_sequences_are_not_given_packed_ones(model):
    assert not OutputHead.of(model, 307).takes_packed
