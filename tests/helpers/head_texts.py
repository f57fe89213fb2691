"""A text and random states of a target with 307 ids and hidden size 64, and heads that speculators loads."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftlab.model import checkpoint

V, W, T = 307, 40, 12  # ids of the target, ids of the head, positions with states
LAYERS = [1, 2, 4]


def draft_ids() -> Tensor:
    """Return the ids that a head predicts, [W]."""
    return torch.randperm(V, generator=torch.Generator().manual_seed(1))[:W].sort().values


def random_text(tokens: int) -> tuple[Tensor, Tensor]:
    """Return ids [1, tokens], and states [1, T, A E] of the target."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 300, (1, tokens), generator=generator)
    return ids, torch.randn(1, T, len(LAYERS) * 64, generator=generator)


def random_weights(sizes: dict[str, Any], seed: int = 2, scale: float = 0.2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(size, generator=generator) for name, size in sizes.items()}


def id_tensors() -> dict[str, Tensor]:
    known = torch.zeros(V, dtype=torch.bool)
    known[draft_ids()] = True
    return {"d2t": draft_ids() - torch.arange(W), "t2d": known}


def speculators_model(kind: str, name: str, folder: Path, target: Path, content: Any) -> Any:
    """Return the head of a folder as speculators computes it. kind: peagle. name: PEagle, of its classes."""
    core = pytest.importorskip(f"speculators.models.{kind}.core", reason="make peers installs it")
    config = getattr(core, f"{name}SpeculatorConfig").model_validate(content)
    config.transformer_layer_config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(core, f"{name}DraftModel")(config).float().eval()
    own = dict(checkpoint.Weights(folder))
    own["embed_tokens.weight"] = checkpoint.Weights(target)["model.embed_tokens.weight"]
    missing, unexpected = model.load_state_dict(own, strict=False)
    assert set(missing) <= {"t2d", "verifier_norm.weight", "verifier_lm_head.weight"}
    assert not unexpected
    return model


def at_anchors(
    monkeypatch: pytest.MonkeyPatch, model: Any, ids: Tensor, states: Tensor, anchors: list[int]
) -> tuple[Tensor, Tensor]:
    """Return the states and logits of a DFlash head of speculators in the blocks after these tokens."""
    chosen = torch.tensor(anchors), torch.ones(len(anchors), dtype=torch.bool)
    core = import_module("speculators.models.dflash.core")
    monkeypatch.setattr(core, "select_anchors", lambda *given: chosen)
    with torch.no_grad():
        hidden, logits, *_ = model._backbone_forward(
            states,
            ids,
            torch.ones(1, T),
            torch.zeros(1, T, 64),
            torch.zeros(1, T, dtype=torch.long),
            max_anchors=len(anchors),
        )
    return hidden, logits
