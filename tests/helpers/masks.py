"""Pruning masks of small models, and the models that they describe."""

from pathlib import Path

import torch
from torch import Tensor

from draftlab.model import checkpoint
from draftlab.model.shape import Shape
from draftlab.pruning.cut import Cut, Untied
from draftlab.pruning.masks.hard_concrete import Masks
from draftlab.pruning.masks.masked_model import Folded, masked
from draftlab.training.loop import Loop

IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))
SETTINGS = Loop(
    steps=6,
    optimizer="adamw",
    lr=1e-4,
    dtype="float32",
    eval_steps=6,
    save_steps=2,
    warmup_ratio=0.1,
    weight_decay=0.1,
)


def smaller(have: Shape) -> Shape:
    heads = 2 * max(1, have.heads // have.kv_heads // 2)
    sizes = {"layers": 3, "hidden": 48, "kv_heads": 2, "heads": heads, "ffn": 40}
    return have.model_copy(update=sizes)


def masks_for(have: Shape, shape: Shape, spread: float = 2.0) -> Masks:
    """Masks somewhere in the middle of training."""
    masks = Masks(have, shape, seed=0)
    rng = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for log_odds in masks.log_odds.values():
            log_odds.copy_(spread * torch.randn(log_odds.shape, generator=rng))
    return masks.eval()


def both(directory: Path, model: torch.nn.Module, masks: Masks) -> tuple[Tensor, Tensor]:
    """Logits of the masked model, and of the model that is cut out."""
    have, config = masks.source, checkpoint.read_config(directory)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    keep = masks.keep()
    untied = not have.tied and "lm_head.weight" not in weights
    folded = Folded(Untied(weights, have) if untied else weights, have, masks.deterministic())
    small = checkpoint.meta_model(checkpoint.config_for(masks.shape, config, keep.layers), torch.float64)
    cut = {name: t.detach().double() for name, t in Cut(folded, masks.shape, keep).items()}
    if masks.shape.tied:
        cut["lm_head.weight"] = cut["model.embed_tokens.weight"]
    small.load_state_dict(cut, assign=True)
    masks.draw()
    with masked(model, masks, float(str(config["rms_norm_eps"]))):
        return model(IDS).logits, small(IDS).logits


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest logit."""
    return float(((found - expected).abs().max() / expected.abs().max()).detach())
