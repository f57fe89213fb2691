"""Heads of different sizes: padding changes no loss and takes little, and a draft leaves with the target's size."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers.builders import PASS_ROUNDING, assert_rounds, build, setup
from helpers.random_rows import RandomRows
from torch import nn

from draftlab.engine.generate import ModelDrafter, decode, speculative_decode
from draftlab.model import checkpoint
from draftlab.model.llama import load
from draftlab.sampling import SamplingParams
from draftlab.training.loop import Loop
from draftlab.training.trainer import train
from draftlab.training.vocabulary import resize

SETTINGS = Loop(steps=2, optimizer="adamw", lr=1e-3, dtype="float32", eval_steps=2, save_steps=9)


def padded(model, rows: int):
    """Return the model with more rows in embedding and head, whose logits are large."""
    have = model.config.vocab_size
    for name, parameter in (
        ("model.embed_tokens", model.model.embed_tokens),
        ("lm_head", model.lm_head),
    ):
        more = torch.full((rows, parameter.weight.shape[1]), 0.3)
        model.get_submodule(name).weight = nn.Parameter(torch.cat([parameter.weight.detach(), more]))
    model.config.vocab_size = have + rows
    model.lm_head.out_features = have + rows
    return model


@pytest.mark.parametrize("loss", ["rkl", "lk(3)"])
@pytest.mark.parametrize(("draft_rows", "target_rows"), [(0, 13), (13, 0)])
def test_padding_of_one_head_changes_no_step(loss, draft_rows, target_rows, tmp_path):
    def run(name: str, draft: int, target: int):
        student = padded(build("llama", 0, num_hidden_layers=2), draft)
        teacher = padded(build("llama", 9, num_hidden_layers=2), target)
        records = list(
            train(
                student,
                setup(teacher, RandomRows(), [RandomRows().batch(9)], loss),
                SETTINGS,
                tmp_path / name,
            )
        )
        return student, records

    wanted, plain_records = run("plain", 0, 0)
    found, records = run("padded", draft_rows, target_rows)
    for a, b in zip(plain_records, records, strict=True):
        assert a.loss == pytest.approx(b.loss, abs=PASS_ROUNDING)
        assert a.acceptance == pytest.approx(b.acceptance, abs=PASS_ROUNDING)
    after = dict(found.named_parameters())
    for name, weight in wanted.named_parameters():
        assert_rounds(after[name][: len(weight)], weight)


@pytest.mark.parametrize("family", ["llama", "llama3_tied"])
def test_added_rows_take_less_than_their_share_and_leave_again(family, family_dirs, tmp_path):
    out = tmp_path / "draft"
    shutil.copytree(family_dirs[family], out)
    before = probabilities(out)
    assert resize(out, 320) == "307 -> 320"
    assert checkpoint.read_shape(out).vocab == 320
    after = probabilities(out)
    assert float(after[..., 307:].max()) < 1 / 307  # Jensen
    kept = after[..., :307] / after[..., :307].sum(-1, keepdim=True)
    assert_rounds(kept, before)
    assert resize(out, 307) == "320 -> 307"
    assert torch.equal(probabilities(out), before)
    assert resize(out, 307) is None


@torch.no_grad()
def probabilities(directory: Path) -> torch.Tensor:
    ids = torch.from_numpy(RandomRows().batch(5).ids)
    return checkpoint.load_model(directory, torch.float32)(ids).logits.softmax(-1)


@pytest.mark.parametrize(("draft_vocab", "temperature"), [(320, 0.8), (300, 0.0)])
def test_speculation_with_a_head_of_another_size_is_lossless(family_dirs, tmp_path, draft_vocab, temperature):
    shutil.copytree(family_dirs["llama"], tmp_path / "draft")
    resize(tmp_path / "draft", draft_vocab)
    target, draft = (load(d, torch.float32) for d in (family_dirs["llama"], tmp_path / "draft"))
    sampling, prompt = SamplingParams(temperature=temperature, max_tokens=40), list(range(3, 12))
    steps = list(speculative_decode(target, ModelDrafter(draft, 307), [prompt], 3, sampling))
    emitted = [t for s in steps for t in s.tokens]
    assert len(emitted) == 40
    # the draft is the target
    assert sum(s.accepted for s in steps) > 0.6 * sum(s.drafted for s in steps)
    if temperature == 0:
        assert emitted == [t for s in decode(target, [prompt], sampling) for t in s.tokens]
