"""A latency law: the latency of any shape on one device, fitted to profiles of a few shapes.

A pass of a shape takes (issue^p + work^p)^(1/p) milliseconds. The host needs the time issue = a + b layers to launch
the pass. The device needs the time work = c bytes + d layers x width. Its first term is the time to read the weights,
its second term is for everything else. With p = 1, issue and work run one after the other. With a large p they overlap,
so that the slower of the two determines the time. The constants a to d are positive. `draftlab design` uses the law to
find shapes with equal latency. Torch is not imported.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from draftlab.errors import UserError, about
from draftlab.latency.cost_model import BYTES, Profile, active_params, exact, read_profile
from draftlab.model.families import Budget, family, shape_name
from draftlab.model.shape import Shape, fewest_kv_heads, resolve, write_shape_file
from draftlab.quantities import format_number
from draftlab.reading import reading
from draftlab.results.score import Latency

OVERLAPS = (1.0, 1.5, 2.0, 3.0, 6.0)
MIN_PROFILES = 6  # one more than the number of fitted parameters, a, b, c, d and p
TERMS = 4  # a, b, c, d
PARTS = ("forward", "steady", "prefill", "host")
MEASURED = {"median_ms", "low_ms", "high_ms", "n"}


@dataclass(frozen=True, slots=True)
class FittedCurve:
    """The latency of one kind of pass as a function of the shape.

    terms: The constants of the latency law: a (ms), b (ms per layer), c (ms per byte) and d (ms per layer x width).
    overlap: The exponent p of the law.
    """

    terms: np.ndarray
    bytes_per_weight: int
    overlap: float
    rms_error: float  # root mean square of log(fitted / measured)

    def ms(self, shape: Shape) -> float:
        features = _features([shape], self.bytes_per_weight)
        return float(_latency(features, self.terms, self.overlap)[0])

    def parts(self, shape: Shape) -> tuple[float, float]:
        """Return the milliseconds that the host and the device would need if their work did not overlap."""
        a, b, c, d = _features([shape], self.bytes_per_weight)[0] * self.terms
        return float(a + b), float(c + d)


@dataclass(frozen=True, kw_only=True)
class ScalingLaw:
    """Profiles of several shapes, with the same device, dtype, mode and grid, and the latency law fitted to them."""

    profiles: list[Profile]

    @property
    def bytes_per_weight(self) -> int:
        return BYTES[self.profiles[0].dtype]

    @property
    def context(self) -> int:
        """Return the number of cached tokens of the pass that ms() predicts: the median of the measured contexts."""
        contexts = sorted({p.context for p in self.profiles[0].forward})
        return contexts[len(contexts) // 2]

    @cached_property
    def shapes(self) -> list[Shape]:
        return [p.shape for p in self.profiles if p.shape is not None]

    @cached_property
    def measured_ms(self) -> np.ndarray:
        """Return, for each profile, the milliseconds of a one-token pass after another model's pass.

        The pass has the smallest batch size of the profiles, and `context` cached tokens.
        """
        batch = min(p.batch for p in self.profiles[0].forward)
        at = (1, batch, self.context)
        points = itertools.chain.from_iterable(profile.forward for profile in self.profiles)
        return np.array([p.median_ms for p in points if (p.width, p.batch, p.context) == at])

    @cached_property
    def curve(self) -> FittedCurve:
        return fit(self.shapes, self.measured_ms, self.bytes_per_weight)

    def ms(self, shape: Shape) -> float:
        """Return the predicted milliseconds of a one-token pass after another model's pass, as in measured_ms."""
        return self.curve.ms(shape)

    @cached_property
    def held_out_errors(self) -> np.ndarray:
        """Return the relative error of ms() for each profile, if the law is fitted to all other profiles."""
        errors = []
        for i, (shape, measured) in enumerate(zip(self.shapes, self.measured_ms, strict=True)):
            others = self.shapes[:i] + self.shapes[i + 1 :]
            curve = fit(others, np.delete(self.measured_ms, i), self.bytes_per_weight)
            errors.append(curve.ms(shape) / measured - 1)
        return np.array(errors)

    def profile(self, shape: Shape, name: str) -> Profile:
        """Return a profile of a shape. Every latency in the profile is predicted by the law."""
        fields: dict[str, object] = {
            "kind": "fitted",
            "name": name,
            "sha256": None,
            "shape": shape,
            "command": "",
            "created": "",
        }
        for part, curves in self._curves.items():
            fields[part] = [p.model_dump() | exact(curve.ms(shape)) for p, curve in curves]
        return Profile.model_validate(self.profiles[0].model_dump() | fields)

    def verdict(self) -> str:
        """Return text with the fitted terms of a pass and the accuracy of the law."""
        a, b, c, _ = self.curve.terms
        error = np.abs(self.held_out_errors)
        overlap = "which do not overlap" if self.curve.overlap == 1 else f"which overlap (p = {self.curve.overlap:g})"
        reading = f"{format_number(1 / (c * 1e6))} GB/s" if c * 1e6 > 1e-4 else "a rate too high to measure"
        return (
            f"Launching a pass takes {format_number(a)} ms plus {format_number(b)} ms per layer, "
            f"and weights are read at {reading}, {overlap}. "
            f"With each of {len(self.profiles)} shapes predicted from the other shapes, the error is "
            f"{error.mean():.1%} on average, {error.max():.1%} at most."
        )

    @cached_property
    def _curves(self) -> dict[str, list[tuple[Latency, FittedCurve]]]:
        """Return a fitted curve for every measured pass, together with the pass's latency in the first profile."""
        curves: dict[str, list[tuple[Latency, FittedCurve]]] = {}
        for part in PARTS:
            curves[part] = []
            for column in zip(*(getattr(p, part) for p in self.profiles), strict=True):
                measured = np.array([point.median_ms for point in column])
                curves[part].append((column[0], fit(self.shapes, measured, self.bytes_per_weight)))
        return curves


def fit_law(profiles: Sequence[Profile]) -> ScalingLaw:
    """Fit the latency law to profiles.

    Raises:
        UserError: There are fewer than MIN_PROFILES profiles, a profile has no shape, or the profiles have different
            devices, dtypes, modes, numbers of threads or grids.
    """
    if len(profiles) < MIN_PROFILES:
        raise UserError(
            f"a latency law needs profiles of at least {MIN_PROFILES} shapes, but there are only {len(profiles)}; "
            "measure them with draftlab profile SHAPE --law"
        )
    settings = {name: {getattr(p, name) for p in profiles} for name in ("device", "dtype", "mode", "threads")}
    settings["widths, batches and contexts"] = {str(_grid(p)) for p in profiles}
    for name, values in settings.items():
        if len(values) > 1:
            raise UserError(
                f"the profiles of a latency law must have the same {name}; measure all shapes with one command"
            )
    if unknown := [p.name for p in profiles if p.shape is None]:
        raise UserError(
            f"profile {unknown[0]} cannot be used for a latency law, because it has no shape: draftlab's own engine "
            "did not run the model; remove this profile"
        )
    pairs = [(p.shape, p) for p in profiles if p.shape is not None]
    pairs.sort(key=lambda pair: (pair[0].layers, pair[0].hidden))
    return ScalingLaw(profiles=[profile for _, profile in pairs])


def _grid(profile: Profile) -> list[list[object]]:
    """Return the points of a profile without their times."""
    return [[p.model_dump(exclude=MEASURED) for p in getattr(profile, part)] for part in PARTS]


def read_law(directory: Path) -> ScalingLaw:
    """Fit the latency law to all profiles in a directory, which is an output of ``draftlab profile --law``.

    Raises:
        UserError: The profiles in the directory give no law, see fit_law.
    """
    with about(str(directory)):
        return fit_law([read_profile(file) for file in sorted(directory.glob("*.yaml"))])


@reading("the profiles give no latency law")
def fit(shapes: Sequence[Shape], times: np.ndarray, bytes_per_weight: int) -> FittedCurve:
    """Fit a curve to the measured times [N] of N shapes with the least relative error. p is chosen from OVERLAPS.

    The logarithms of the terms are fitted, so that the terms stay positive. The fit starts with four equal terms that
    sum to the median time.

    Raises:
        UserError: a time is 0, or too large for its logarithm.
    """
    features = _features(shapes, bytes_per_weight)
    start = np.log(np.median(times) / TERMS / np.median(features, axis=0))
    curves: list[FittedCurve] = []
    for overlap in OVERLAPS:
        result = least_squares(
            lambda logs, p=overlap: np.log(_latency(features, np.exp(logs), p) / times),
            start,
            bounds=(start - 40, start + 40),
        )
        error = float(np.sqrt(np.mean(result.fun**2)))
        curves.append(FittedCurve(np.exp(result.x), bytes_per_weight, overlap, error))
    return min(curves, key=lambda curve: curve.rms_error)


def law_shapes(named: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes to time for a latency law. If `named` has only one shape, return a grid of smaller shapes.

    Raises:
        UserError: There are fewer shapes than a law needs.
    """
    shapes = dict(named)
    if len(shapes) == 1:
        source = next(iter(shapes.values()))
        shapes = grid_shapes(source, *default_grid(source))
    if len(shapes) < MIN_PROFILES:
        raise UserError(
            f"a latency law needs at least {MIN_PROFILES} shapes, but there are only {len(shapes)}; name more "
            "shapes, or name a single large shape to scale down"
        )
    return shapes


def grid_shapes(source: Shape, depths: Sequence[int], widths: Sequence[int]) -> dict[str, Shape]:
    """Return a shape for every depth and width, with the proportions of the source, by name."""
    shapes = [resolve(source, layers=n, hidden=hidden) for n, hidden in itertools.product(depths, widths)]
    return {shape_name(s): s for s in shapes}


def default_grid(source: Shape) -> tuple[list[int], list[int]]:
    """Return depths and widths for a grid that spans the shapes that can be cut from the source."""
    depths = {max(1, source.layers // n) for n in (1, 2, 4)} | {1}
    heads = {max(1, source.heads // n) for n in (1, 2, 4)}
    group = source.heads // source.kv_heads
    valid = [n for n in heads if fewest_kv_heads(n, group) <= source.kv_heads]
    return sorted(depths), sorted(n * source.hidden // source.heads for n in valid)


def _features(shapes: Sequence[Shape], bytes_per_weight: int) -> np.ndarray:
    return np.array([[1, s.layers, active_params(s) * bytes_per_weight, s.layers * s.hidden] for s in shapes])


def _latency(features: np.ndarray, terms: np.ndarray, overlap: float) -> np.ndarray:
    parts = features * terms
    return (parts[:, :2].sum(1) ** overlap + parts[:, 2:].sum(1) ** overlap) ** (1 / overlap)


@dataclass(frozen=True, slots=True)
class Design:
    """Designed shapes by name. latency_ms: Predicted milliseconds of a one-token pass, by name; empty without a law."""

    shapes: dict[str, Shape]
    latency_ms: dict[str, float]

    def write(self, folder: Path, comment: str, *, overwrite: bool) -> None:
        """Write a file for each shape. Raises UserError: a file exists, and overwrite is False."""
        files = {folder / f"{name}.yaml": shape for name, shape in self.shapes.items()}
        if not overwrite and (there := [file for file in files if file.exists()]):
            raise UserError(f"{there[0]} exists already; use --force to replace it")
        for file, shape in files.items():
            write_shape_file(shape, file, comment)


def design(source: Shape, layers: Sequence[int], budget: Budget, law: ScalingLaw | None) -> Design:
    """Return one shape per number of layers, which meets the budget. Raises UserError: no shape meets the budget."""
    shapes = {shape_name(shape): shape for shape in family(source, layers, budget)}
    return Design(shapes, {name: law.ms(shape) for name, shape in shapes.items()} if law else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Designing:
    """The search for shapes with one budget.

    Attributes:
        layers: Numbers of layers, each of which gets a shape.
        out: Folder to write a file for each shape to. None: no file is written.
        comment: First line of these files.
    """

    source: Shape
    layers: Sequence[int]
    budget: Budget
    law: ScalingLaw | None
    out: Path | None
    comment: str
    overwrite: bool

    def run(self) -> Design:
        """Return the shapes, and write them. Raises UserError: no shape meets the budget, or a file exists."""
        found = design(self.source, self.layers, self.budget, self.law)
        if self.out is not None:
            found.write(self.out, self.comment, overwrite=self.overwrite)
        return found
