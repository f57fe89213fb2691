"""The time that the steps of a score should take, by the latencies of single passes. Torch is not imported.

A step drafts with one pass per token, or with a single pass if the draft is parallel, and then verifies in one target
pass. The first draft pass follows a target pass, whose weights have replaced the draft's in the processor's caches. The
passes after it follow passes of the draft. Both are timed where they occur (latency/profiler.py). The latency law and
`draftlab predict` add up the same times (latency/steps.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from draftlab.results.decoding import Generation

if TYPE_CHECKING:
    from draftlab.results.score import Latency, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Latencies of the passes of a draft and of its target.

    Args:
        alone: Milliseconds of a one-token pass of the target in plain decoding.
        verify: Latencies of target passes that follow draft passes, by width.
        first: Latencies of draft passes that follow a target pass, by width.
        following: Latencies of one-token draft passes by the number of draft passes before them.
        parallel: Whether one pass drafts all tokens of a step.
    """

    alone: float
    verify: Sequence["Latency"]
    first: Sequence["Latency"]
    following: dict[int, float]
    parallel: bool

    @classmethod
    def of(cls, target: "Model", draft: "Model") -> "StepCosts | None":
        """Return the costs, or None if the passes of one of the models were not timed where they occur."""
        if not (target.following and draft.latency):
            return None
        return cls(
            alone=target.following[-1].median_ms,
            verify=target.latency,
            first=draft.latency,
            following={each.after: each.median_ms for each in draft.following},
            parallel=draft.parallel,
        )

    def timed(self, k: int) -> bool:
        """Return whether all passes of a step with k drafted tokens were timed."""
        return k == 0 or (self.drafts(k) and any(each.width == k + 1 for each in self.verify))

    def drafts(self, k: int) -> bool:
        """Return whether the draft passes of such a step were timed."""
        return k == 1 or self.parallel or bool(self.following)

    def drafting(self, k: int, unread: int) -> list[float]:
        """Return the milliseconds of each draft pass of a step.

        k: Number of tokens to draft. unread: Number of tokens of the text that the draft has not read yet.
        """
        if k == 0:
            return []
        if self.parallel:
            return [_at(unread + k - 1, self.first)]
        steady = self.following[max(self.following)] if self.following else 0.0
        return [
            _at(unread, self.first),
            *(self.following.get(after, steady) for after in range(1, k)),
        ]

    def total_ms(self, runs: Sequence[Generation], host_ms: float) -> float:
        """Return the milliseconds of the passes of all steps in `runs`, with `host_ms` for each step that drafts."""
        total = 0.0
        for run in runs:
            unread = 1
            for drafted, accepted in zip(run.drafted, run.accepted, strict=True):
                drafting = self.drafting(drafted, unread)
                total += sum(drafting) + host_ms * (drafted > 0) + _at(drafted + 1, self.verify)
                # a draft has not read the last token that it drafted, and a parallel draft none of them
                read = 0 if self.parallel else min(accepted, max(drafted - 1, 0))
                unread = accepted + 1 - read
        return total


def _at(width: int, latencies: Sequence["Latency"]) -> float:
    """Return the milliseconds of a pass over `width` tokens, interpolated between the measured widths."""
    widths, medians = zip(*sorted((each.width, each.median_ms) for each in latencies), strict=True)
    return float(np.interp(width, widths, medians))
