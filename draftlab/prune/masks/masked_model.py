"""A transformers model that computes with masks, and the same masks folded into its weights.

B rows, T tokens, D hidden, F ffn, C head_dim. Masked with zeros, a model gives the logits of the smaller model that
is cut out by them; the fold makes that true for soft masks too.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn
from torch.nn import functional

from draftlab.model.checkpoint import layer_of
from draftlab.model.shape import Shape
from draftlab.prune.masks.hard_concrete import Masks, Values

NORMS = ("input_layernorm", "post_attention_layernorm", "norm")


@contextlib.contextmanager
def masked(model: nn.Module, masks: Masks, eps: float) -> Iterator[None]:
    """Inside, model computes with masks.values.

    They multiply a projection's weights, which a batch of tokens outnumbers; around wrapped layers, such as LoRA's,
    what goes in and comes out.
    """
    handles, patched = [], []
    for path, module in model.named_modules():
        name = path[path.find("model.layers.") :] if "model.layers." in path else path
        layer, part = layer_of(name), name.rsplit(".", 1)[-1]
        if part == "embed_tokens":
            handles.append(module.register_forward_hook(_mask_embedding(masks)))
        elif part in NORMS and "hidden" in masks.families:
            module.forward = _masked_norm(module, masks, eps)
            patched.append(module)
        elif part in ("o_proj", "down_proj") and layer is not None and isinstance(module, nn.Linear):
            module.forward = _masked_linear(module, masks, layer, _columns(masks, part, layer))
            patched.append(module)
        elif part in ("o_proj", "down_proj") and layer is not None:
            handles.append(module.register_forward_pre_hook(_mask_input(_columns(masks, part, layer))))
            handles.append(module.register_forward_hook(_mask_output(masks, layer)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in patched:
            del module.forward


class Folded(Mapping[str, Tensor]):
    """A source's weights with mask values multiplied in, each once; cutting what is zero then changes nothing."""

    def __init__(self, weights: Mapping[str, Tensor], shape: Shape, values: Values) -> None:
        self.weights, self.shape, self.z = weights, shape, values
        self._axes = shape.axes()

    def __getitem__(self, name: str) -> Tensor:
        tensor, layer = self.weights[name], layer_of(name)
        hidden = self.z.hidden.to(tensor.device)
        if name == "model.embed_tokens.weight" or (self._axes[name] == ("hidden",) and "norm" in name):
            return (tensor * hidden).to(tensor.dtype)
        if layer is None or not ("o_proj" in name or "down_proj" in name):
            return tensor  # the head too: its input is masked by the last norm
        out = hidden * self.z.layers[layer].to(tensor.device)
        if tensor.ndim == 1:
            return (tensor * out).to(tensor.dtype)
        heads = self.z.heads[layer].repeat_interleave(self.shape.head_dim)
        columns = heads if "o_proj" in name else self.z.ffn[layer]
        return (tensor * out[:, None] * columns.to(tensor.device)).to(tensor.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)


def _masked_norm(norm: nn.Module, masks: Masks, eps: float) -> Callable[[Tensor], Tensor]:
    """RMSNorm over the dimensions that are not masked, as the cut model will compute it."""

    def forward(x: Tensor) -> Tensor:
        z = masks.values.hidden
        on = (z != 0).float()
        h = x.float()
        scale = (h.square() @ on / on.sum() + eps).rsqrt()  # [B, T]
        weight = norm.get_parameter("weight")  # looked up each time: FSDP exchanges it
        return (h * scale.unsqueeze(-1)).to(x.dtype) * (weight * z).to(x.dtype)

    return forward


def _mask_embedding(masks: Masks) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
    return lambda _, args, output: output * masks.values.hidden.to(output.dtype)


def _columns(masks: Masks, part: str, layer: int) -> Callable[[], Tensor]:
    """Masks of what goes into a projection: query heads, [H C], or neurons, [F]."""
    if part == "down_proj":
        return lambda: masks.values.ffn[layer]
    return lambda: masks.values.heads[layer].repeat_interleave(masks.source.head_dim)


def _rows(masks: Masks, layer: int) -> Tensor:
    """Masks of what comes out of a projection, [D]."""
    return masks.values.hidden * masks.values.layers[layer]


def _masked_linear(linear: nn.Linear, masks: Masks, layer: int, columns: Callable[[], Tensor]) -> Callable[..., Tensor]:
    def forward(x: Tensor) -> Tensor:
        rows = _rows(masks, layer)
        weight = linear.get_parameter("weight") * columns() * rows[:, None]
        bias = None if linear.bias is None else (linear.get_parameter("bias") * rows).to(x.dtype)
        return functional.linear(x, weight.to(x.dtype), bias)

    return forward


def _mask_input(columns: Callable[[], Tensor]) -> Callable[[nn.Module, tuple[Tensor]], Tensor]:
    return lambda _, args: args[0] * columns().to(args[0].dtype)


def _mask_output(masks: Masks, layer: int) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
    def hook(_: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        return output * _rows(masks, layer).to(output.dtype)

    return hook
