"""Simulated timings."""

import numpy as np

from draftlab.intervals import Timings

TOKENS = 100.0


def timed(seconds: np.ndarray) -> np.ndarray:
    """Return timings of answers of 100 tokens, [..., 2]."""
    return np.stack([np.full(seconds.shape, TOKENS), seconds], -1)


def drawn(n: int, ks: int = 1, gain: float = 1.2, spread: float = 0.2, seed: int = 0) -> Timings:
    rng = np.random.default_rng(seed)
    seconds = rng.lognormal(0, 0.3, n)
    return Timings(timed(seconds / gain * rng.lognormal(0, spread, (ks, n))), timed(seconds))
