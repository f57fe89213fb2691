"""The latency of forward passes, measured or computed from a device's constants, and speed-up in closed form.

T(w, B, L) is the milliseconds of a pass over w new tokens in each of B rows (texts of a batch) after L cached tokens. K
drafted tokens per step; alpha acceptance probability of each drafted token; c = T_draft(1) / T_target(1); beta =
T_target(K + 1) / T_target(1). Torch is not imported.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from scipy.optimize import root_scalar

from draftlab.errors import UserError
from draftlab.model import Mode
from draftlab.model.shape import Shape
from draftlab.reading import FileModel, read_model
from draftlab.results.score import Latency, Milliseconds

# int4: 4 bits, plus a 16-bit scale and a 4-bit zero point per 128 weights, as in AWQ and GPTQ
BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "int8": 1,
    "int4": (4 + 20 / 128) / 8,
}

# axis of a profile -> its plural in notes
AXES = {"width": "numbers of tokens", "context": "contexts", "prompt": "prompt lengths"}


class Point(Latency):
    """The latency of a pass over `width` tokens in each of `batch` rows after `context` cached tokens."""

    median_ms: Annotated[Milliseconds, Field(ge=1e-9)]
    batch: PositiveInt
    context: NonNegativeInt


class SteadyPoint(Point):
    """The latency of a one-token pass that follows `after` consecutive passes of the same model."""

    after: PositiveInt


def exact(ms: float, n: int = 0) -> dict[str, Any]:
    """Return the fields of a Latency without a spread. n: Number of measurements, or 0 for a computed time."""
    return {"median_ms": ms, "low_ms": ms, "high_ms": ms, "n": n}


class Profile(FileModel):
    """The latency curves of one model on one device. Computed latencies have n = 0.

    Args:
        sha256: Hash of the checkpoint. None for random weights, whose passes take the same time.
        shape: None for a head, and for an architecture that draftlab's engine does not run.
        drafter: Kind of drafter with these passes, as --drafter names it; "model" also for a target. The passes of a
            head in `forward` read the target's hidden states; its passes in `steady` read its own states.
        forward: Passes right after another model's pass, as in speculative decoding, at all points of a grid.
        steady: One-token passes after 1, 2, ... passes of the same model, and after many passes, as in plain decoding.
        prefill: Passes over the prompt of one text, by prompt length.
        host: Time of a step outside the passes, by the number of tokens that the step verifies.
        bandwidth_gbs: Highest memory bandwidth, measured in the same run or assumed.
        matmul_tflops: Highest speed of matrix products by dtype, measured or assumed.
    """

    version: Literal[2] = 2
    kind: Literal["measured", "analytic", "fitted"]
    name: str
    sha256: str | None = None
    shape: Shape | None = None
    drafter: str = "model"
    device: str
    dtype: str
    mode: Mode
    threads: int | None = None
    forward: list[Point] = Field(min_length=1)
    steady: list[SteadyPoint]
    prefill: list[Latency] = Field(min_length=1)
    host: list[Latency] = Field(min_length=1)
    bandwidth_gbs: PositiveFloat | None = None
    matmul_tflops: dict[str, PositiveFloat] = Field(default_factory=dict)
    command: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    created: str = ""

    @model_validator(mode="after")
    def _is_a_grid(self) -> "Profile":
        forward = sorted((p.width, p.batch, p.context) for p in self.forward)
        steady = sorted((p.after, p.batch, p.context) for p in self.steady)
        for name, grid in (("forward", forward), ("steady", steady)):
            axes = [sorted(set(column)) for column in zip(*grid, strict=True)]
            if grid != list(itertools.product(*axes)) or axes[0][0] != 1:
                raise ValueError(
                    f"{name} must be a complete grid: each combination of width, batch and context exactly once, from "
                    "width 1 on (in steady: after instead of width)"
                )
        if {at[1:] for at in forward} != {at[1:] for at in steady}:
            raise ValueError("steady must have the same batches and contexts as forward")
        return self

    def describe(self) -> str:
        return f"{self.name} on {self.device}, {self.dtype}, {self.mode}, {self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The latency curves of a profile, interpolated linearly between the points of the profile.

    The methods raise UserError for values outside the profile.

    Args:
        grid: Milliseconds of Profile.forward by width, batch and context, [W, B, L].
        steady: Milliseconds of Profile.steady by number of passes before, batch and context, [N, B, L].
        prefill: Prompt lengths, and the milliseconds for each length.
        host: Widths, and the milliseconds for each width.
        extrapolate: Whether to extrapolate widths, contexts and prompt lengths linearly, as a + b x with neither a nor
            b below 0. Batches are never extrapolated.
    """

    profile: Profile
    widths: np.ndarray
    batches: np.ndarray
    contexts: np.ndarray
    grid: np.ndarray
    steady: np.ndarray
    prefill: tuple[np.ndarray, np.ndarray]
    host: tuple[np.ndarray, np.ndarray]
    extrapolate: bool

    @staticmethod
    def of(profile: Profile, *, extrapolate: bool = False) -> "CostModel":
        points = ((p.width, p.batch, p.context) for p in profile.forward)
        axes = [np.unique(column) for column in zip(*points, strict=True)]
        sizes = [len(axis) for axis in axes[1:]]
        forward = sorted(profile.forward, key=lambda p: (p.width, p.batch, p.context))
        steady = sorted(profile.steady, key=lambda p: (p.after, p.batch, p.context))
        return CostModel(
            profile=profile,
            widths=axes[0],
            batches=axes[1],
            contexts=axes[2],
            grid=np.array([p.median_ms for p in forward]).reshape(-1, *sizes),
            steady=np.array([p.median_ms for p in steady]).reshape(-1, *sizes),
            prefill=_curve(profile.prefill),
            host=_curve(profile.host),
            extrapolate=extrapolate,
        )

    def forward_ms(self, width: int, batch: int, contexts: np.ndarray) -> np.ndarray:
        """Return the milliseconds of a pass right after another model's pass, for every context.

        Each of `batch` rows has `width` new tokens.
        """
        return self._over(
            self._along("number of tokens", self.widths, self.grid, np.array(width)),
            batch,
            contexts,
        )

    def steady_ms(self, batch: int, contexts: np.ndarray) -> np.ndarray:
        """Return the milliseconds of a one-token pass after many passes of this model, for every context.

        Plain decoding has such passes.
        """
        return self._over(self.steady[-1], batch, contexts)

    def warmup_ms(self, batch: int, contexts: np.ndarray) -> np.ndarray:
        """Return by how many milliseconds the first one-token passes after another model's pass exceed steady_ms.

        The result is [N, L] for the first N passes and L contexts.
        """
        each = [
            self.forward_ms(1, batch, contexts),
            *(self._over(plane, batch, contexts) for plane in self.steady[:-1]),
        ]
        return np.stack(each) - self.steady_ms(batch, contexts)

    def prefill_ms(self, lengths: np.ndarray) -> np.ndarray:
        """Return the milliseconds of a pass over the prompt of one text, for every prompt length."""
        return self._along("prompt length", *self.prefill, lengths)

    def host_ms(self, width: int) -> float:
        return float(self._along("number of tokens", *self.host, np.array(width)))

    def beyond(self, axis: Literal["width", "context", "prompt"], low: int, high: int) -> list[str]:
        """Return a list with one note if part of the range from low to high is extrapolated. Otherwise return []."""
        xs = {"width": self.widths, "context": self.contexts, "prompt": self.prefill[0]}[axis]
        if xs[0] <= low and high <= xs[-1]:
            return []
        return [
            f"{self.profile.name}: times at {AXES[axis]} {low} to {high} are extrapolated from the measured {xs[0]} "
            f"to {xs[-1]}"
        ]

    def _over(self, plane: np.ndarray, batch: int, contexts: np.ndarray) -> np.ndarray:
        at_batch = self._along("batch", self.batches, plane, np.array(batch))
        return self._along("context", self.contexts, at_batch, contexts)

    def _along(self, axis: str, xs: np.ndarray, ys: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Interpolate ys [N, ...] along the first axis, from coordinates xs [N] to `at`; return [*at.shape, ...]."""
        beyond = (at < xs[0]) | (at > xs[-1])
        outside = at[beyond]
        if outside.size and (axis == "batch" or not self.extrapolate):
            measured = f"{xs[0]} to {xs[-1]}" if len(xs) > 1 else f"{xs[0]} alone"
            raise UserError(
                f"{axis} {outside.flat[0]} is outside the profile of {self.profile.name} ({measured}); profile it "
                f"over a wider range (--k, --batch, --context){'' if axis == 'batch' else ', or use --extrapolate'}"
            )
        if len(xs) == 1:
            return ys[np.zeros(at.shape, dtype=int)]
        i = np.clip(np.searchsorted(xs, at, "right") - 1, 0, len(xs) - 2)
        part = ((at - xs[i]) / (xs[i + 1] - xs[i])).reshape(at.shape + (1,) * (ys.ndim - 1))
        result = ys[i] * (1 - part) + ys[i + 1] * part
        if not outside.size:
            return result
        # Beyond the points, a time is a + b x with neither a nor b below 0: more tokens never take less time, and the
        # time never grows faster than their number. Noise in two close points could otherwise extrapolate below 0.
        end = np.where(at < xs[0], 0, len(xs) - 1)
        ratio = (at / np.maximum(xs[end], 1e-9)).reshape(at.shape + (1,) * (ys.ndim - 1))
        bounds = np.sort(np.stack([ys[end], ys[end] * ratio]), axis=0)
        return np.where(beyond.reshape(ratio.shape), result.clip(*bounds), result)


def expected_tokens(alpha: float, k: int) -> float:
    """Return the tokens per target pass when each drafted token is accepted independently with probability alpha.

    (1 - alpha^(k + 1)) / (1 - alpha), Leviathan et al. 2023, eq. 1. alpha = 1 gives k + 1.
    """
    return float(k + 1) if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def alpha_for(length: float, k: int) -> float:
    """Return the acceptance probability at which a target pass gives `length` tokens on average.

    This is the inverse of expected_tokens.

    Raises:
        UserError: There is no such probability.
    """
    if not 1 <= length <= k + 1:
        raise UserError(f"acceptance length {length:g} is impossible at K = {k}; it must be between 1 and {k + 1}")
    return float(root_scalar(lambda alpha: expected_tokens(alpha, k) - length, bracket=(0.0, 1.0), xtol=1e-15).root)


def break_even_length(k: int, c: float, beta: float = 1.0, host: float = 0.0) -> float:
    """Return the tokens per target pass at which drafting neither gains nor loses time.

    Args:
        c: Time of a draft pass divided by T, the time of a one-token target pass.
        beta: Time of a target pass over k + 1 tokens, divided by T.
        host: Time of a step on the host, divided by T.
    """
    return k * c + beta + host


def closed_form_speedup(length: float, k: int, c: float, beta: float = 1.0, host: float = 0.0) -> float:
    """Return the speed-up if each step gives `length` tokens on average, for a constant context and endless texts.

    c, beta, host: Same as in break_even_length.
    """
    return length / break_even_length(k, c, beta, host)


def active_params(shape: Shape) -> int:
    """Return the number of parameters that a pass reads. An embedding is counted only if it is tied to the LM head."""
    looked_up = 0 if shape.tied else shape.vocab * shape.hidden
    return shape.params() - looked_up - shape.idle_head_params()


def pass_bytes(shape: Shape, dtype: str) -> float:
    """Return the bytes of weights that a pass reads. The LM head of an int4 model has 16 bits per weight."""
    head = shape.vocab * shape.hidden - shape.idle_head_params() if dtype == "int4" else 0
    return (active_params(shape) - head) * BYTES[dtype] + 2 * head


def read_profile(path: Path) -> Profile:
    """Read a profile. path: The file, or a directory with a single profile.

    Raises:
        UserError: The directory has no profile or more than one, or the file is not a profile.
    """
    files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "draftlab profile writes them"
        raise UserError(f"{path} has {len(files)} profiles ({names}); give the path of a single profile")
    return read_model(Profile, files[0])


def write_profile(profile: Profile, path: Path) -> None:
    path.write_text(
        yaml.safe_dump(profile.model_dump(), sort_keys=False, default_flow_style=None, width=120),
        encoding="utf-8",
    )


def _curve(latencies: list[Latency]) -> tuple[np.ndarray, np.ndarray]:
    ordered = sorted(latencies, key=lambda item: item.width)
    return np.array([item.width for item in ordered]), np.array([item.median_ms for item in ordered])
