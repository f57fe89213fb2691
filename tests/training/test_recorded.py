"""What a run records is what its draft has in transformers: as stored, at the served temperature, without dropout."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.builders import SIZES, build, rounding, setup
from helpers.random_rows import RandomRows
from helpers.small_files import copy_tokenizer, write_functions
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PreTrainedModel,
)

from draftlab.commands import COMMANDS
from draftlab.commands.distill import prepare
from draftlab.commands.settings.distill import DistillConfig
from draftlab.model import checkpoint
from draftlab.pruning.run import Text
from draftlab.runs.provenance import read_record
from draftlab.training.drafts import open_draft
from draftlab.training.loop import Loop
from draftlab.training.trainer import StepRecord, rounded_to, train

VOCAB = SIZES["vocab_size"]
CLOSE = rounding(torch.float32, VOCAB, 1.0)


@torch.no_grad()
def measured(
    draft: Path, target: Path, batches: list[tuple[np.ndarray, np.ndarray]], temperature: float
) -> tuple[float, float]:
    """Return acceptance and cross-entropy of a draft on rows of ids with masks, with transformers alone in float32."""
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (draft, target)]
    sums, tokens = np.zeros(2), 0.0
    for rows, mask in batches:
        ids, counted = torch.from_numpy(rows).long(), torch.from_numpy(mask) > 0
        own, other = (model(ids[:, :-1]).logits for model in models)  # [B, T, V]
        q, p = ((logits / (temperature or 1)).log_softmax(-1) for logits in (own, other))
        text = own.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        accepted = torch.minimum(p, q).exp().sum(-1)
        if temperature == 0:
            accepted = (p.argmax(-1) == q.argmax(-1)).float()
        sums += [float(accepted[counted].sum()), -float(text[counted].sum())]
        tokens += float(counted.sum())
    return sums[0] / tokens, sums[1] / tokens


def in_bfloat16(source: Path, out: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(out)
    copy_tokenizer(source, out)
    return out


@pytest.mark.parametrize(
    ("more", "served"),
    [
        ({"temperature": 2.5}, 1.0),
        ({"text": "target", "sample_temperature": 0.7, "prompt_tokens": 8}, 0.7),
        ({"text": "target", "sample_temperature": 0.0, "prompt_tokens": 8}, 0.0),
    ],
)
def test_distill_records_what_the_written_draft_has(more, served, family_dirs, tmp_path):
    draft, target = in_bfloat16(family_dirs["llama"], tmp_path / "draft"), family_dirs["llama_mha"]
    words: dict[str, Any] = {
        "draft": str(draft),
        "target": str(target),
        "data": write_functions(tmp_path / "text.txt"),
        "steps": 8,
        "batch_size": 2,
        "seq_len": 48,
        "eval_steps": 4,
        "optimizer": "adamw",
        "lr": 1e-2,
        "training_dtype": "float32",
        "device": "cpu",
    }
    words |= more
    job = prepare(DistillConfig(**words), True)
    (tmp_path / "state").mkdir()
    heldout = open_draft(job, None, tmp_path / "state").setup.heldout.batches
    rows = [(batch.ids, batch.mask) for batch in heldout]
    found = cast(Any, COMMANDS["distill"](**words, out=tmp_path / "out").data)
    for checkpoint_dir, record in ((draft, found["before"]), (tmp_path / "out", found["after"])):
        acceptance, cross_entropy = measured(checkpoint_dir, target, rows, served)
        assert record["temperature"] == served
        assert record["acceptance"] == pytest.approx(acceptance, rel=10 * CLOSE)
        assert record["cross_entropy"] == pytest.approx(cross_entropy, rel=CLOSE)
    # What a random target writes differs between CPUs, and eight steps need not learn it.
    assert found["after"]["step"] > 0 or "text" in more


@pytest.mark.parametrize("student", ["eagle:ttt_steps=2", "dflash:block_size=4"])
def test_a_head_that_is_trained_again_starts_with_what_was_recorded(student, family_dirs, tmp_path):
    target = in_bfloat16(family_dirs["llama"], tmp_path / "target")
    words: dict[str, Any] = {
        "student": student,
        "target": str(target),
        "data": write_functions(tmp_path / "text.txt"),
        "steps": 8,
        "batch_size": 2,
        "seq_len": 48,
        "eval_steps": 4,
        "training_dtype": "float32",
        "device": "cpu",
        "temperature": 2.0,
        "lr": 3e-3,
    }
    first = cast(Any, COMMANDS["distill"](**words, out=tmp_path / "first").data)
    if student.startswith("dflash"):
        words["student"] = "dflash"
    again = {"draft": str(tmp_path / "first"), "out": tmp_path / "again", "temperature": 1.0}
    second = cast(Any, COMMANDS["distill"](**words | again).data)
    # fc reads other multiples of the states, so rounding in float32 differs
    for name in ("acceptance", "cross_entropy"):
        assert second["before"][name] == pytest.approx(first["after"][name], rel=2 * CLOSE)


def test_an_evaluation_leaves_the_weights_in_their_own_bits(tmp_path):
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        model, teacher = (build("llama", seed, num_hidden_layers=2) for seed in (0, 9))
        given = setup(teacher, RandomRows(), [RandomRows().batch(100)])
        given = replace(given, rounded=rounded_to(dtype))
        loop = Loop(steps=4, lr=1e-3, dtype="float32", eval_steps=1, optimizer="adamw")
        list(train(model, given, loop, tmp_path / str(dtype)))
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
HALF = 0.5
DROPPING = {
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        attn_pdrop=HALF,
        resid_pdrop=HALF,
        embd_pdrop=HALF,
    ),
    "opt": OPTConfig(
        **SMALL,
        ffn_dim=64,
        word_embed_proj_dim=32,
        dropout=HALF,
        attention_dropout=HALF,
        layerdrop=HALF,
    ),
    "llama": LlamaConfig(**SMALL, intermediate_size=64, attention_dropout=HALF),
    "falcon": FalconConfig(**SMALL, hidden_dropout=HALF, attention_dropout=HALF),
}


@pytest.mark.parametrize("family", DROPPING)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_has_no_dropout(family, checkpointing, tmp_path):
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(DROPPING[family])
    batch = RandomRows(seq_len=24).batch(0)
    ids = torch.from_numpy(batch.ids)
    loss = torch.nn.functional.cross_entropy(model.eval()(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable()
    given = setup(None, RandomRows(seq_len=24), [batch], "ce")
    loop = Loop(steps=1, lr=1e-3, dtype="float32", optimizer="adamw")
    step = next(r for r in train(model, given, loop, tmp_path) if isinstance(r, StepRecord))
    assert step.loss == pytest.approx(loss.item(), rel=CLOSE)
    assert step.grad_norm == pytest.approx(norm, rel=10 * CLOSE)


def test_the_written_config_keeps_the_rates_of_dropout(tmp_path, tokenizer_dir):
    torch.manual_seed(0)
    draft = tmp_path / "draft"
    AutoModelForCausalLM.from_config(DROPPING["gpt2"]).save_pretrained(draft)
    copy_tokenizer(tokenizer_dir, draft)
    COMMANDS["distill"](
        draft=str(draft),
        data=write_functions(tmp_path / "text.txt"),
        loss="ce",
        steps=1,
        batch_size=2,
        seq_len=32,
        device="cpu",
        out=tmp_path / "out",
    )
    before = checkpoint.read_config(draft)
    assert {"attn_pdrop", "embd_pdrop", "resid_pdrop"} <= before.keys()
    # torch_dtype is the name of dtype in transformers 4
    assert checkpoint.read_config(tmp_path / "out") == before | {"torch_dtype": before["dtype"]}


@pytest.mark.parametrize("refit", ["none", "layers"])
def test_prune_records_what_the_written_draft_has(refit, family_dirs, tmp_path, monkeypatch):
    """A CPU that is slow in bfloat16 fits the weights in float32."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    source = in_bfloat16(family_dirs["llama"], tmp_path / "source")
    data = write_functions(tmp_path / "text.txt")
    COMMANDS["prune"](
        source=str(source),
        data=data,
        layers=3,
        width=48,
        seq_len=64,
        calibration_tokens=2048,
        refit=refit,
        device="cpu",
        out=tmp_path / "out",
    )
    record = read_record(tmp_path / "out")
    assert record is not None
    found = cast(dict[str, float], record.notes["agreement"])
    chunks = Text(data=data, seq_len=64).heldout(checkpoint.load_tokenizer(source))
    rows = [(ids.numpy(), np.ones((1, ids.shape[1] - 1))) for ids in chunks]
    acceptance, cross_entropy = measured(tmp_path / "out", source, rows, 1.0)
    assert found["acceptance"] == pytest.approx(acceptance, rel=10 * CLOSE)
    assert found["cross_entropy"] == pytest.approx(cross_entropy, rel=CLOSE)
