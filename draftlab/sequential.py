"""Levels of a timing that may end early: it looks at the results after some conversations, and ends once they decide.

A test that looks several times at 5 % is wrong more often than 5 %. Kim and DeMets ("Design and analysis of group
sequential tests based on the type I error spending rate function", Biometrika 1987) give each look a part of the 5 %:
after a fraction t of the conversations, 0.05 t^2 of it is spent. Intervals at the level of the last look keep 95 %
however the timing ended (Jennison and Turnbull, "Interim analyses: the repeated confidence interval approach", JRSS B
1989). With few conversations, each level is used in Student's t (the significance level approach of Jennison and
Turnbull, Group Sequential Methods, 2000, section 4.4). python -m benchmarks.coverage simulates the whole procedure.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import root_scalar
from scipy.special import ndtr

from draftlab.intervals import ALPHA, Interval

LOOKS = (8, 12, 24)  # numbers of conversations after which a timing may end
POINTS = 501  # points at which the density of the statistic is computed


def looks_of(conversations: int) -> list[int]:
    """Return the numbers of conversations after which a timing of so many conversations looks at its results."""
    return [look for look in LOOKS if look < conversations] + [conversations]


def levels(looks: Sequence[int], last: int | None = None) -> list[float]:
    """Return the level of the two-sided test at each look, so that all looks together are wrong in 5 % of cases.

    Args:
        looks: Numbers of conversations at the looks, ascending. All 5 % are spent at the last one.
        last: Number of conversations that were planned, if the time was over before. Default: the last look.
    """
    total = last or looks[-1]
    spent = [ALPHA * (look / total) ** 2 for look in looks[:-1]] + [ALPHA]
    return _levels_of(looks, spent)


def is_decided(gain: Interval, slower: Iterable[bool | None], precision: float) -> bool:
    """Return whether a timing may end at a look.

    Args:
        gain: Speed-up of the fastest draft over plain decoding.
        slower: Whether each other draft is significantly slower than the fastest one.
        precision: Half of the width of the interval of the log speed-up that is narrow enough.
    """
    if gain.below(1):
        return True  # no draft helps, whichever is the fastest
    if gain.decides and gain.low > 0 and math.log(gain.high / gain.low) / 2 < precision:
        return True
    return gain.above(1) and all(slower)


def _levels_of(looks: Sequence[int], spent: Sequence[float]) -> list[float]:
    """Return two-sided levels for which a random walk leaves its bounds with probability `spent` by each look."""
    walk = _Inside.at_start()
    before = 0
    found = list[float]()
    for i, look in enumerate(looks):
        earlier = spent[i - 1] if i else 0.0
        bound = walk.bound(look - before, spent[i] - earlier)
        walk = walk.after(look - before, bound)
        before = look
        found.append(float(2 * ndtr(-bound / math.sqrt(look))))
    return found


class _Inside(NamedTuple):
    """The density of a normal random walk that has been inside all bounds so far.

    It is carried from look to look (Armitage, McPherson and Rowe, "Repeated significance tests on accumulating data",
    JRSS A 1969).

    sums: Points, [P]. mass: Probability at each point, [P].
    """

    sums: np.ndarray
    mass: np.ndarray

    @classmethod
    def at_start(cls) -> "_Inside":
        return cls(np.zeros(1), np.ones(1))

    def bound(self, steps: int, probability: float) -> float:
        """Return the bound that the walk leaves with this probability in so many steps."""
        deviation = math.sqrt(steps)

        def outside(bound: float) -> float:
            left = ndtr((-bound - self.sums) / deviation) + ndtr((self.sums - bound) / deviation)
            return float(self.mass @ left) - probability

        far = float(self.sums[-1]) + 12 * deviation
        return float(root_scalar(outside, bracket=(0.0, far)).root)

    def after(self, steps: int, bound: float) -> "_Inside":
        """Return the walk after so many steps, inside the bound."""
        sums = np.linspace(-bound, bound, POINTS)
        moves = (sums[:, None] - self.sums) ** 2 / (2 * steps)
        mass = np.exp(-moves) @ self.mass / math.sqrt(2 * math.pi * steps) * (sums[1] - sums[0])
        mass[[0, -1]] /= 2
        return _Inside(sums, mass)
