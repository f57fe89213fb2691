"""Importance of each layer, hidden dimension, head and neuron of a model, from one calibration pass.

Parts with higher scores matter more.
Shapes: T tokens, L layers, D hidden, H heads, F ffn, N features, n sampled tokens.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from draftlab.errors import UserError
from draftlab.model.checkpoint import CPU, check_weight
from draftlab.model.devices import add_lower, exact_dtype, exact_products, mirror_lower
from draftlab.model.saving import write_tensors
from draftlab.model.shape import Shape
from draftlab.pruning.walk import Walk
from draftlab.reading import reading
from draftlab.runs.atomic import differing

CONTENT = "content of "  # start of the keys under which a file of scores has fingerprints
SAMPLED_TOKENS = 512  # number of tokens whose residual streams are compared around each layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores of layers, hidden dimensions, heads and neurons. A draft keeps the parts with the highest scores."""

    layers: Tensor  # [L]
    hidden: Tensor  # [D]
    heads: Tensor  # [L, H]
    ffn: Tensor  # [L, F]


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance(Scores):
    """The scores of one calibration.

    A layer's score is 1 minus the mean cosine between its input and its output (ShortGPT, 2403.03853). A hidden
    dimension's score is its mean absolute value in the outputs of all norms. A neuron's score is its mean absolute
    activation times the norm of its column in down_proj (after Minitron, 2407.14679, 3.1). A head's score is the sum of
    such products over the head's features, with columns of o_proj. A mean absolute value is taken over the tokens of a
    chunk. The values of several chunks and norms are combined as the root of their sum of squares.
    """

    # [D, D], sum over tokens of the outer products of the inputs of all norms, each scaled to mean square 1
    covariance: Tensor

    def principal(self, count: int, device: torch.device = CPU) -> Tensor:
        """Return the `count` principal directions, [D, count]."""
        covariance = self.covariance.to(device if device.type == "cuda" else "cpu").double()
        directions = torch.linalg.eigh(covariance).eigenvectors.cpu().flip(1)[:, :count]
        signs = directions.gather(0, directions.abs().argmax(0, keepdim=True)).sign()
        return (directions * signs).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The importance of a model's parts, and residual streams that the walk keeps for the refit.

    streams: Residual streams before a layer, [1, T, D] for each chunk, by the layer's index. The index after the last
        layer has the streams before the last norm.
    """

    importance: Importance
    streams: dict[int, list[Tensor]]


def calibrate(
    walk: Walk,
    shape: Shape,
    chunks: list[Tensor],
    advance: Callable[[int], None],
    *,
    heldout: Sequence[Tensor] = (),
    layers: Callable[[Tensor], Sequence[int]] = lambda _: (),
    width: bool = True,
) -> Calibration:
    """Return the importance of a model's parts, from one pass over chunks of token ids, [1, T] each.

    Args:
        advance: Function that is called with the number of finished layers.
        heldout: Further chunks, which run through the model, but do not count in the importance.
        layers: Function that returns which layers to keep streams of, from the scores of the layers up to now. A layer
            that it does not return is not kept later either.
        width: Whether hidden dimensions, heads and neurons are scored. If False, their scores are 0.
    """
    sums = _Sums(shape, walk.device)
    counted = len(chunks)
    streams = walk.embed([*chunks, *heldout])
    kept = dict[int, list[Tensor]]()
    stride = max(1, counted * chunks[0].shape[1] // SAMPLED_TOKENS)
    sample = _sample(streams[:counted], stride)
    turns = list[Tensor]()
    for index in range(shape.layers):
        with walk.layer(index) as (layer, run), exact_products():
            kept[index] = streams
            with _hooked(sums.listeners(layer, index) if width else []):
                after = [run(stream) for stream in streams[:counted]]
            streams = after + [run(stream) for stream in streams[counted:]]
            sums.weigh(layer, index)
        before, sample = sample, _sample(streams[:counted], stride)
        # each token's vector has length 1
        turns.append(1 - (before @ sample) / sample.square().sum())
        wanted = layers(torch.stack(turns))
        kept = {layer: streams for layer, streams in kept.items() if layer in wanted}
        advance(index + 1)
    if width:
        with walk.norm() as norm, torch.inference_mode():
            for stream in streams[:counted]:
                sums.norm(stream, norm(stream))
    importance = Importance(
        layers=torch.stack(turns),
        hidden=sums.hidden.sqrt().cpu(),
        heads=sums.heads.cpu(),
        ffn=sums.ffn.cpu(),
        covariance=mirror_lower(sums.covariance).float().cpu(),
    )
    return Calibration(importance=importance, streams=kept | {shape.layers: streams} if kept else {})


def save_scores(importance: Importance, file: Path, facts: dict[str, str]) -> None:
    """Write importance to a safetensors file.

    facts: Settings that decide the scores. They are stored with the scores.

    Raises:
        UserError: The file cannot be written.
    """
    tensors = {field.name: getattr(importance, field.name).contiguous() for field in fields(Importance)}
    write_tensors(file, tensors, facts)


def load_scores(file: Path, facts: dict[str, str]) -> Importance:
    """Return the importance that save_scores wrote to a file.

    facts: Settings that must equal the settings in the file.

    Raises:
        UserError: The settings in the file differ, or it is damaged.
    """
    with reading(file), safe_open(file, framework="pt") as handle:
        stored = handle.metadata() or {}
        changed = differing({key: stored.get(key) for key in facts}, facts)
        for key in (key for key in facts if key in changed):
            scores = f"--scores-cache {file} has scores for"
            if key.startswith(CONTENT):
                name = key.removeprefix(CONTENT)
                raise UserError(
                    f"{scores} another content of {name}, which has changed; remove {file}, or name another file"
                )
            raise UserError(f"{scores} {key} {stored.get(key)}, but this run has {key} {facts[key]}; name another file")
        tensors = {field.name: handle.get_tensor(field.name) for field in fields(Importance)}
    for name, tensor in tensors.items():
        check_weight(tensor, name, file)
    return Importance(**tensors)


Listener = Callable[[Tensor, Tensor], object]  # a function of a module's input and output


class _Sums:
    """Sums of squared activation magnitudes over the chunks of a calibration, on the device of the model."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=exact_dtype(device), device=device)

        self.shape = shape
        self.hidden = zeros(shape.hidden)
        self.covariance = zeros(shape.hidden, shape.hidden)
        self.attention = zeros(shape.layers, shape.sizes["q"])
        self.neurons = zeros(shape.layers, shape.ffn)
        self.heads = zeros(shape.layers, shape.heads)
        self.ffn = zeros(shape.layers, shape.ffn)

    def listeners(self, layer: nn.Module, index: int) -> list[tuple[nn.Module, Listener]]:
        """Return submodules of a layer, each with the function that adds its activations to the sums."""
        listeners: dict[str, Listener] = {
            "input_layernorm": self.norm,
            "post_attention_layernorm": self.norm,
            "self_attn.o_proj": lambda x, _: self.attention[index].add_(_magnitude(x)),
            "mlp.down_proj": lambda x, _: self.neurons[index].add_(_magnitude(x)),
        }
        return [(layer.get_submodule(name), listener) for name, listener in listeners.items()]

    def norm(self, x: Tensor, y: Tensor) -> None:
        self.hidden += _magnitude(y)
        x = x[0].float()  # [T, D]
        x = x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        products = x.new_zeros(self.covariance.shape)  # sums over all chunks need float64
        add_lower(products, x.T, x)
        self.covariance += products

    def weigh(self, layer: nn.Module, index: int) -> None:
        """Set the scores of a layer's heads and neurons from the sums and the layer's weights (see Importance)."""
        o, down = (layer.get_parameter(f"{name}.weight") for name in ("self_attn.o_proj", "mlp.down_proj"))
        attention = self.attention[index].sqrt() * _column_norms(o)
        self.heads[index] = attention.unflatten(0, (self.shape.heads, self.shape.head_dim)).sum(-1)
        self.ffn[index] = self.neurons[index].sqrt() * _column_norms(down)


@contextlib.contextmanager
def _hooked(listeners: list[tuple[nn.Module, Listener]]) -> Iterator[None]:
    # the hook returns nothing, because a value would replace the output
    def hook(listener: Listener, _: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        listener(args[0], output)

    with contextlib.ExitStack() as hooks:
        for module, listener in listeners:
            hooks.enter_context(module.register_forward_hook(partial(hook, listener)))
        yield


def _magnitude(x: Tensor) -> Tensor:
    """Return the square of the mean absolute value over the T tokens for each of N features, [1, T, N] -> [N]."""
    return x[0].to(exact_dtype(x.device)).abs().mean(0).square()


def _column_norms(weight: Tensor) -> Tensor:
    return weight.detach().to(exact_dtype(weight.device)).norm(dim=0)


def _sample(streams: list[Tensor], stride: int) -> Tensor:
    # [n, D]
    rows = torch.cat([stream[0, ::stride] for stream in streams])[:SAMPLED_TOKENS].float().cpu()
    return torch.nn.functional.normalize(rows, dim=-1).flatten()
