"""Heads as speculators itself reads, computes and writes them: the same logits both ways, where it is installed."""

from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers.builders import assert_rounds
from helpers.head_texts import LAYERS, T, V, W, draft_ids, random_text, random_weights
from helpers.plain_eagle import VARIANTS
from torch import Tensor
from transformers import AutoConfig

from draftlab.heads.eagle3 import layout
from draftlab.heads.eagle3.layout import Head
from draftlab.heads.eagle3.module import EagleHead
from draftlab.model import checkpoint

core = pytest.importorskip("speculators.models.eagle3.core", reason="make peers installs it")
pytestmark = pytest.mark.slow

STEPS = 3


@pytest.fixture(scope="module")
def text() -> tuple[Tensor, Tensor]:
    """ids [1, T + 1], and states [1, T, A E] of the target."""
    return random_text(T + 1)


def logits_there(model: Any, ids: Tensor, states: Tensor) -> list[Tensor]:
    """Logits of each step of their training-time test, [T, W] each."""
    found: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda *call: found.append(call[2][0].detach()))
    with torch.no_grad():
        documents = torch.zeros(1, T, dtype=torch.long)
        model(hidden_states=states, input_ids=ids[:, 1:], document_ids=documents, ttt_steps=STEPS)
    hook.remove()
    return found


def logits_here(head: Head, target: Path, ids: Tensor, states: Tensor) -> list[Tensor]:
    embedding = checkpoint.Weights(target)["model.embed_tokens.weight"]
    student = EagleHead.of(head, embedding)
    with torch.no_grad():
        return [student.lm_head(hidden)[0] for hidden in student(ids[:, :-1], states, STEPS)]


def assert_alike(here: list[Tensor], there: list[Tensor], window: int | None) -> None:
    """Check that both are alike. Later steps are compared up to the window's edge."""
    for step in range(STEPS):
        places = T - 1 - step if window is None or step == 0 else min(T - 1 - step, window - step)
        assert_rounds(here[step][:places], there[step][:places])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_written_here_has_the_same_logits_there(target, tmp_path, text, variant):
    fields = VARIANTS[variant] | ({"sliding_window": 8} if "sliding_window" in VARIANTS[variant] else {})
    config = layout.head_config(target, LAYERS, W, **fields)
    weights = random_weights(config.sizes())
    head = Head(config=config, weights=weights, ids=draft_ids(), embedding=None)
    layout.write(tmp_path, head, "speculators", target=target, k=STEPS)
    loaded = core.Eagle3SpeculatorConfig.from_pretrained(tmp_path)
    loaded.transformer_layer_config._attn_implementation = "sdpa"
    model = core.Eagle3DraftModel.from_pretrained(tmp_path, config=loaded).float()
    assert_alike(logits_here(head, target, *text), logits_there(model, *text), config.sliding_window)


def trained_there(target: Path, text: tuple[Tensor, Tensor], **fields: Any) -> Any:
    """Return a head of theirs, of the layer that their trainer makes for a target, after twenty steps on one text."""
    config = AutoConfig.from_pretrained(target)
    config.num_hidden_layers, config.tie_word_embeddings = 1, False
    if window := fields.pop("sliding_window", None):
        config.sliding_window, config.layer_types = window, ["sliding_attention"]
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[draft_ids()] = True
    torch.manual_seed(0)
    model = core.Eagle3DraftModel.from_training_args(
        config,
        t2d,
        draft_ids() - torch.arange(W),
        draft_vocab_size=W,
        ttt_steps=STEPS,
        verifier_name_or_path=str(target),
        target_layer_ids=LAYERS,
        draft_attn_impl="sdpa",
        **{"norm_before_residual": False} | fields,
    )
    losses = import_module("speculators.losses")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    ids, states = text
    last = torch.randn(1, T, 64, generator=torch.Generator().manual_seed(3))
    documents = torch.zeros(1, T, dtype=torch.long)
    for _ in range(20):
        _, loss, _ = model(
            hidden_states=states,
            input_ids=ids[:, 1:],
            document_ids=documents,
            ttt_steps=STEPS,
            verifier_last_hidden_states=last,
            loss_config=losses.resolve_loss_config("kl_div", "eager"),
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


SPECULATORS_DEFAULTS = {
    "norm_before_residual": True,
    "norm_before_fc": True,
    "norm_output": True,
    "sliding_window": 8,
}


@pytest.mark.parametrize("fields", [{}, SPECULATORS_DEFAULTS, {"fc_norm": True}])
def test_a_head_trained_there_has_the_same_logits_here(target, tmp_path, text, fields):
    model = trained_there(target, text, **fields)
    model.save_pretrained(tmp_path)
    head = layout.read(tmp_path, target, torch.float32)
    assert head.config.norm_output == cast(bool, fields.get("norm_output", False))
    assert_alike(logits_here(head, target, *text), logits_there(model, *text), head.config.sliding_window)
