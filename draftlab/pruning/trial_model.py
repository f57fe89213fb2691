"""Checks that the axis table describes an architecture, on a small random model of its class."""

import torch

from draftlab.errors import UserError
from draftlab.model import checkpoint, families
from draftlab.model.shape import Shape
from draftlab.pruning.cut import Cut, keep_all

HEAD_DIM = 8
TOLERANCE = 1e-3


def prunable_shape(name: str) -> tuple[str, Shape]:
    """Return what to call a shape or a checkpoint to prune, and its shape; weights are not needed.

    Raises:
        UserError: there is none of that name, or drafts cannot be cut from it.
    """
    called, place = families.locate_shape(name)
    if isinstance(place, Shape):
        return called, place
    shape = checkpoint.planned_shape(place)
    check_prunable(checkpoint.read_config(place), shape)
    return called, shape


def check_buildable(config: dict[str, object], shape: Shape) -> None:
    """Refuse a config that transformers builds with other sizes than the shape's.

    Raises:
        UserError: names the tensor.
    """
    built = {
        name: tuple(p.shape)
        for name, p in checkpoint.meta_model(config, torch.float32).named_parameters()
    }
    for name, axes in shape.axes().items():
        if built.get(name) != shape.dims(axes):
            raise UserError(
                f"transformers builds {name} of a {config.get('model_type')} model as {built.get(name)}, "
                f"this shape has {shape.dims(axes)}; such models want heads x head_dim = width"
            )


def check_prunable(config: dict[str, object], source: Shape) -> None:
    """Refuse a model that has LLaMA's tensors but computes something else with them, such as Gemma's norms.

    Half of a small model's hidden dimensions and heads are zeroed. Cutting them, and rescaling the norms to the smaller
    width, must not change its logits. A norm that adds 1 to its scale changes them, and so does an embedding that is
    scaled by the width.

    Raises:
        UserError: the logits changed, or transformers cannot build the small model.
    """
    group = min(4, source.heads // source.kv_heads)
    width = 2 * group * HEAD_DIM
    sizes = {
        "layers": min(2, source.layers),
        "heads": 2 * group,
        "kv_heads": 2,
        "ffn": 32,
        "vocab": 48,
    }
    wide = source.model_copy(update=sizes | {"hidden": width, "head_dim": HEAD_DIM})
    narrow = wide.model_copy(update={"hidden": width // 2, "heads": group, "kv_heads": 1})
    layers = list(range(wide.layers))
    plain = config | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = checkpoint.new_model(checkpoint.config_for(wide, plain, layers), seed=0).eval()
    with torch.no_grad():
        weights = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name in weights:
        if name == "model.embed_tokens.weight":
            weights[name][:, width // 2 :] = 0
        elif "o_proj" in name or "down_proj" in name:
            weights[name][width // 2 :] = 0
            if name.endswith("o_proj.weight"):
                weights[name][:, width // 2 :] = 0
    half = keep_all(narrow)
    cut = dict(Cut(weights, narrow, half).items())
    for name, axes in narrow.axes().items():
        cut[name] = cut[name] * 2**0.5 if axes == ("hidden",) and "norm" in name else cut[name]
    small = checkpoint.new_model(checkpoint.config_for(narrow, plain, layers), seed=0).eval()
    ids = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        for built, tensors in ((model, weights), (small, cut)):
            for name, parameter in built.named_parameters():
                parameter.copy_(tensors[name])
        cut_logits, logits = small(input_ids=ids).logits, model(input_ids=ids).logits
    if not float((cut_logits - logits).abs().max()) <= TOLERANCE * float(logits.abs().max()):
        raise UserError(
            f"{config.get('model_type')} models have LLaMA's tensors but compute something else with them, "
            "so a cut would not be exact; draftlab does not prune them"
        )
