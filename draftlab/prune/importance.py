"""How much each layer, hidden dimension, head and neuron of a model matters, from one calibration pass.

T tokens, L layers, D hidden, H heads, C head_dim, F ffn. Larger scores matter more.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from draftlab.errors import UserError
from draftlab.model.shape import Shape
from draftlab.prune.walk import Walk

SAMPLED_TOKENS = 512  # streams kept of every layer, to compare all pairs of layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a choice is made by, however it was found."""

    layers: Tensor  # [L]
    hidden: Tensor  # [D]
    heads: Tensor  # [L, H]
    ffn: Tensor  # [L, F]


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """What one calibration finds. heads and ffn are activations x weights, after Minitron (2407.14679, 3.1)."""

    distance: Tensor  # [L + 1, L + 1]: mean 1 - cosine of the residual streams before layers i and j
    hidden: Tensor  # [D], over all norms' outputs
    heads: Tensor  # [L, H]
    ffn: Tensor  # [L, F]
    covariance: Tensor  # [D, D]: of the streams that enter norms, each token scaled to mean square 1

    @property
    def scores(self) -> Scores:
        """Layers by how much they turn their input (block influence, ShortGPT, 2403.03853)."""
        return Scores(layers=self.distance.diagonal(1), hidden=self.hidden, heads=self.heads, ffn=self.ffn)

    def principal(self, count: int) -> tuple[Tensor, float]:
        """The count largest principal directions [D, count], and the share of the energy that they hold."""
        energy, directions = torch.linalg.eigh(self.covariance.double())
        directions = directions.flip(1)[:, :count]
        signs = directions.gather(0, directions.abs().argmax(0, keepdim=True)).sign()
        return (directions * signs).float(), float(energy.flip(0)[:count].sum() / energy.sum())


def calibrate(walk: Walk, shape: Shape, chunks: list[Tensor], advance: Callable[[int], None]) -> Importance:
    """One pass over chunks of token ids [1, T], layer by layer; advance is told how many layers are done."""
    sums = _Sums(shape)
    streams = walk.embed(chunks)
    stride = max(1, len(chunks) * chunks[0].shape[1] // SAMPLED_TOKENS)
    samples = [_sample(streams, stride)]
    for index in range(shape.layers):
        with walk.layer(index) as (layer, run), _hooked(sums.listeners(layer, index)):
            streams = [run(stream) for stream in streams]
            sums.weigh(layer, index)
        samples.append(_sample(streams, stride))
        advance(index + 1)
    with walk.head() as (model, run), _hooked([(model.get_submodule("model.norm"), sums.norm)]):
        for stream in streams:
            run(stream)
    return Importance(
        distance=_distances(samples),
        hidden=sums.hidden.sqrt(),
        heads=sums.heads,
        ffn=sums.ffn,
        covariance=sums.covariance.float(),
    )


def save_scores(importance: Importance, file: Path, made_by: dict[str, str]) -> None:
    """Keep a calibration: one serves many shapes. made_by: what it came from, compared when it is read again."""
    tensors = {name: getattr(importance, name).contiguous() for name in Importance.__slots__}
    file.parent.mkdir(parents=True, exist_ok=True)
    writing = file.with_name(f".{file.name}.writing")
    save_file(tensors, writing, metadata=made_by)
    writing.rename(file)


def load_scores(file: Path, made_by: dict[str, str]) -> Importance:
    """Raises UserError: the file came from another source, text, or number of tokens."""
    with safe_open(file, framework="pt") as handle:
        held = handle.metadata() or {}
        differing = [key for key, value in made_by.items() if held.get(key) != value]
        if differing:
            key = differing[0]
            raise UserError(f"{file} was made with {key} = {held.get(key)}, not {made_by[key]}; give another file")
        return Importance(**{name: handle.get_tensor(name) for name in Importance.__slots__})


class _Sums:
    """Running sums over tokens, in float64 where they are many."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.hidden = torch.zeros(shape.hidden, dtype=torch.float64)
        self.covariance = torch.zeros(shape.hidden, shape.hidden, dtype=torch.float64)
        self.attention = torch.zeros(shape.layers, shape.sizes["q"], dtype=torch.float64)
        self.neurons = torch.zeros(shape.layers, shape.ffn, dtype=torch.float64)
        self.heads = torch.zeros(shape.layers, shape.heads, dtype=torch.float64)
        self.ffn = torch.zeros(shape.layers, shape.ffn, dtype=torch.float64)

    def listeners(self, layer: nn.Module, index: int) -> list[tuple[nn.Module, Callable[[Tensor, Tensor], None]]]:
        """Submodules of a layer, and what is to be called with their input and output."""

        def attention(x: Tensor, _: Tensor) -> None:
            self.attention[index] += _magnitude(x)

        def neurons(x: Tensor, _: Tensor) -> None:
            self.neurons[index] += _magnitude(x)

        return [
            (layer.get_submodule("input_layernorm"), self.norm),
            (layer.get_submodule("post_attention_layernorm"), self.norm),
            (layer.get_submodule("self_attn.o_proj"), attention),
            (layer.get_submodule("mlp.down_proj"), neurons),
        ]

    def norm(self, x: Tensor, y: Tensor) -> None:
        self.hidden += _magnitude(y)
        x = x[0].float()  # [T, D]
        x = x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        self.covariance += (x.T @ x).cpu()

    def weigh(self, layer: nn.Module, index: int) -> None:
        """Activations of layer index times the norms of the columns that read them."""
        o, down = (layer.get_parameter(f"{name}.weight") for name in ("self_attn.o_proj", "mlp.down_proj"))
        attention = self.attention[index].sqrt() * o.detach().double().norm(dim=0).cpu()
        self.heads[index] = attention.unflatten(0, (self.shape.heads, self.shape.head_dim)).sum(-1)
        self.ffn[index] = self.neurons[index].sqrt() * down.detach().double().norm(dim=0).cpu()


@contextlib.contextmanager
def _hooked(listeners: list[tuple[nn.Module, Callable[[Tensor, Tensor], None]]]) -> Iterator[None]:
    def hook(call: Callable[[Tensor, Tensor], None]) -> Callable[..., None]:
        return lambda _, args, output: call(args[0], output)

    handles = [module.register_forward_hook(hook(call)) for module, call in listeners]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _magnitude(x: Tensor) -> Tensor:
    """[1, T, N] -> [N]: the square of the mean magnitude over tokens."""
    return x[0].double().abs().mean(0).square().cpu()


def _sample(streams: list[Tensor], stride: int) -> Tensor:
    rows = torch.cat([stream[0, ::stride] for stream in streams])[:SAMPLED_TOKENS].float().cpu()  # [n, D]
    return torch.nn.functional.normalize(rows, dim=-1).flatten()


def _distances(samples: list[Tensor]) -> Tensor:
    tokens = samples[0].square().sum()  # each row has length 1
    rows = torch.stack(samples)  # [L + 1, n D]
    return 1 - rows @ rows.T / tokens
