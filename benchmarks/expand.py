"""Expand a checkpoint: write a larger checkpoint that computes the same function as its source.

    python -m benchmarks.expand SOURCE OUT --layers 36 --width 2304 --params 3b

Added weights read zeros or write zeros (Gesmundo and Maile 2023, 2308.06103; zero padding as in LEMON, Wang et al.
2023, 2310.07999). D hidden dimensions of the source, D' of the expansion. With the expansion as target, drafts of the
source have the same acceptance as with the source, but a pass of the target costs more. The expansion does not suit
drafters that read or skip the target's layers, because the added layers do nothing. Zeros and random weights may draw
less power than trained weights.
"""

import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from draftlab.errors import UserError
from draftlab.model import checkpoint, hub, saving
from draftlab.model.hf_files import HEAD_IDS, MODEL_TYPES
from draftlab.model.shape import (
    Axis,
    Shape,
    check,
    fewest_kv_heads,
    format_count,
    parse_count,
    round_up,
    solve_ffn,
)
from draftlab.pruning.cut import TensorView, Untied

# tensors that write the residual stream, in which all added values are zero
WRITES = ("embed_tokens", "o_proj", "down_proj")
FFN_STEP = 16


class Expanded(TensorView):
    """The tensors of an expansion: larger tensors that contain the source's tensors.

    Added weights that write the residual stream are zero. All other added weights are random, with the standard
    deviation of the source's weights. As the residual stream is padded with zeros, its mean square is D / D' times as
    large. So norms are scaled by sqrt(D / D'), and their epsilon by D / D' (config_of). Norms of q and k have the same
    epsilon but keep their width, so q_proj and k_proj are scaled as well.
    """

    def __init__(self, weights: Mapping[str, Tensor], source: Shape, shape: Shape, seed: int) -> None:
        if source.tied and not shape.tied:
            weights = Untied(weights, source.model_copy(update={"tied": False}))
        super().__init__(weights, shape)
        self.source, self.seed = source, seed
        self.scale = math.sqrt(source.hidden / shape.hidden)

    def __getitem__(self, name: str) -> Tensor:
        layer = checkpoint.layer_of(name)
        added = layer is not None and layer >= self.source.layers
        origin = self.weights[name.replace(f".{layer}.", f".{layer % self.source.layers}.", 1) if layer else name]
        origin = self._scaled(name, origin)
        tensor = self._filled(name, origin)
        if added and "norm" not in name:
            return tensor
        places = [self._places(axis, size) for axis, size in zip(self.axes[name], origin.shape, strict=True)]
        tensor[tuple(into for into, _ in places)] = origin[tuple(source for _, source in places)]
        return tensor

    def _scaled(self, name: str, origin: Tensor) -> Tensor:
        normed = (self.shape.qk_norm or self.shape.qk_layernorm) and ("q_proj" in name or "k_proj" in name)
        norm = "norm" in name and self.axes[name] == ("hidden",)
        return (origin.float() * self.scale).to(origin.dtype) if norm or normed else origin

    def _filled(self, name: str, origin: Tensor) -> Tensor:
        tensor = origin.new_zeros(self.shape.dims(self.axes[name]))
        if any(part in name for part in WRITES):
            return tensor
        if "norm" in name:
            return tensor.fill_(self.scale)
        rng = torch.Generator(tensor.device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        # uniform values are drawn much faster than normally distributed values
        spread = math.sqrt(3) * float(origin.float().std())
        return tensor.uniform_(-spread, spread, generator=rng)

    def _places(self, axis: Axis, size: int) -> tuple[slice | Tensor, slice | Tensor]:
        """Return the indices along an axis that get values of the source, and the indices of these in the source."""
        if axis not in ("q", "kv"):
            return slice(size), slice(size)
        have, group = self.source, self.shape.heads // self.shape.kv_heads
        heads = torch.arange(have.heads)
        kv_head, within = (
            heads // (have.heads // have.kv_heads),
            heads % (have.heads // have.kv_heads),
        )
        kv_place = kv_head * kv_copies(have, self.shape) + within // group
        into, copied = (kv_place * group + within % group, heads) if axis == "q" else (kv_place, kv_head)
        return _values(into, have.head_dim), _values(copied, have.head_dim)


def expand(source: Path, out: Path, shape: Shape, seed: int = 0) -> Path:
    """Write an expansion of a checkpoint that has the given shape, one tensor at a time.

    Raises:
        UserError: The source's norms are not plain RMSNorms, or the shape does not contain the source's shape.
    """
    config, have = checkpoint.read_config(source), checkpoint.read_shape(source)
    if (kind := config.get("model_type")) not in MODEL_TYPES:
        raise UserError(
            f"{source} is a {kind} model, but expand supports only {', '.join(MODEL_TYPES)}, with plain RMSNorms"
        )
    check_contains(shape, have)
    check(shape, llama=kind == "llama")
    work = out.with_name(f"{out.name}.partial")
    work.mkdir(parents=True)
    tensors = Expanded(checkpoint.Weights(source), have, shape, seed)
    saving.write_checkpoint(work, config_of(config, have, shape), tensors.items(), source)
    if (source / HEAD_IDS).is_file():
        (work / HEAD_IDS).write_bytes((source / HEAD_IDS).read_bytes())
    (work / "README.md").write_text(_card(hub.checkpoint_name(source), have, shape))
    return work.rename(out)


def config_of(config: Mapping[str, object], have: Shape, shape: Shape) -> dict[str, object]:
    """Return the config.json of an expansion. config: The config.json of its source."""
    layers = [layer % have.layers for layer in range(shape.layers)]
    eps = float(str(config["rms_norm_eps"])) * have.hidden / shape.hidden
    return checkpoint.config_for(shape, dict(config), layers) | {"rms_norm_eps": eps}


def kv_copies(have: Shape, shape: Shape) -> int:
    """Return how many copies of each kv head an expansion needs, because its kv heads may serve fewer query heads."""
    return -(-(have.heads // have.kv_heads) // (shape.heads // shape.kv_heads))


def check_contains(shape: Shape, have: Shape) -> None:
    """Check that a source can be expanded to a shape.

    Raises:
        UserError: An axis is shorter than that of the source; head_dim, vocab or an option differs; or there are too
            few kv heads.
    """
    for field in ("layers", "hidden", "heads", "kv_heads", "ffn"):
        size, least = getattr(shape, field), getattr(have, field)
        if size < least:
            raise UserError(f"{field} {size} is less than in the source; use {least} or more")
    for field in (
        "head_dim",
        "vocab",
        "tied",
        "qkv_bias",
        "o_bias",
        "mlp_bias",
        "qk_norm",
        "qk_layernorm",
    ):
        size, own = getattr(shape, field), getattr(have, field)
        if size != own and not (field == "tied" and own):  # an expansion may untie a tied head
            raise UserError(f"{field} is {size} instead of the source's {own}, which an expansion cannot change")
    fewest = have.kv_heads * kv_copies(have, shape)
    if shape.heads % shape.kv_heads == 0 and shape.kv_heads < fewest:
        raise UserError(
            f"{shape.heads} heads with {shape.kv_heads} kv heads cannot contain the source's {have.heads} heads with "
            f"{have.kv_heads}; use {fewest} or more kv heads, or as many heads per kv head as the source has"
        )


def larger(
    have: Shape,
    *,
    layers: int | None = None,
    width: int | None = None,
    ffn: int | None = None,
    params: str | None = None,
) -> Shape:
    """Return a larger shape with the proportions of a source.

    params: Number of parameters, such as 1.3b, for which the width of the FFN is solved.
    """
    hidden = width or have.hidden
    natural = max(have.heads, have.heads * hidden // have.hidden)
    heads = next(n for n in range(natural, max(natural, hidden) + 1) if hidden % n == 0 or n >= hidden)
    sizes = {
        "layers": layers or have.layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": fewest_kv_heads(heads, have.heads // have.kv_heads),
        "ffn": ffn or max(have.ffn, round_up(-(-have.ffn * hidden // have.hidden), FFN_STEP)),
    }
    shape = have.model_copy(update=sizes)
    if params is None:
        return shape
    total = parse_count(params)
    return solve_ffn(shape, total, most=round_up(total // hidden + 1, FFN_STEP), multiple_of=FFN_STEP)


def _values(heads: Tensor, head_dim: int) -> Tensor:
    return (heads.unsqueeze(1) * head_dim + torch.arange(head_dim)).flatten()


def _card(name: str, have: Shape, shape: Shape) -> str:
    return f"""---
base_model: {name}
tags: [speculative-decoding, measuring-instrument]
---

# {name}, expanded to {format_count(shape.params())}

**A measuring instrument, not a better model.** It writes what {name} writes, and a pass costs what a pass of
{shape.describe()} costs: speculative decoding with drafts of {name} can be timed at that size. The {have.describe()} of
{name} are in it. Everything that was added reads zeros or writes zeros (Gesmundo and Maile 2023, arXiv 2308.06103).
"""


def main(
    source: Annotated[str, typer.Argument(help="Checkpoint to expand.")],
    out: Annotated[Path, typer.Argument(help="Directory to write.")],
    layers: Annotated[int | None, typer.Option(help="Number of layers. Default: as in the source.")] = None,
    width: Annotated[int | None, typer.Option(help="Hidden dimensions. Default: as in the source.")] = None,
    params: Annotated[str | None, typer.Option(help="Parameters, such as 1.3b, reached by the FFN's width.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random values that are added.")] = 0,
) -> None:
    directory = hub.locate(source)
    shape = larger(checkpoint.read_shape(directory), layers=layers, width=width, params=params)
    expand(directory, out, shape, seed)
    typer.echo(f"{out}: {shape.describe()}")


if __name__ == "__main__":
    typer.run(main)
