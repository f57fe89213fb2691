"""Function-preserving expansion: a larger checkpoint that computes the source's function, to measure with.

The opposite of a cut: what is added reads zeros or writes zeros. Gesmundo and Maile 2023 (2308.06103); zero padding as
in LEMON (Wang et al. 2023, 2310.07999). D hidden dimensions of the source, D' of the expansion.
"""

import math
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from draftlab.config.make import ExpandConfig
from draftlab.console import progress
from draftlab.errors import UserError
from draftlab.model import checkpoint, families, hub, saving
from draftlab.model.checkpoint import MODEL_TYPES
from draftlab.model.head_ids import HEAD_IDS
from draftlab.model.shape import Axis, Shape, check, fewest_kv_heads, format_count, parse_count, round_up, solve_ffn
from draftlab.output import Output
from draftlab.prune.cut import TensorView, Untied
from draftlab.prune.trial_model import check_buildable

WRITES = ("embed_tokens", "o_proj", "down_proj")  # into the residual stream: zero but for the source's own values
TIMED_VALUES = 1 << 22
SIZES = {"layers": "layers", "hidden": "width", "heads": "heads", "kv_heads": "kv-heads", "ffn": "ffn"}


class Expanded(TensorView):
    """The source's tensors within larger ones: zeros where they write, random values of the source's scale elsewhere.

    The residual stream is padded with zeros, so that its mean square is D / D' times as large: norms are scaled by
    sqrt(D / D') and their epsilon by D / D' (config_of). Norms of q and k have the same epsilon and keep their width;
    so q_proj and k_proj before them are scaled as well. Added layers, heads and neurons write zeros.
    """

    def __init__(self, weights: Mapping[str, Tensor], source: Shape, shape: Shape, seed: int) -> None:
        super().__init__(Untied(weights, source) if source.tied and not shape.tied else weights, shape)
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
        spread = math.sqrt(3) * float(origin.float().std())  # uniform values are drawn much faster than normal ones
        return tensor.uniform_(-spread, spread, generator=rng)

    def _places(self, axis: Axis, size: int) -> tuple[slice | Tensor, slice | Tensor]:
        """Return the places along an axis that are the source's, and which places of the source they are."""
        if axis not in ("q", "kv"):
            return slice(size), slice(size)
        have, group = self.source, self.shape.heads // self.shape.kv_heads
        heads = torch.arange(have.heads)
        kv_head, within = heads // (have.heads // have.kv_heads), heads % (have.heads // have.kv_heads)
        kv_place = kv_head * kv_copies(have, self.shape) + within // group
        into, copied = (kv_place * group + within % group, heads) if axis == "q" else (kv_place, kv_head)
        return _values(into, have.head_dim), _values(copied, have.head_dim)


def expand(config: ExpandConfig, output: Output) -> Shape:
    """Write the expansion, a tensor at a time; return its shape.

    Raises:
        UserError: see plan_expansion; or no room on the disk.
    """
    directory, have, shape = plan_expansion(config, weights=True)
    weights = checkpoint.Weights(directory)
    output.check_space(shape.weight_bytes(weights.dtype.itemsize), "the expansion")
    with output.directory() as work:
        tensors = _with_progress(Expanded(weights, have, shape, config.seed))
        saving.write_checkpoint(work, config_of(checkpoint.read_config(directory), have, shape), tensors, directory)
        if (directory / HEAD_IDS).is_file():
            (work / HEAD_IDS).write_bytes((directory / HEAD_IDS).read_bytes())
        (work / "README.md").write_text(_card(hub.checkpoint_name(directory), have, shape, output.command_line))
        output.record(work, [directory], params=shape.params())
    return shape


def estimate(config: ExpandConfig) -> dict[str, str]:
    """Return what an expansion needs and gives, for --dry-run; no weight is read.

    Raises:
        UserError: see plan_expansion.
    """
    directory, have, shape = plan_expansion(config, weights=False)
    stored = checkpoint.read_config(directory)
    dtype = checkpoint.DTYPES.get(str(stored.get("dtype") or stored.get("torch_dtype")), torch.float32)
    largest = max(math.prod(shape.dims(axes)) for axes in shape.axes().values())
    start = time.perf_counter()
    torch.empty(TIMED_VALUES, dtype=dtype).uniform_(-1, 1)
    seconds = (time.perf_counter() - start) / TIMED_VALUES * shape.params()
    size = shape.weight_bytes(dtype.itemsize)
    return {
        "source": have.describe(),
        "expansion": shape.describe(),
        "disk": f"{size / 1e9:,.3g} GB in {checkpoint.dtype_name(dtype)}",
        "memory": f"about {(saving.SHARD_BYTES + 3 * largest * dtype.itemsize + 5e8) / 1e9:.1f} GB",
        "time": f"about {seconds:,.0f} s for the values, and writing {size / 1e9:,.3g} GB",
    }


def plan_expansion(config: ExpandConfig, *, weights: bool) -> tuple[Path, Shape, Shape]:
    """Return the source's directory and shape, and the shape of its expansion.

    Raises:
        UserError: the source's norms do not scale plainly, or the shape does not contain it.
    """
    directory = hub.locate(config.source, weights=weights)
    source_config = checkpoint.read_config(directory)
    if (kind := source_config.get("model_type")) not in MODEL_TYPES:
        raise UserError(
            f"{config.source} is a {kind} model; expand takes {', '.join(MODEL_TYPES)}, whose norms scale plainly "
            "(those of others may add one to their weights)"
        )
    have = checkpoint.planned_shape(directory)
    shape = _requested(config, have)
    check_contains(shape, have)
    check(shape, llama=kind == "llama")
    check_buildable(config_of(source_config, have, shape), shape)
    return directory, have, shape


def config_of(config: Mapping[str, object], have: Shape, shape: Shape) -> dict[str, object]:
    """Return config.json of the expansion of a source with this one."""
    layers = [layer % have.layers for layer in range(shape.layers)]
    eps = float(str(config["rms_norm_eps"])) * have.hidden / shape.hidden
    return checkpoint.config_for(shape, dict(config), layers) | {"rms_norm_eps": eps}


def kv_copies(have: Shape, shape: Shape) -> int:
    """Return how often each kv head is there, so that each serves no more of the source's heads than it can."""
    return -(-(have.heads // have.kv_heads) // (shape.heads // shape.kv_heads))


def check_contains(shape: Shape, have: Shape) -> None:
    """Check that a source can be expanded to a shape.

    Raises:
        UserError: an axis is shorter than the source's; head_dim, vocab or an option differs; the kv heads are too few.
    """
    for field, option in SIZES.items():
        size, least = getattr(shape, field), getattr(have, field)
        if size < least:
            raise UserError(f"--{option} {size} is less than the source has; at least --{option} {least}")
    for field in ("head_dim", "vocab", "tied", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "qk_layernorm"):
        size, own = getattr(shape, field), getattr(have, field)
        if size != own and not (field == "tied" and own):  # a tied head can be written out
            raise UserError(f"{field} {size} differs from the source's {own}, and expansion does not change it")
    fewest = have.kv_heads * kv_copies(have, shape)
    if shape.heads % shape.kv_heads == 0 and shape.kv_heads < fewest:
        raise UserError(
            f"{shape.heads} heads on {shape.kv_heads} kv-heads cannot repeat the source's {have.heads} on "
            f"{have.kv_heads}: each of those would be needed {kv_copies(have, shape)} times; at least "
            f"--kv-heads {fewest}, or as many heads per kv-head as the source has"
        )


def _requested(config: ExpandConfig, have: Shape) -> Shape:
    """Return the shape of --shape, or the source's with other sizes and, where not said, its proportions."""
    if config.shape is not None:
        _, place = families.locate_shape(config.shape)
        shape = place if isinstance(place, Shape) else checkpoint.planned_shape(place)
        return shape.model_copy(update={"draft_vocab": have.draft_vocab})
    width = config.width or have.hidden
    natural = max(have.heads, have.heads * width // have.hidden)
    heads = config.heads or next(n for n in range(natural, max(natural, width) + 1) if width % n == 0 or n >= width)
    sizes = {
        "layers": config.layers or have.layers,
        "hidden": width,
        "heads": heads,
        "kv_heads": config.kv_heads or fewest_kv_heads(heads, have.heads // have.kv_heads),
        "ffn": config.ffn or max(have.ffn, round_up(-(-have.ffn * width // have.hidden), config.multiple_of)),
    }
    shape = have.model_copy(update=sizes)
    if config.params is None:
        return shape
    total = parse_count(config.params)
    most = round_up(total // width + 1, config.multiple_of)
    return solve_ffn(shape, total, most=most, multiple_of=config.multiple_of)


def _values(heads: Tensor, head_dim: int) -> Tensor:
    return (heads.unsqueeze(1) * head_dim + torch.arange(head_dim)).flatten()


def _with_progress(tensors: Expanded) -> Iterator[tuple[str, Tensor]]:
    with progress("expand", tensors.shape.layers) as advance:
        for name in tensors:
            advance(checkpoint.layer_of(name) or 0, "layers")
            yield name, tensors[name]


def _card(name: str, have: Shape, shape: Shape, command: str) -> str:
    return f"""---
base_model: {name}
tags: [speculative-decoding, measuring-instrument]
---

# {name}, expanded to {format_count(shape.params())}

**A measuring instrument, not a better model.** It writes what {name} writes, and a pass costs what a pass of
{shape.describe()} costs: speculative decoding with drafts of {name} can be timed at that size.

The {have.describe()} of {name} are in it. Everything that was added reads zeros or writes zeros (function-preserving
expansion: Gesmundo and Maile 2023, arXiv 2308.06103). Weights that are zero or random draw less power than trained ones
on some devices, and drafters that read or skip the target's layers profit from layers that do nothing: do not judge
those with it.

```
{command}
```
"""
