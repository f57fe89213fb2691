"""How much each layer, hidden dimension, head and neuron of a model matters, from one calibration pass.

B rows, T tokens, L layers, D hidden, H heads, C head_dim, F ffn.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftlab.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Scores, larger matters more. Activations x weights for heads and neurons, after Minitron (2407.14679, 3.1)."""

    layers: Tensor  # [L], block influence: 1 - cosine of a block's input and output (ShortGPT, 2403.03853)
    hidden: Tensor  # [D], over all norm outputs
    heads: Tensor  # [L, H]
    ffn: Tensor  # [L, F]


def calibrate(
    model: PreTrainedModel, shape: Shape, batches: list[np.ndarray], advance: Callable[[int], None]
) -> Importance:
    """One pass over batches of token ids [B, T]; advance is told how many batches are done."""
    sums = _Sums(shape)
    handles = _listen(model, shape, sums)
    try:
        with torch.inference_mode():
            for done, ids in enumerate(batches, 1):
                model(input_ids=torch.from_numpy(ids).to(model.device), use_cache=False, logits_to_keep=1)
                advance(done)
    finally:
        for handle in handles:
            handle.remove()
    return sums.importance(model, shape)


class _Sums:
    """Running sums in float64: squares over rows of the mean magnitude over tokens, and cosines of blocks."""

    def __init__(self, shape: Shape) -> None:
        self.hidden = torch.zeros(shape.hidden, dtype=torch.float64)
        self.attention = torch.zeros(shape.layers, shape.sizes["q"], dtype=torch.float64)
        self.ffn = torch.zeros(shape.layers, shape.ffn, dtype=torch.float64)
        self.cosine = torch.zeros(shape.layers, dtype=torch.float64)
        self.count = 0

    def importance(self, model: PreTrainedModel, shape: Shape) -> Importance:
        weights = dict(model.named_parameters())

        def column_norms(name: str) -> Tensor:
            rows = [weights[f"model.layers.{layer}.{name}.weight"].detach() for layer in range(shape.layers)]
            return torch.stack([w.double().norm(dim=0).cpu() for w in rows])

        attention = self.attention.sqrt() * column_norms("self_attn.o_proj")  # [L, H C]
        return Importance(
            layers=1 - self.cosine / self.count,
            hidden=self.hidden.sqrt(),
            heads=attention.unflatten(1, (shape.heads, shape.head_dim)).sum(-1),
            ffn=self.ffn.sqrt() * column_norms("mlp.down_proj"),
        )


def _listen(model: PreTrainedModel, shape: Shape, sums: _Sums) -> list[torch.utils.hooks.RemovableHandle]:
    modules = dict(model.named_modules())
    handles = [modules["model.norm"].register_forward_hook(_hidden_hook(sums))]
    for layer in range(shape.layers):
        block = f"model.layers.{layer}"
        handles += [
            modules[f"{block}.input_layernorm"].register_forward_hook(_hidden_hook(sums)),
            modules[f"{block}.post_attention_layernorm"].register_forward_hook(_hidden_hook(sums)),
            modules[f"{block}.self_attn.o_proj"].register_forward_pre_hook(_input_hook(sums.attention[layer])),
            modules[f"{block}.mlp.down_proj"].register_forward_pre_hook(_input_hook(sums.ffn[layer])),
            modules[block].register_forward_hook(_block_hook(sums, layer), with_kwargs=True),
        ]
    return handles


def _magnitude(x: Tensor) -> Tensor:
    """[B, T, N] -> [N]: squares over rows of the mean magnitude over tokens."""
    return x.double().abs().mean(1).square().sum(0).cpu()


def _hidden_hook(sums: _Sums) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        sums.hidden += _magnitude(output)

    return hook


def _input_hook(total: Tensor) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        total.add_(_magnitude(args[0]))

    return hook


def _block_hook(sums: _Sums, layer: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        cosine = torch.cosine_similarity(before.double(), output.double(), dim=-1)
        sums.cosine[layer] += cosine.sum().cpu()
        sums.count += cosine.numel() if layer == 0 else 0

    return hook
