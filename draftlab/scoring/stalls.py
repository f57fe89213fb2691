"""Stalls: steps that other work interrupted, and the time that they would have taken uninterrupted.

A step is one target pass and the drafting before it. Steps of one kind, with equal numbers of drafted tokens and rows,
do nearly the same work, so a step that takes several times as long was interrupted. Its time is replaced by the median
of its kind: a mean would keep the time of the interruption, and so would a median of whole prompts as soon as most are
hit. A prefill is compared with prefills of the same prompt.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from draftlab.engine.generate import Step

FACTOR = 3.0  # times as long as USUAL of a kind's steps: far above what contexts, or drafters that take turns, explain
USUAL = 0.8  # share of the steps that are supposed free of stalls
ENOUGH = 10  # steps of a kind; fewer are judged among all steps of their arm
PHASES = ("draft_seconds", "verify_seconds", "host_seconds")


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step with the number of rows that still decoded. stall: seconds taken out of it."""

    step: Step
    rows: int
    stall: float = 0.0


def timed_steps(rows: Sequence[Sequence[Step]]) -> list[list[TimedStep]]:
    """Return the steps of each row of a batch but its prefill."""
    return [
        [TimedStep(s, sum(len(other) > i for other in rows)) for i, s in enumerate(row) if i]
        for row in rows
    ]


def without_stalls(runs: Sequence[Sequence[TimedStep]]) -> list[list[TimedStep]]:
    """Return all generations of one arm, with the time of stalled steps replaced."""
    kinds: dict[Hashable, list[Step]] = defaultdict(list)
    every = [timed for run in runs for timed in run]
    for timed in every:
        kinds[_kind(timed)].append(timed.step)
    whole = _Usual.of([timed.step for timed in every]) if every else None
    usual = {
        kind: _Usual.of(steps) if len(steps) >= ENOUGH else whole for kind, steps in kinds.items()
    }
    return [[_mended(timed, usual[_kind(timed)]) for timed in run] for run in runs]


@dataclass(frozen=True, slots=True)
class _Usual:
    """The usual steps of a kind: the seconds beyond which a step has stalled, and the median of each phase."""

    limit: float
    phases: tuple[float, ...]

    @classmethod
    def of(cls, steps: Sequence[Step]) -> "_Usual":
        # [steps, 3]
        seconds = np.array([[getattr(step, phase) for phase in PHASES] for step in steps])
        limit = FACTOR * float(np.quantile(seconds.sum(1), USUAL))
        return cls(limit, tuple(np.median(seconds[seconds.sum(1) <= limit], axis=0).tolist()))


def _kind(timed: TimedStep) -> Hashable:
    return timed.step.drafted, timed.rows


def _mended(timed: TimedStep, usual: _Usual | None) -> TimedStep:
    seconds = sum(getattr(timed.step, phase) for phase in PHASES)
    if usual is None or seconds <= usual.limit:
        return timed
    step = replace(timed.step, **dict(zip(PHASES, usual.phases, strict=True)))
    return TimedStep(step, timed.rows, seconds - sum(usual.phases))
