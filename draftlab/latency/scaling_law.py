"""A latency law: what profiles of a few shapes say of every shape of their kind, on one device. No torch.

One pass of a shape takes (issue^p + work^p)^(1/p) milliseconds: issue = a + b layers is what the host spends to start
it, work = c bytes + d layers x width is what the device spends on weights and on everything else. p = 1: one after the
other; the larger p, the more the two overlap and the slower of them counts. a to d are positive.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from draftlab.errors import UserError
from draftlab.latency.cost_model import BYTES, Profile, active_params, read_profile
from draftlab.model.families import shape_name, unbounded
from draftlab.model.shape import Shape, fewest_kv_heads, resolve
from draftlab.results.score import Latency

OVERLAPS = (1.0, 1.5, 2.0, 3.0, 6.0)
MIN_PROFILES = 6  # profiles: one more than there are numbers to fit
ITERATIONS = 60
TERMS = 4  # a, b, c, d


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One quantity over shapes, as fitted. terms: a ms, b ms per layer, c ms per byte, d ms per layer and width."""

    terms: np.ndarray
    overlap: float
    misfit: float  # root mean square of log(fitted / measured)

    def ms(self, shape: Shape, bytes_per_weight: int) -> float:
        return float(_passes(_features([shape], bytes_per_weight), self.terms, self.overlap)[0])

    def parts(self, shape: Shape, bytes_per_weight: int) -> tuple[float, float]:
        """Milliseconds to issue and to work, before they overlap."""
        a, b, c, d = _features([shape], bytes_per_weight)[0] * self.terms
        return float(a + b), float(c + d)


@dataclass(frozen=True, kw_only=True)
class ScalingLaw:
    """Profiles of one device, dtype and mode with the same grid, and what follows from them."""

    profiles: list[Profile]

    @property
    def bytes_per_weight(self) -> int:
        return BYTES[self.profiles[0].dtype]

    @property
    def context(self) -> int:
        """Of the pass that ms speaks of: the middle one that was measured."""
        contexts = sorted({p.context for p in self.profiles[0].forward})
        return contexts[len(contexts) // 2]

    @cached_property
    def one(self) -> Curve:
        """One token, one row, behind other work."""
        return fit(self.shapes(), self.one_ms, self.bytes_per_weight)

    def ms(self, shape: Shape) -> float:
        """One pass over one token of one row behind other work."""
        return self.one.ms(shape, self.bytes_per_weight)

    @cached_property
    def held_out(self) -> np.ndarray:
        """Relative error of ms for every profile, predicted from the others."""
        shapes, times = self.shapes(), self.one_ms
        errors = []
        for i, (shape, measured) in enumerate(zip(shapes, times, strict=True)):
            rest = fit(shapes[:i] + shapes[i + 1 :], np.delete(times, i), self.bytes_per_weight)
            errors.append(rest.ms(shape, self.bytes_per_weight) / measured - 1)
        return np.array(errors)

    def profile(self, shape: Shape, name: str) -> Profile:
        """What a profile of shape would hold, every number of it fitted."""
        first = self.profiles[0]
        lists = {part: self._fitted(part, shape) for part in ("forward", "steady", "prefill", "host")}
        fields = {"kind": "fitted", "name": name, "sha256": None, "shape": shape, "command": "", "created": ""}
        return Profile.model_validate(first.model_dump() | fields | lists)

    def verdict(self) -> str:
        """What a pass is made of, how far off the law is, and where launches end and bandwidth begins."""
        a, b, c, _ = self.one.terms
        error = np.abs(self.held_out)
        together = "one after the other" if self.one.overlap == 1 else f"overlapping with p = {self.one.overlap:g}"
        reading = f"{1 / (c * 1e6):.3g} GB/s" if c * 1e6 > 1e-4 else "too fast to tell"
        return (
            f"One pass: {a:.3g} ms and {b:.3g} ms per layer to issue, weights read at {reading}, {together}. "
            f"Each of {len(self.profiles)} shapes predicted from the others: {error.mean():.1%} off on average, "
            f"{error.max():.1%} at most. {self._crossing()}"
        )

    def crossing(self, layers: int) -> int | None:
        """The width at which work outweighs issuing in so many layers, in the proportions of the largest profile."""
        largest = max(self.shapes(), key=lambda s: s.params())
        bound = unbounded(largest)
        for hidden in range(largest.head_dim, bound.hidden + 1, largest.head_dim):
            issue, work = self.one.parts(resolve(bound, layers=layers, hidden=hidden), self.bytes_per_weight)
            if work > issue:
                return hidden
        return None

    def _crossing(self) -> str:
        depths = sorted({s.layers for s in self.shapes()})
        widths = {n: self.crossing(n) for n in depths}
        parts = [f"{width if width else 'no'} wide at {n}" for n, width in widths.items()]
        return f"Reading outweighs issuing from: {', '.join(parts)} layers."

    def shapes(self) -> list[Shape]:
        return [p.shape for p in self.profiles if p.shape is not None]

    @cached_property
    def one_ms(self) -> np.ndarray:
        """What one pass took, by profile."""

        def found(profile: Profile) -> float:
            rows = min(p.batch for p in profile.forward)
            return next(
                p.median_ms for p in profile.forward if (p.width, p.batch, p.context) == (1, rows, self.context)
            )

        return np.array([found(p) for p in self.profiles])

    def _fitted(self, part: str, shape: Shape) -> list[Latency]:
        columns = zip(*(getattr(p, part) for p in self.profiles), strict=True)
        points = []
        for column in columns:
            curve = fit(self.shapes(), np.array([point.median_ms for point in column]), self.bytes_per_weight)
            ms = curve.ms(shape, self.bytes_per_weight)
            points.append(column[0].model_copy(update={"median_ms": ms, "low_ms": ms, "high_ms": ms, "n": 0}))
        return [point.model_dump() for point in points]


def fit_law(profiles: Sequence[Profile]) -> ScalingLaw:
    """Profiles made into a law.

    Raises:
        UserError: too few of them, or of different devices, dtypes, modes or grids.
    """
    if len(profiles) < MIN_PROFILES:
        raise UserError(f"a latency law needs profiles of at least {MIN_PROFILES} shapes, these are {len(profiles)}")
    for name in ("device", "dtype", "mode", "threads"):
        values = sorted({str(getattr(p, name)) for p in profiles})
        if len(values) > 1:
            raise UserError(f"profiles of one law have one {name}, these have {' and '.join(values)}")
    grids = {tuple((p.width, p.batch, p.context) for p in profile.forward) for profile in profiles}
    if len(grids) > 1:
        raise UserError("profiles of one law have the same widths, rows and contexts; measure them in one command")
    known = [(p.shape.layers, p.shape.hidden, i) for i, p in enumerate(profiles) if p.shape is not None]
    if len(known) < len(profiles):
        other = next(p.name for p in profiles if p.shape is None)
        raise UserError(f"a latency law is of shapes, and the profile {other} is of a model that transformers ran")
    return ScalingLaw(profiles=[profiles[i] for *_, i in sorted(known)])


def read_law(folder: Path) -> ScalingLaw:
    """The law of all profiles in a folder, as ``draftlab law`` or ``draftlab profile`` writes them.

    Raises:
        UserError: no such folder, or no law in it.
    """
    if not folder.is_dir():
        raise UserError(f"no folder of profiles at {folder}; draftlab law measures one")
    return fit_law([read_profile(file) for file in sorted(folder.glob("*.yaml"))])


def fit(shapes: Sequence[Shape], times: np.ndarray, bytes_per_weight: int) -> Curve:
    """The curve nearest to times [N] in proportion, of those with each overlap."""
    features = _features(shapes, bytes_per_weight)
    return min((_fit(features, times, p) for p in OVERLAPS), key=lambda curve: curve.misfit)


def grid_shapes(source: Shape, depths: Sequence[int], widths: Sequence[int]) -> dict[str, Shape]:
    """Every combination, in the proportions of source, by name."""
    shapes = [resolve(source, layers=n, hidden=hidden) for n, hidden in itertools.product(depths, widths)]
    return {shape_name(s): s for s in shapes}


def default_grid(source: Shape) -> tuple[list[int], list[int]]:
    """Depths and widths that span what can be cut from source."""
    depths = {max(1, source.layers // n) for n in (1, 2, 4)} | {1}
    heads = {max(1, source.heads // n) for n in (1, 2, 4)}
    group = source.heads // source.kv_heads
    whole = [n for n in heads if fewest_kv_heads(n, group) <= source.kv_heads]
    return sorted(depths), sorted(n * source.hidden // source.heads for n in whole)


def _features(shapes: Sequence[Shape], bytes_per_weight: int) -> np.ndarray:
    return np.array([[1, s.layers, active_params(s) * bytes_per_weight, s.layers * s.hidden] for s in shapes])


def _passes(features: np.ndarray, terms: np.ndarray, overlap: float) -> np.ndarray:
    parts = features * terms
    return (parts[:, :2].sum(1) ** overlap + parts[:, 2:].sum(1) ** overlap) ** (1 / overlap)


def _fit(features: np.ndarray, times: np.ndarray, overlap: float) -> Curve:
    """Levenberg and Marquardt's method on the logarithms of the terms, from equal shares of the typical time."""
    logs = np.log(np.median(times) / TERMS / np.median(features, axis=0))
    damping = 1e-2

    def wrong(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        parts = features * np.exp(logs)
        halves = np.repeat(np.stack([parts[:, :2].sum(1), parts[:, 2:].sum(1)], 1), 2, axis=1)
        whole = (halves[:, :1] ** overlap + halves[:, 2:3] ** overlap) ** (1 / overlap)
        return np.log(whole[:, 0] / times), parts * (halves / whole) ** (overlap - 1) / whole

    residual, slope = wrong(logs)
    for _ in range(ITERATIONS):
        normal = slope.T @ slope + damping * np.eye(TERMS)
        step = np.clip(np.linalg.solve(normal, -slope.T @ residual), -1, 1)
        after, slope_there = wrong(logs + step)
        if after @ after < residual @ residual:
            gained = residual @ residual - after @ after
            logs, residual, slope, damping = logs + step, after, slope_there, damping / 3
            if gained < 1e-12:
                break
        else:
            damping *= 4
    return Curve(terms=np.exp(logs), overlap=overlap, misfit=float(np.sqrt(np.mean(residual**2))))
