"""The return of more training: tokens per target pass against training tokens, fitted to pilot runs, with its interval.

A power law toward a limit, length = limit - scale * (tokens / first)^-exponent, as losses follow (Kaplan et al. 2020,
2001.08361; Hoffmann et al. 2022, 2203.15556). The posterior of its three parameters is computed on a grid, under
uniform priors, so that two points already give an honest, wide answer. D drawn curves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from draftlab.errors import UserError
from draftlab.intervals import Interval
from draftlab.reading import FileModel

EXPONENTS = np.geomspace(0.1, 1.5, 48)  # of losses of language models: 0.05 to 0.5; fine-tuning is faster
LIMITS = 96  # limits tried, from the best point to all tokens accepted
DRAWN = 4000
NOISE = 0.005  # of a length: two runs that differ in their seed only


class Pilot(FileModel):
    """A training run that was measured. length: tokens per target pass. deviation: standard error of length."""

    tokens: float = Field(gt=0)
    length: float = Field(ge=1)
    deviation: float = Field(ge=0)
    seconds: float = Field(ge=0)  # of training, in all

    @classmethod
    def of(cls, tokens: float, length: Interval, seconds: float) -> "Pilot":
        deviation = (length.high - length.low) / 3.92  # of a normal distribution's 95 %
        return cls(tokens=tokens, length=max(1.0, length.value), deviation=deviation, seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningCurve:
    """Curves drawn from the posterior, [D] each; first: tokens of the first point."""

    first: float
    limit: np.ndarray
    scale: np.ndarray
    exponent: np.ndarray
    n: int  # points

    def at(self, tokens: float) -> Interval:
        """Return the length after so many tokens."""
        return self._interval(self.limit - self.scale * (tokens / self.first) ** -self.exponent)

    def gain(self, now: float, then: float) -> Interval:
        """Return the length after then tokens less that after now."""
        spared = (now / self.first) ** -self.exponent - (then / self.first) ** -self.exponent
        return self._interval(self.scale * spared)

    @property
    def most(self) -> Interval:
        """The length that no amount of training on such text exceeds."""
        return self._interval(self.limit)

    def tokens_for(self, length: float) -> np.ndarray:
        """Return how many tokens each drawn curve needs, [D]; inf where it stays below."""
        missing = self.limit - length
        with np.errstate(divide="ignore", over="ignore"):
            needed = self.first * (self.scale / np.maximum(missing, 1e-12)) ** (1 / self.exponent)
        return np.where(missing > 0, needed, np.inf)

    def _interval(self, values: np.ndarray) -> Interval:
        low, value, high = np.quantile(values, [0.025, 0.5, 0.975])
        return Interval(value=float(value), low=float(low), high=float(high), n=self.n)


class Forecast(FileModel):
    """The cost of training to a length: the median and 95 % of the drawn curves; None: more than any amount."""

    length: float
    tokens: float | None
    tokens_low: float | None
    tokens_high: float | None
    tokens_per_second: float
    devices: int
    chance: float  # that training on such text reaches it at all
    most: Interval  # tokens per target pass that no amount of training exceeds

    @property
    def hours(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.tokens_per_second / 3600

    @property
    def device_hours(self) -> float | None:
        return None if self.hours is None else self.hours * self.devices

    def line(self) -> str:
        """Return it in words."""
        goal, most = f"{self.length:.2f} tokens per target pass", f"training on such text ends at {self.most}"
        if self.tokens is None or self.hours is None or self.device_hours is None:
            return f"{goal} are out of reach with a chance of {1 - self.chance:.0%}: {most}"
        spread = " to ".join("never" if n is None else f"{n:,.2g}" for n in (self.tokens_low, self.tokens_high))
        return (
            f"{goal} take about {self.tokens:,.2g} training tokens in all ({spread}), {self.hours:.2g} hours or "
            f"{self.device_hours:.2g} device hours at {self.tokens_per_second:,.0f} tokens a second; {most}"
        )


def fit(points: Sequence[Pilot], k: int, seed: int = 0) -> LearningCurve:
    """Fit the curve of a draft that drafts k tokens.

    Raises:
        UserError: fewer than two points of different amounts of training.
    """
    if len({point.tokens for point in points}) < 2:
        raise UserError(f"a learning curve needs two pilot runs of different length, not {len(points)}")
    tokens, length, deviation = (np.array([getattr(p, n) for p in points]) for n in ("tokens", "length", "deviation"))
    first, noise = float(tokens.min()), np.hypot(deviation, NOISE * length)
    best = float((length - 2 * noise).max())
    limits = np.linspace(min(best, k + 1), k + 1, LIMITS)
    spared = (tokens / first) ** -EXPONENTS[:, None]  # [E, n]
    weight, missing = noise**-2, limits[:, None] - length  # [n], [L, n]
    curvature = (weight * spared**2).sum(-1)[:, None]  # [E, 1]
    scale = np.einsum("n,en,ln->el", weight, spared, missing) / curvature  # the best, where the prior is flat
    error = missing[None] - scale[..., None] * spared[:, None]  # [E, L, n]
    width = np.broadcast_to(curvature**-0.5, scale.shape)
    fits = np.exp(-((weight * error**2).sum(-1) - (weight * error**2).sum(-1).min()) / 2) * width
    rng = np.random.default_rng(seed)
    # a scale below zero is no learning curve, and one above limit - 1 starts with fewer tokens than one
    fits = fits * _inside(scale, width, limits - 1, rng)
    cells = rng.choice(fits.size, DRAWN, p=(fits / fits.sum()).ravel())
    e, at = np.unravel_index(cells, fits.shape)
    drawn = _truncated(scale[e, at], width[e, at], limits[at] - 1, rng)
    return LearningCurve(first=first, limit=limits[at], scale=drawn, exponent=EXPONENTS[e], n=len(points))


def forecast(points: Sequence[Pilot], length: float, *, k: int, devices: int = 1) -> Forecast:
    """Return what it costs to train a draft of k tokens to a length, by its pilot runs and at the pace of the longest.

    Raises:
        UserError: a length that k tokens cannot have; see fit.
    """
    if not 1 <= length <= k + 1:
        raise UserError(f"{length:g} tokens per target pass: with K = {k} they are between 1 and {k + 1}")
    curve, longest = fit(points, k), max(points, key=lambda p: p.tokens)
    needed = curve.tokens_for(length)
    low, value, high = (float(q) for q in np.quantile(needed, [0.025, 0.5, 0.975], method="inverted_cdf"))
    return Forecast(
        length=length, tokens=_finite(value), tokens_low=_finite(low), tokens_high=_finite(high),
        tokens_per_second=longest.tokens / max(longest.seconds, 1e-9), devices=devices,
        chance=float(np.isfinite(needed).mean()), most=curve.most,
    )  # fmt: skip


def _inside(mean: np.ndarray, width: np.ndarray, most: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the share of each normal distribution between 0 and most."""
    draws = rng.standard_normal(512)[:, None, None] * width + mean
    return np.maximum(((draws >= 0) & (draws <= most)).mean(0), 1e-6)


def _truncated(mean: np.ndarray, width: np.ndarray, most: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw one value of each normal distribution between 0 and most; after some tries, its nearest end."""
    values = mean + width * rng.standard_normal(mean.shape)
    for _ in range(64):
        outside = (values < 0) | (values > most)
        if not outside.any():
            break
        values = np.where(outside, mean + width * rng.standard_normal(mean.shape), values)
    return np.clip(values, 0, most)


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
