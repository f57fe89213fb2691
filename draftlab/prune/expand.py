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
from draftlab.model import checkpoint, hub, saving
from draftlab.model.head_ids import HEAD_IDS
from draftlab.model.shape import Axis, Shape, format_count
from draftlab.output import Output
from draftlab.prune.cut import TensorView, Untied
from draftlab.prune.expanded_shape import expansion, kv_copies
from draftlab.prune.trial_model import check_buildable

WRITES = ("embed_tokens", "o_proj", "down_proj")  # into the residual stream: zero but for the source's own values
TIMED_VALUES = 1 << 22


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
        UserError: see expansion; or transformers does not build it.
    """
    directory, have, shape = expansion(config, weights=weights)
    check_buildable(config_of(checkpoint.read_config(directory), have, shape), shape)
    return directory, have, shape


def config_of(config: Mapping[str, object], have: Shape, shape: Shape) -> dict[str, object]:
    """Return config.json of the expansion of a source with this one."""
    layers = [layer % have.layers for layer in range(shape.layers)]
    eps = float(str(config["rms_norm_eps"])) * have.hidden / shape.hidden
    return checkpoint.config_for(shape, dict(config), layers) | {"rms_norm_eps": eps}


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
