"""A transformers model that computes with masks, and weights into which the same masks are folded.

B rows, T tokens, D hidden, F ffn, C head_dim. A model masked with zeros gives the logits of the smaller model without
the masked entries. Folding extends this to soft masks.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from draftlab.model.checkpoint import layer_of
from draftlab.model.shape import Shape
from draftlab.pruning.cut import TensorView
from draftlab.pruning.masks.hard_concrete import Masks, Values

NORMS = ("input_layernorm", "post_attention_layernorm", "norm")


@contextlib.contextmanager
def masked(model: nn.Module, masks: Masks, eps: float) -> Iterator[None]:
    """Let a model compute with masks.values inside the `with` block.

    Masks multiply the weights of a projection, since there are fewer weights than activations.
    """
    handles, patched = [], []
    for path, module in model.named_modules():
        name = path[path.find("model.layers.") :] if "model.layers." in path else path
        layer, part = layer_of(name), name.rsplit(".", 1)[-1]
        if part == "embed_tokens":
            handles.append(
                module.register_forward_hook(
                    lambda _, args, out: out * masks.values.hidden.to(out.dtype)
                )
            )
        elif part in NORMS and "hidden" in masks.sizes:
            module.forward = _masked_norm(module, masks, eps)
            patched.append(module)
        elif part in ("o_proj", "down_proj") and layer is not None:
            module.forward = _masked_linear(cast(nn.Linear, module), masks, part, layer)
            patched.append(module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in patched:
            del module.forward


class Folded(TensorView):
    """A source's weights, multiplied by the mask values. Cutting the zeros then leaves the logits unchanged."""

    def __init__(self, weights: Mapping[str, Tensor], shape: Shape, values: Values) -> None:
        super().__init__(weights, shape)
        self.z = values

    def __getitem__(self, name: str) -> Tensor:
        tensor, layer = self.weights[name], layer_of(name)
        role, hidden = self.roles[name], self.z.hidden.to(tensor.device)
        if role in ("embed", "input_norm", "post_norm", "norm"):
            return (tensor * hidden).to(tensor.dtype)
        if layer is None or role not in ("o", "down", "o_bias", "down_bias"):
            return tensor  # the head too is unchanged, because the last norm masks its input
        out = hidden * self.z.layers[layer].to(tensor.device)
        if tensor.ndim == 1:
            return (tensor * out).to(tensor.dtype)
        columns = (
            self.z.heads[layer].repeat_interleave(self.shape.head_dim)
            if role == "o"
            else self.z.ffn[layer]
        )
        return (tensor * out[:, None] * columns.to(tensor.device)).to(tensor.dtype)


def _masked_norm(norm: nn.Module, masks: Masks, eps: float) -> Callable[[Tensor], Tensor]:
    """Return an RMSNorm over the dimensions that are not masked, as the cut model computes it."""

    def forward(x: Tensor) -> Tensor:
        z = masks.values.hidden
        on = (z != 0).float()
        h = x.float()
        scale = (h.square() @ on / on.sum() + eps).rsqrt()  # [B, T]
        weight = norm.get_parameter("weight")  # looked up in each pass: FSDP replaces it
        return (h * scale.unsqueeze(-1)).to(x.dtype) * (weight * z).to(x.dtype)

    return forward


def _masked_linear(
    linear: nn.Linear, masks: Masks, part: str, layer: int
) -> Callable[[Tensor], Tensor]:
    """Return an o_proj or down_proj whose inputs, heads [H C] or neurons [F], and outputs [D] are masked."""

    def forward(x: Tensor) -> Tensor:
        values = masks.values
        heads = values.heads[layer].repeat_interleave(masks.source.head_dim)
        rows = values.hidden * values.layers[layer]
        columns = values.ffn[layer] if part == "down_proj" else heads
        weight = linear.get_parameter("weight") * columns * rows[:, None]
        bias = None if linear.bias is None else (linear.get_parameter("bias") * rows).to(x.dtype)
        return functional.linear(x, weight.to(x.dtype), bias)

    return forward
