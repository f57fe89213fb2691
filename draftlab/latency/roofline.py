"""Latency profiles computed from a device's constants by the roofline model. Torch is not imported.

On the device, a pass takes the time to read weights and KV cache, or the time to compute if that is longer. A constant
time per layer is added. If the host takes longer to launch the pass, the pass takes the host's time instead.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from draftlab import shipped
from draftlab.errors import UserError, about
from draftlab.latency.cost_model import (
    BYTES,
    Point,
    Profile,
    SteadyPoint,
    active_params,
    exact,
    pass_bytes,
    read_profile,
)
from draftlab.model import Mode
from draftlab.model.shape import Shape, check
from draftlab.reading import FileModel, read_model, read_yaml, reading
from draftlab.results.score import Latency

EXAMPLE = "llama-65b@4xa100-80gb,graphs"


class HostTimes(FileModel):
    """The host's times to launch a pass and to finish a step. The slower of host and device limits a pass."""

    pass_ms: NonNegativeFloat
    layer_ms: NonNegativeFloat
    step_ms: NonNegativeFloat  # sampling and verification, in addition to the passes


class Device(FileModel):
    """The constants of a device. Examples, with their sources, are in configs/profiles."""

    kind: Literal["analytic"]
    name: str
    count: PositiveInt = 1  # devices that share the weights by tensor parallelism
    memory_gb: PositiveFloat  # per device
    bandwidth_gbs: PositiveFloat  # per device, as a decoder reaches it
    tflops: dict[str, PositiveFloat]  # per device, by the dtype of the matrix products
    dtype: str
    layer_ms: NonNegativeFloat  # time per layer on the device, in addition to reading and computing
    modes: dict[Mode, HostTimes]
    allreduce_us: NonNegativeFloat = 0  # per all-reduce; a layer has two
    link_gbs: PositiveFloat = 1  # bandwidth from a device to each other device

    @model_validator(mode="after")
    def _knows_its_dtypes(self) -> "Device":
        if self.dtype not in self.tflops or not set(self.tflops) <= set(BYTES):
            raise ValueError(f"tflops needs an entry for {self.dtype}; its keys may be only {', '.join(BYTES)}")
        return self


class MLPs(FileModel):
    """The MLPs of a decoder. With several experts, the ffn of the decoder's shape is the width of one expert.

    Args:
        matrices: Number of matrices in an MLP: up, down and, if there are three, a gate.
        experts, active: Number of experts in a layer, and number of experts that a token uses.
        shared_ffn: Width of the shared expert, which every token also uses. 0: there is no shared expert.
        dense_layers, dense_ffn: The first dense_layers layers have one MLP of width dense_ffn instead of experts.
        curve: Measured pairs of a number of tokens in a pass, and the number of distinct experts in a layer that these
            tokens use. Without a curve, tokens are assumed to choose experts at random.
    """

    matrices: Literal[2, 3] = 3
    experts: PositiveInt = 1
    active: PositiveInt = 1
    shared_ffn: NonNegativeInt = 0
    dense_layers: NonNegativeInt = 0
    dense_ffn: NonNegativeInt = 0
    curve: tuple[tuple[PositiveInt, PositiveFloat], ...] = ()

    @model_validator(mode="after")
    def _counts_fit(self) -> "MLPs":
        tokens = [point[0] for point in self.curve]
        used = [point[1] for point in self.curve]
        grows = tokens == sorted(set(tokens)) and used == sorted(used)
        if max([self.active, *used]) > self.experts or not grows:
            raise ValueError(
                "the numbers of experts in curve must grow with the numbers of tokens, and be at most experts "
                f"({self.experts}), as active must"
            )
        if self.dense_layers and not self.dense_ffn:
            raise ValueError(f"dense_layers is {self.dense_layers}, but dense_ffn is missing")
        return self

    def expected_active(self, tokens: int) -> float:
        """Return the expected number of distinct experts that the tokens of a pass use in a layer.

        The curve gives the number. Without a curve it is E (1 - (1 - k / E)^w) if each of w tokens uses k of E experts.
        """
        if self.curve:
            widths, used = zip(*self.curve, strict=True)
            return float(np.interp(tokens, (0, *widths), (0, *used)))
        return self.experts * (1 - (1 - self.active / self.experts) ** tokens)

    def weights(self, shape: Shape, experts: float) -> float:
        """Return the number of weights in all MLPs of a model. experts: Number of experts to count per layer."""
        sparse = (shape.layers - self.dense_layers) * (experts * shape.ffn + self.shared_ffn)
        return self.matrices * shape.hidden * (sparse + self.dense_layers * self.dense_ffn)


LLAMAS = MLPs()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes that decide the latency of a decoder: its shape, and the sizes of its MLPs."""

    shape: Shape
    mlps: MLPs = LLAMAS

    def params(self, experts: float | None = None) -> float:
        """Return the number of weights that a pass uses. experts: Number of experts used in a layer; None: all."""
        gated = 3 * self.shape.hidden * self.shape.ffn * self.shape.layers
        used = self.mlps.experts if experts is None else experts
        return active_params(self.shape) - gated + self.mlps.weights(self.shape, used)


@reading("the constants of the device give no profile")
def roofline_profile(
    sizes: ModelSizes,
    device: Device,
    mode: Mode,
    *,
    name: str,
    dtype: str,
    widths: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
    states: int = 0,
) -> Profile:
    """Compute a profile by the roofline model. A pass reads weights and cache once, and takes extra time per layer.

    Args:
        sizes: For an EAGLE-3 head, the shape of its single layer, with the number of ids that the head can draft as
            draft_vocab.
        states: Width of the target's states that fc of an EAGLE-3 head reads at a position. 0: the model is no head.

    Raises:
        UserError: The weights do not fit the device, or a constant of the device is far too large or too small.
    """
    shape = sizes.shape
    embedding = 0 if shape.tied else shape.vocab * shape.hidden * (2 if dtype == "int4" else BYTES[dtype])
    cached = max(batches) * (max(contexts) + max(widths)) * shape.kv_bytes_per_token(max(2, BYTES[dtype]))
    stored = _read_bytes(sizes, dtype, sizes.mlps.experts) + embedding + cached
    room = device.count * device.memory_gb
    if stored / 1e9 > room:
        raise UserError(
            f"{name} in {dtype} with {max(batches)} texts of {max(contexts)} tokens needs {stored / 1e9:.0f} GB "
            f"({cached / 1e9:.0f} GB of it for the KV cache), but {device.name} has {room:.0f} GB; lower --batch, or "
            "name a smaller dtype or a larger device"
        )

    # a head's q, k and v read the embedding as well
    own = shape.hidden * (shape.sizes["q"] + 2 * shape.sizes["kv"]) if states else 0
    fc = shape.hidden * states
    host = device.modes[mode]
    issuing = host.pass_ms + host.layer_ms * shape.layers

    def pass_ms(width: int, batch: int, context: int, more: int) -> float:
        return max(issuing, _device_ms(sizes, device, dtype, width, batch, context, more))

    return Profile(
        kind="analytic",
        name=name,
        shape=None if states or sizes.mlps != LLAMAS else shape,
        drafter="eagle" if states else "model",
        device=device.name,
        dtype=dtype,
        mode=mode,
        forward=[
            Point(width=w, batch=b, context=c, **exact(pass_ms(w, b, c, own + fc)))
            for w, b, c in itertools.product(widths, batches, contexts)
        ],
        steady=[
            SteadyPoint(width=1, batch=b, context=c, after=1, **exact(pass_ms(1, b, c, own)))
            for b, c in itertools.product(batches, contexts)
        ],
        prefill=[Latency(width=c, **exact(pass_ms(c, 1, 0, own + fc))) for c in contexts if c > 0],
        host=[Latency(width=w, **exact(host.step_ms)) for w in widths],
        bandwidth_gbs=device.bandwidth_gbs * device.count,
        matmul_tflops={dtype: device.tflops[dtype] * device.count},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model whose passes are to be computed, with the name of its profile. sizes, states: As in roofline_profile."""

    name: str
    sizes: ModelSizes
    states: int = 0

    def eagle_head(self, ids: int) -> "NamedModel":
        """Return an EAGLE-3 head for this target, with one layer like the target's, that drafts this number of ids.

        Raises:
            UserError: This model is a head itself, or has fewer ids.
        """
        shape = self.sizes.shape
        if self.states:
            raise UserError(f"{self.name} is an EAGLE-3 head already; leave eagle={ids} out")
        if ids > shape.vocab:
            raise UserError(f"eagle={ids} is more than the target's {shape.vocab:,} token ids; use at most this number")
        ffn = self.sizes.mlps.dense_ffn or shape.ffn
        layer = shape.model_copy(update={"layers": 1, "tied": False, "draft_vocab": ids, "ffn": ffn})
        return NamedModel(name=f"eagle-{self.name}", sizes=ModelSizes(shape=layer), states=3 * shape.hidden)


def shipped_model(name: str) -> NamedModel:
    """Return the model of a shape file. name: The file's path, or the name of a file that comes with draftlab.

    Raises:
        UserError: There is no such file, or it is no shape file.
    """
    return NamedModel(
        name=Path(name).name.removesuffix(".yaml"),
        sizes=read_sizes(shipped.locate(name, "widths", "targets")),
    )


def parse_profile(
    spec: str,
    *,
    widths: Sequence[int],
    batches: Sequence[int],
    longest: int,
    find: Callable[[str], NamedModel] = shipped_model,
) -> Profile:
    """Read a profile from the path `spec`, or compute one from ``MODEL@DEVICE,MODE[,DTYPE][,eagle=IDS]``.

    DEVICE is a path, or the name of a file that comes with draftlab. With ``eagle=32000``, the profile is for an
    EAGLE-3 head that drafts 32,000 ids, and MODEL is the target. A computed profile has these widths and batches, and
    contexts up to `longest`.

    find: Function that returns the model called MODEL.

    Raises:
        UserError: spec is neither the path of a profile nor text of this form, or there is no such model or device.
    """
    path = Path(spec)
    if (path / "config.json").is_file():
        raise UserError(f"{spec} is a checkpoint, not a profile; add a device and a mode, as in {spec}@h100,graphs")
    if path.exists():
        return read_profile(path)
    name, at, rest = spec.rpartition("@")
    if not at:
        raise UserError(
            f"there is no profile at {spec}; measure a profile with draftlab profile, or name a model and a device to "
            f"compute a profile, as in {EXAMPLE}"
        )
    place, *words = rest.split(",")
    device = read_model(Device, shipped.locate(place, "profiles"))
    modes: list[Mode] = [mode for mode in device.modes if mode in words]
    dtypes = [dtype for dtype in device.tflops if dtype in words]
    heads = [word for word in words if re.fullmatch(r"eagle=[1-9]\d*", word)]
    chosen = modes + dtypes + heads
    if len(modes) != 1 or len(dtypes) > 1 or len(heads) > 1 or len(chosen) < len(words):
        raise UserError(
            f"{spec}: write MODEL@DEVICE,MODE[,DTYPE][,eagle=IDS], as in {EXAMPLE}. {device.name} has constants for "
            f"the modes {', '.join(device.modes)} and the dtypes {', '.join(device.tflops)}"
        )
    with about(spec):
        model = find(name)
        if heads:
            model = model.eagle_head(int(heads[0].removeprefix("eagle=")))
    return roofline_profile(
        model.sizes,
        device,
        modes[0],
        name=model.name,
        dtype=dtypes[0] if dtypes else device.dtype,
        widths=widths,
        batches=batches,
        contexts=sorted({0, 1, *range(0, longest, -(-longest // 16)), longest}),
        states=model.states,
    )


def read_sizes(path: Path) -> ModelSizes:
    """Read a shape file. If the model's MLPs differ from LLaMA's, the file describes them under ``mlps``.

    Raises:
        UserError: There is no such file, or it has unknown, missing or contradicting fields.
    """
    with reading(f"shape file {path}"):
        fields = read_yaml(path, f"shape file {path}")
        mlps = MLPs.model_validate(fields.pop("mlps", {}))
        sizes = ModelSizes(shape=Shape.model_validate(fields), mlps=mlps)
    with about(f"shape file {path}"):
        check(sizes.shape, llama=False)
    if mlps.dense_layers > sizes.shape.layers:
        raise UserError(
            f"shape file {path}: dense_layers is {mlps.dense_layers}, but the model has only {sizes.shape.layers} "
            "layers"
        )
    return sizes


def _read_bytes(sizes: ModelSizes, dtype: str, experts: float) -> float:
    """Return the bytes of weights that a pass reads. experts: Number of experts that it reads in each layer."""
    beyond = sizes.params(experts) - active_params(sizes.shape)
    return pass_bytes(sizes.shape, dtype) + beyond * BYTES[dtype]


def _device_ms(sizes: ModelSizes, device: Device, dtype: str, width: int, batch: int, context: int, more: int) -> float:
    """Return a pass's milliseconds on the device: the longer of reading and computing, plus a constant per layer.

    Weights and attention are compared separately. With several devices, the time of all-reduces is added.

    more: Number of weights that the pass reads in addition to the weights of the shape.
    """
    shape = sizes.shape
    tokens = width * batch
    count = device.count
    bytes_per_ms = device.bandwidth_gbs * 1e6 * count
    flops_per_ms = device.tflops[dtype] * 1e9 * count
    weights = _read_bytes(sizes, dtype, sizes.mlps.expected_active(tokens)) + more * BYTES[dtype]
    products = 2 * tokens * (sizes.params(sizes.mlps.active) + more)
    cached = batch * (context + width) * shape.kv_bytes_per_token(max(2, BYTES[dtype]))
    attention = 4 * tokens * (context + width) * shape.layers * shape.sizes["q"]
    parts = ((weights, products), (cached, attention))
    busy = sum(max(size / bytes_per_ms, flops / flops_per_ms) for size, flops in parts) + device.layer_ms * shape.layers
    if count == 1:
        return busy
    # bytes per all-reduce and device, with 16-bit activations
    sent_bytes = 2 * (count - 1) / count * tokens * shape.hidden * 2
    return busy + 2 * shape.layers * (device.allreduce_us * 1e-3 + sent_bytes / (device.link_gbs * 1e6))
