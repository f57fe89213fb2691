"""Let a transformers model compute with pruning masks, and fold the same masks into its weights.

B rows, T tokens, D hidden, H heads, F ffn, C head_dim. If masks are 0 or 1, the masked model gives the logits of the
smaller model without the masked entries. With folded weights this also holds for masks between 0 and 1.
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
    """Let a transformers model compute with `masks.values` inside the `with` block.

    Masks multiply the weights of a projection, not its activations, because there are fewer weights.

    eps: Epsilon of the model's norms.
    """
    with contextlib.ExitStack() as undo:
        for path, module in model.named_modules():
            name = path[path.find("model.layers.") :] if "model.layers." in path else path
            layer = layer_of(name)
            part = name.rsplit(".", 1)[-1]
            if part == "embed_tokens":
                hook = module.register_forward_hook(lambda _, args, out: out * masks.values.hidden.to(out.dtype))
                undo.enter_context(hook)
            elif part in NORMS and "hidden" in masks.sizes:
                module.forward = _masked_norm(module, masks, eps)
                undo.callback(delattr, module, "forward")
            elif part in ("o_proj", "down_proj") and layer is not None:
                module.forward = _masked_linear(cast(nn.Linear, module), masks, part, layer)
                undo.callback(delattr, module, "forward")
        yield


class Folded(TensorView):
    """A source's weights times the mask values. A model cut from these weights has the logits of the masked model."""

    def __init__(self, weights: Mapping[str, Tensor], shape: Shape, values: Values) -> None:
        super().__init__(weights, shape)
        self.z = values

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.weights[name]
        layer = layer_of(name)
        role = self.roles[name]
        hidden = self.z.hidden.to(tensor.device)
        if role in ("embed", "input_norm", "post_norm", "norm"):
            return (tensor * hidden).to(tensor.dtype)
        if layer is None or role not in ("o", "down", "o_bias", "down_bias"):
            return tensor  # the head too is unchanged, because the last norm masks its input
        out = hidden * self.z.layers[layer].to(tensor.device)
        if tensor.ndim == 1:
            return (tensor * out).to(tensor.dtype)
        columns = self.z.heads[layer].repeat_interleave(self.shape.head_dim) if role == "o" else self.z.ffn[layer]
        return (tensor * out[:, None] * columns.to(tensor.device)).to(tensor.dtype)


def _masked_norm(norm: nn.Module, masks: Masks, eps: float) -> Callable[[Tensor], Tensor]:
    """Return the forward function of an RMSNorm over the dimensions that are not masked, as in the cut model."""

    def forward(x: Tensor) -> Tensor:
        z = masks.values.hidden
        on = (z != 0).float()
        h = x.float()
        scale = (h.square() @ on / on.sum() + eps).rsqrt()  # [B, T]
        # looked up in each pass, because FSDP replaces the parameter
        weight = norm.get_parameter("weight")
        return (h * scale.unsqueeze(-1)).to(x.dtype) * (weight * z).to(x.dtype)

    return forward


def _masked_linear(linear: nn.Linear, masks: Masks, part: str, layer: int) -> Callable[[Tensor], Tensor]:
    """Return the forward function of an o_proj or down_proj with masked inputs and outputs.

    The inputs of o_proj belong to heads, and the inputs of down_proj to neurons. The outputs are hidden dimensions.
    """

    def forward(x: Tensor) -> Tensor:
        values = masks.values
        heads = values.heads[layer].repeat_interleave(masks.source.head_dim)
        rows = values.hidden * values.layers[layer]
        columns = values.ffn[layer] if part == "down_proj" else heads
        weight = linear.get_parameter("weight") * columns * rows[:, None]
        bias = None if linear.bias is None else (linear.get_parameter("bias") * rows).to(x.dtype)
        return functional.linear(x, weight.to(x.dtype), bias)

    return forward
