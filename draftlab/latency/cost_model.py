"""What a pass of a model costs, measured or computed from a device's constants, and what that makes of acceptance.

No torch. T(w, B, L): milliseconds of one pass over w new tokens in each of B rows behind L cached ones. K drafted per
step, alpha chance of each to be accepted, c = T_draft(1) / T_target(1), beta = T_target(K + 1) / T_target(1).
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args

import numpy as np
import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from draftlab.errors import UserError, did_you_mean
from draftlab.files import validation_text
from draftlab.model import Mode
from draftlab.model.families import presets, shipped
from draftlab.model.shape import Shape, read_shape_file
from draftlab.results.score import Latency

EXAMPLE = "llama-65b@4xa100-80gb,graphs"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Point(Latency):
    """T(width, batch, context)."""

    batch: PositiveInt
    context: NonNegativeInt


class SteadyPoint(Point):
    """T(1, batch, context) behind so many like passes."""

    after: PositiveInt


class Profile(_File):
    """The curves of one model on one device. n is 0 in what was computed, by constants or by a fitted law."""

    version: Literal[1] = 1
    kind: Literal["measured", "analytic", "fitted"]
    name: str
    sha256: str | None  # of the checkpoint; None: random weights, which cost the same
    shape: Shape | None  # None: transformers ran it, and it is not the engine's
    device: str
    dtype: str
    mode: Mode
    threads: int | None
    forward: list[Point] = Field(min_length=1)  # behind other work, as draft and target take turns; a full grid
    steady: list[
        SteadyPoint
    ]  # one token behind 1, 2, ... like passes, and behind many: other work is forgotten by then
    prefill: list[Latency] = Field(min_length=1)  # by length of the prompt, one row
    host: list[Latency] = Field(min_length=1)  # beside the pass, by tokens judged: sampling, accepting, bookkeeping
    bandwidth_gbs: PositiveFloat  # what could be had at best: measured in the same run, or assumed
    matmul_tflops: dict[str, PositiveFloat]  # by dtype, likewise
    command: str
    versions: dict[str, str]
    created: str

    @model_validator(mode="after")
    def _is_a_grid(self) -> "Profile":
        found = sorted((p.width, p.batch, p.context) for p in self.forward)
        again = sorted((p.after, p.batch, p.context) for p in self.steady)
        for what, grid in (("forward", found), ("steady", again)):
            axes = [sorted(set(column)) for column in zip(*grid, strict=True)]
            if not grid or grid != list(itertools.product(*axes)) or axes[0][0] != 1:
                raise ValueError(f"{what} must hold every combination of batch and context once for 1 and what follows")
        behind = sorted({p.after for p in self.steady})
        if behind[:-1] != list(range(1, len(behind))):
            raise ValueError(f"again is behind {behind} passes; all but the last must be 1, 2, 3 and so on")
        if {at[1:] for at in found} != {at[1:] for at in again} or min(p.width for p in self.host) != 1:
            raise ValueError("again must have the batches and contexts of forward, and host begin at width 1")
        return self

    def describe(self) -> str:
        return f"{self.name} on {self.device}, {self.dtype}, {self.mode}, {self.kind}"


class Host(_File):
    """What the host does to issue a pass, while the device works: the slower of the two counts."""

    pass_ms: NonNegativeFloat
    layer_ms: NonNegativeFloat
    step_ms: NonNegativeFloat  # outside the passes, on top: drawing, accepting


class Device(_File):
    """Constants from which a pass is computed: configs/profiles/*.yaml, with their sources."""

    kind: Literal["analytic"]
    name: str
    count: PositiveInt = 1  # devices that share the weights, by tensor parallelism
    memory_gb: PositiveFloat  # of one
    bandwidth_gbs: PositiveFloat  # of one, as a decoder can have it
    tflops: dict[str, PositiveFloat]  # of one, by dtype of the products
    dtype: str
    layer_ms: NonNegativeFloat  # of the device in every layer, beside reading and computing
    modes: dict[Mode, Host]
    allreduce_us: NonNegativeFloat = 0  # of one; a layer has two
    link_gbs: PositiveFloat = 1  # from one device to the others

    @model_validator(mode="after")
    def _knows_its_dtypes(self) -> "Device":
        if self.dtype not in self.tflops or not set(self.tflops) <= set(BYTES):
            raise ValueError(f"tflops needs {self.dtype}, and knows {', '.join(BYTES)}")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The curves of a profile, linear between its points; outside them a UserError.

    extrapolate: the last two widths, contexts and lengths are continued instead; never the batch.
    """

    profile: Profile
    widths: np.ndarray
    batches: np.ndarray
    contexts: np.ndarray
    grid: np.ndarray  # [W, B, L] ms
    steady: np.ndarray  # [N, B, L] ms, behind 1, ... N - 1 like passes, and behind many
    prefill: tuple[np.ndarray, np.ndarray]  # lengths, ms
    host: tuple[np.ndarray, np.ndarray]  # widths, ms
    extrapolate: bool

    @staticmethod
    def of(profile: Profile, *, extrapolate: bool = False) -> "CostModel":
        axes = [np.unique([getattr(p, name) for p in profile.forward]) for name in ("width", "batch", "context")]
        sizes = [len(axis) for axis in axes[1:]]
        forward = sorted(profile.forward, key=lambda p: (p.width, p.batch, p.context))
        again = sorted(profile.steady, key=lambda p: (p.after, p.batch, p.context))
        return CostModel(
            profile=profile,
            widths=axes[0],
            batches=axes[1],
            contexts=axes[2],
            grid=np.array([p.median_ms for p in forward]).reshape(-1, *sizes),
            steady=np.array([p.median_ms for p in again]).reshape(-1, *sizes),
            prefill=_curve(profile.prefill),
            host=_curve(profile.host),
            extrapolate=extrapolate,
        )

    def forward_ms(self, width: int, batch: int, contexts: np.ndarray) -> np.ndarray:
        """T(width, batch, L) of every L in contexts, behind other work."""
        return self._over(self._along("width", self.widths, self.grid, np.array(width)), batch, contexts)

    def steady_ms(self, batch: int, contexts: np.ndarray) -> np.ndarray:
        """T(1, batch, L) of every L in contexts, where only like passes run: plain decoding."""
        return self._over(self.steady[-1], batch, contexts)

    def warmup_ms(self, batch: int, contexts: np.ndarray) -> np.ndarray:
        """What the first, second, ... pass over one token behind other work takes beyond steady_ms, [N, L]."""
        each = [
            self.forward_ms(1, batch, contexts),
            *(self._over(plane, batch, contexts) for plane in self.steady[:-1]),
        ]
        return np.stack(each) - self.steady_ms(batch, contexts)

    def prefill_ms(self, lengths: np.ndarray) -> np.ndarray:
        """One row's pass over its prompt."""
        return self._along("prompt length", *self.prefill, lengths)

    def host_ms(self, width: int) -> float:
        return float(self._along("host width", *self.host, np.array(width)))

    def beyond(self, axis: Literal["width", "context", "prompt"], low: int, high: int) -> list[str]:
        """That this range was extrapolated, in words, if it was: for the notes of a result."""
        xs = {"width": self.widths, "context": self.contexts, "prompt": self.prefill[0]}[axis]
        if xs[0] <= low and high <= xs[-1]:
            return []
        return [f"{self.profile.name}: {axis} {low} to {high} is extrapolated from {xs[0]} to {xs[-1]}"]

    def _over(self, plane: np.ndarray, batch: int, contexts: np.ndarray) -> np.ndarray:
        at_batch = self._along("batch", self.batches, plane, np.array(batch))
        return self._along("context", self.contexts, at_batch, contexts)

    def _along(self, axis: str, xs: np.ndarray, ys: np.ndarray, at: np.ndarray) -> np.ndarray:
        """ys [N, ...] at places of its first axis, linear between xs [N]: [*at.shape, ...]."""
        outside = at[(at < xs[0]) | (at > xs[-1])]
        if outside.size and (axis == "batch" or not self.extrapolate):
            measured = f"{xs[0]} to {xs[-1]}" if len(xs) > 1 else f"{xs[0]} alone"
            raise UserError(f"{axis} {outside.flat[0]} is outside the profile of {self.profile.name} ({measured})")
        if len(xs) == 1:
            return ys[np.zeros(at.shape, dtype=int)]
        i = np.clip(np.searchsorted(xs, at, "right") - 1, 0, len(xs) - 2)
        part = ((at - xs[i]) / (xs[i + 1] - xs[i])).reshape(at.shape + (1,) * (ys.ndim - 1))
        return ys[i] * (1 - part) + ys[i + 1] * part


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: shape.ffn is the width of one of count, of which each token takes active."""

    count: int
    active: int

    def touched(self, tokens: int) -> float:
        """Experts that at least one of tokens takes, if they choose at random: E (1 - (1 - k / E)^w)."""
        return self.count * (1 - (1 - self.active / self.count) ** tokens)


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens per target pass when each draft token is accepted independently.

    (1 - alpha^(k + 1)) / (1 - alpha), Leviathan et al. 2023, eq. 1. alpha = 1 gives k + 1.
    """
    return float(k + 1) if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def alpha_for(length: float, k: int) -> float:
    """The alpha that expected_tokens turns into length.

    Raises:
        UserError: no alpha from 0 to 1 does.
    """
    if not 1 <= length <= k + 1:
        raise UserError(f"an acceptance length of {length:g} cannot be with K = {k}: it is from 1 to {k + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) < length else (low, middle)
    return (low + high) / 2


def break_even_length(k: int, c: float, beta: float = 1.0, host: float = 0.0) -> float:
    """Tokens per target pass at which drafting neither gains nor loses. host: of a step, in target passes."""
    return k * c + beta + host


def closed_form_speedup(length: float, k: int, c: float, beta: float = 1.0, host: float = 0.0) -> float:
    """length tokens for the price of a step, against one for a target pass: no growing context, no ends of texts."""
    return length / break_even_length(k, c, beta, host)


def analytic(
    shape: Shape,
    device: Device,
    mode: Mode,
    *,
    name: str,
    dtype: str,
    experts: Experts,
    widths: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
) -> Profile:
    """A profile by roofline: a pass reads weights and cache once, and every layer costs a constant besides.

    Raises:
        UserError: weights that the device cannot hold, a mode or dtype that it has no numbers for.
    """
    for what, value, known in (("mode", mode, device.modes), ("dtype", dtype, device.tflops)):
        if value not in known:
            raise UserError(f"{device.name} has no {what} {value!r}; it has {', '.join(known)}")
    weights = active_params(shape, experts.count) + (0 if shape.tied else shape.vocab * shape.hidden)
    cached = max(batches) * (max(contexts) + max(widths)) * shape.kv_bytes_per_token(max(2, BYTES[dtype]))
    need, room = (weights * BYTES[dtype] + cached) / 1e9, device.count * device.memory_gb
    if need > room:
        what = f"{name} in {dtype} with {max(batches)} rows of {max(contexts)} tokens"
        raise UserError(
            f"{what} needs {need:.0f} GB, {cached / 1e9:.0f} of them cache; {device.name} has {room:.0f} GB"
        )

    def pass_ms(width: int, batch: int, context: int) -> float:
        host = device.modes[mode]
        issuing = host.pass_ms + host.layer_ms * shape.layers
        return max(issuing, _device_ms(shape, device, dtype, experts, width, batch, context))

    def computed(width: int, ms: float) -> Latency:
        return Latency(width=width, median_ms=ms, low_ms=ms, high_ms=ms, n=0)

    forward = [
        Point(**computed(w, pass_ms(w, b, c)).model_dump(), batch=b, context=c)
        for w, b, c in itertools.product(widths, batches, contexts)
    ]
    return Profile(
        kind="analytic",
        name=name,
        sha256=None,
        shape=shape,
        device=device.name,
        dtype=dtype,
        mode=mode,
        threads=None,
        forward=forward,
        steady=[SteadyPoint(**point.model_dump(), after=1) for point in forward if point.width == 1],
        prefill=[computed(c, pass_ms(c, 1, 0)) for c in contexts if c > 0],
        host=[computed(w, device.modes[mode].step_ms) for w in widths],
        bandwidth_gbs=device.bandwidth_gbs * device.count,
        matmul_tflops={dtype: device.tflops[dtype] * device.count},
        command="",
        versions={},
        created="",
    )


def active_params(shape: Shape, experts: float = 1) -> float:
    """Weights that a pass reads: not the embedding, unless it is the head too; of the MLPs as many as are touched."""
    matrices = shape.params() - (0 if shape.tied else shape.vocab * shape.hidden)
    return matrices + (experts - 1) * 3 * shape.hidden * shape.ffn * shape.layers


def read_profile(path: Path) -> Profile:
    """A profile file, from its path or the directory that holds it alone.

    Raises:
        UserError: no such file, several, or not a profile.
    """
    files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "draftlab profile writes one"
        raise UserError(f"{path} holds {len(files)} profiles, name one: {names}")
    return _read(files[0], Profile)


def write_profile(profile: Profile, path: Path) -> None:
    path.write_text(yaml.safe_dump(profile.model_dump(), sort_keys=False, default_flow_style=None, width=120))


def parse_profile(spec: str, *, widths: Sequence[int], batches: Sequence[int], longest: int) -> Profile:
    """A file that ``draftlab profile`` wrote; or ``SHAPE@DEVICE,mode[,dtype][,experts=8/2]``, to compute one.

    SHAPE and DEVICE are paths, or names of files that come with draftlab. What is computed has these widths and
    batches, and contexts up to longest.

    Raises:
        UserError: neither; says what is missing.
    """
    name, at, rest = spec.partition("@")
    if Path(spec).exists():
        return read_profile(Path(spec))
    if not at:
        raise UserError(f"no profile at {spec}; draftlab profile writes one, or compute it: {EXAMPLE}")
    place, *words = rest.split(",")
    shape = _named(name, presets(shipped("widths")), read_shape_file)
    device = _named(place, devices(), read_device)
    modes = [mode for mode in get_args(Mode) if mode in words]
    dtypes = [word for word in words if word in BYTES]
    sparse = [word for word in words if re.fullmatch(r"experts=[1-9]\d*/[1-9]\d*", word)]
    if len(modes) != 1 or len(dtypes) > 1 or len(modes + dtypes + sparse) < len(words):
        raise UserError(
            f"{spec}: behind the device comes its mode ({', '.join(device.modes)}), then what differs from "
            f"{device.dtype} and no experts; as in {EXAMPLE}"
        )
    count, active = sparse[0].removeprefix("experts=").split("/") if sparse else (1, 1)
    return analytic(
        shape,
        device,
        modes[0],
        name=Path(name).name.removesuffix(".yaml"),
        dtype=dtypes[0] if dtypes else device.dtype,
        experts=Experts(count=int(count), active=int(active)),
        widths=widths,
        batches=batches,
        contexts=sorted({0, 1, *range(0, longest, -(-longest // 16)), longest}),
    )


def read_device(path: Path) -> Device:
    """Constants of a device.

    Raises:
        UserError: no such file, or not a device.
    """
    return _read(path, Device)


def devices() -> dict[str, Device]:
    """Those that come with draftlab, by name."""
    return {path.stem: read_device(path) for path in sorted(shipped("profiles").glob("*.yaml"))}


def _device_ms(
    shape: Shape, device: Device, dtype: str, experts: Experts, width: int, batch: int, context: int
) -> float:
    """The slower of reading and computing, for weights and for attention; then what every layer costs besides."""
    tokens, count = width * batch, device.count
    read_per_ms, done_per_ms = device.bandwidth_gbs * 1e6 * count, device.tflops[dtype] * 1e9 * count
    weights = active_params(shape, experts.touched(tokens)) * BYTES[dtype]
    products = 2 * tokens * active_params(shape, experts.active)
    cached = batch * (context + width) * shape.kv_bytes_per_token(max(2, BYTES[dtype]))
    attention = 4 * tokens * (context + width) * shape.layers * shape.sizes["q"]
    parts = ((weights, products), (cached, attention))
    busy = sum(max(read / read_per_ms, done / done_per_ms) for read, done in parts) + device.layer_ms * shape.layers
    if count == 1:
        return busy
    sent = 2 * (count - 1) / count * tokens * shape.hidden * 2  # bytes per all-reduce and device, of 16-bit activations
    return busy + 2 * shape.layers * (device.allreduce_us * 1e-3 + sent / (device.link_gbs * 1e6))


Read = TypeVar("Read", bound=_File)
Named = TypeVar("Named", Shape, Device)


def _read(path: Path, kind: type[Read]) -> Read:
    what = kind.__name__.lower()
    try:
        return kind.model_validate(yaml.safe_load(path.read_bytes()))
    except OSError as error:
        raise UserError(f"{what} {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{what} {path}: not YAML: {' '.join(str(error).split())[:200]}") from None
    except ValidationError as error:
        raise UserError(f"{path} is not a {what}: {validation_text(error)[:200]}") from None


def _named(name: str, shipped_ones: dict[str, Named], read: Callable[[Path], Named]) -> Named:
    if name in shipped_ones:
        return shipped_ones[name]
    if Path(name).suffix not in (".yaml", ".yml"):  # names have dots too
        raise UserError(f"nothing named {name!r} comes with draftlab{did_you_mean(name, shipped_ones)}")
    return read(Path(name))


def _curve(latencies: list[Latency]) -> tuple[np.ndarray, np.ndarray]:
    ordered = sorted(latencies, key=lambda item: item.width)
    return np.array([item.width for item in ordered]), np.array([item.median_ms for item in ordered])
