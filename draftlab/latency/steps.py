"""The expected steps of every text, and their time, by K: with draftlab's engine, or as vLLM runs them.

R texts of at most n tokens, C contexts. What drafting costs in a step is said by the kind of drafter (step_cost), from
the passes of its model. Time is counted as the engine counts it: both prefills are left out, and a step that starts at
token i has prompt + i cached tokens. The first pass after the draft's prefill counts as one after the target's, which
is a little too much.

vLLM's steps (0.32, v1/spec_decode/llm_base_proposer.py): the first draft pass of a step is over all tokens that the
target has just read, rejected ones included, and one more unless the drafter reads the target's states; where its
table of K says K = 0 that pass still runs, so that the draft's cache stays complete.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from draftlab.acceptance.expected import visits
from draftlab.config.kinds import DRAFTERS
from draftlab.latency.cost_model import CostModel
from draftlab.latency.workload import Workload

Server = Literal["vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The expected steps at one K. K = 0 is plain decoding.

    Args:
        starts: Steps by the token at which they start, [R, n].
        drafted: Tokens that a step drafts there, [R, n].
        after: Steps by the tokens that the step before accepted, [R, n, K + 1].
    """

    starts: np.ndarray
    drafted: np.ndarray
    after: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Milliseconds of a drafter's passes at one batch size, by context.

    Args:
        contexts: Cached tokens, ascending by 1, [C].
        steady: Pass over one token after many passes of the same model, [C].
        warmup: Time that the first N one-token passes after the target's take beyond steady, [N, C].
        k: Limit of a step's drafted tokens.
        lag: Tokens by which the drafter's cache is shorter than the target's.
        server: Server whose steps they are; None stands for draftlab's engine.
        by_width: Forward passes that were asked for.
    """

    draft: CostModel
    batch: int
    contexts: np.ndarray
    steady: np.ndarray
    warmup: np.ndarray
    k: int
    lag: int
    server: Server | None
    by_width: dict[int, np.ndarray] = field(default_factory=dict)

    def step(self, k: int, *, unread: int, at_once: bool = False) -> np.ndarray:
        """Return the time of drafting k tokens in a step, by the target's cached tokens, [C].

        Args:
            unread: Tokens that the first pass reads, because the drafter has not read them yet.
            at_once: The first pass reads k - 1 mask tokens as well and drafts everything; otherwise every further token
                has its own pass.
        """
        if self.server is not None:
            unread = k + 2 - self.lag
        width = unread + (k - 1 if at_once else 0)
        if k == 0:
            return self._forward(width) if self.server is not None else np.zeros(len(self.contexts))
        here, host = np.arange(len(self.contexts)), self.draft.host_ms(1)
        if self.server is not None:
            ms = self._forward(width) + host
        else:
            here = here - self.lag
            ms = self._forward(width)[np.maximum(here - unread + 1, 0)] + host
        for j in range(1, 1 if at_once else k):
            at = np.minimum(here + j, len(here) - 1)
            ms = ms + self.steady[at] + host
            if j < len(self.warmup):
                ms = ms + self.warmup[j, at]
        return ms

    def block(self, k: int) -> np.ndarray:
        """Return the time of a pass that drafts k tokens at once, by the target's cached tokens, [C].

        The profile of a block's passes is by drafted tokens; a pass reads as many states of the target.
        """
        return self._forward(k) + self.draft.host_ms(1) if k else np.zeros(len(self.contexts))

    def _forward(self, width: int) -> np.ndarray:
        if width not in self.by_width:
            self.by_width[width] = self.draft.forward_ms(width, self.batch, self.contexts)
        return self.by_width[width]


StepCost = Callable[[Passes, int, int], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Milliseconds of a pair at one batch size, by context.

    Args:
        verify: Target pass by tokens drafted, [K + 1, C].
        host: Sampling and verification on the host by tokens drafted, [K + 1].
        share: Share of the time of drafting that counts.
    """

    passes: Passes
    step_cost: StepCost
    verify: np.ndarray
    host: np.ndarray
    share: float = 1.0
    tables: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def first(self) -> int:
        """Return the context of the first column."""
        return int(self.passes.contexts[0])

    def without_turns(self, at: int) -> "StepCosts":
        """Return the costs at one column, as if contexts did not grow and turns between models cost nothing."""
        passes, steady = self.passes, self.passes.steady[at : at + 1]
        contexts = passes.contexts[at : at + 1]
        flat = replace(
            passes, contexts=contexts, steady=steady, warmup=passes.warmup[:0], by_width={1: steady}
        )
        return replace(self, passes=flat, tables={})

    def drafting(self, k: int) -> np.ndarray:
        """Return the time of drafting by the tokens accepted before and the tokens to draft, [K + 1, K + 1, C]."""
        if k not in self.tables:
            passes, counts = replace(self.passes, k=k), range(k + 1)
            rows = [
                [self.step_cost(passes, drafted, accepted) for drafted in counts]
                for accepted in counts
            ]
            self.tables[k] = np.array(rows)
        return self.share * self.tables[k]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Expected milliseconds of each text, [R]."""

    draft: np.ndarray
    verify: np.ndarray
    host: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.draft + self.verify + self.host


def step_costs(
    draft: CostModel,
    target: CostModel,
    work: Workload,
    k: int,
    batch: int,
    server: Server | None = None,
) -> StepCosts:
    """Return the costs for every context that occurs. Raises UserError: a context, width or batch outside a profile."""
    kind = DRAFTERS.get(work.kind, "acceptance")
    contexts = np.arange(int(work.prompt_tokens.min()) - kind.cache_lag, work.longest + k)
    passes = Passes(
        draft=draft,
        batch=batch,
        contexts=contexts,
        steady=draft.steady_ms(batch, contexts),
        warmup=draft.warmup_ms(batch, contexts),
        k=k,
        lag=kind.cache_lag,
        server=server,
    )
    verify = [target.steady_ms(batch, contexts)]
    verify += [target.forward_ms(drafted + 1, batch, contexts) for drafted in range(1, k + 1)]
    host = np.array([target.host_ms(drafted + 1) for drafted in range(k + 1)])
    return StepCosts(passes=passes, step_cost=kind.step_cost, verify=np.stack(verify), host=host)


def plain_ms(costs: StepCosts, work: Workload) -> np.ndarray:
    """Return the milliseconds of every text without a draft, [R]."""
    return expected_time(replace(costs, share=0.0), work.prompt_tokens, steps(work, 0)).total


def steps(work: Workload, k: int) -> Steps:
    """Return the starts of steps, and the tokens accepted by the steps before them."""
    chances = work.texts.chances
    inside = np.arange(chances.shape[1]) < work.texts.lengths[:, None]
    drafted = np.minimum(k, work.texts.room()) * inside
    starts = visits(chances, drafted) * inside
    after = _after(starts, chances, drafted, k) * inside[:, :, None]
    return Steps(starts=starts, drafted=drafted, after=after)


def _after(starts: np.ndarray, chances: np.ndarray, drafted: np.ndarray, k: int) -> np.ndarray:
    """Return the steps that start at each token by the tokens accepted in the step before, [R, n, K + 1].

    The first step follows the prefill, which accepted none.
    """
    n = starts.shape[1]
    after, alive = np.zeros((*starts.shape, k + 1)), starts
    after[:, 0, 0] = starts[:, 0]
    for a in range(
        min(k + 1, n - 1)
    ):  # alive: by where they started, steps that accepted at least a tokens
        chance = np.zeros_like(starts)
        if a < k:
            chance[:, : n - a] = chances[:, a:, a] if chances.ndim == 3 else chances[:, a:]
        chance *= drafted > a
        after[:, a + 1 :, a] = (alive * (1 - chance))[:, : n - a - 1]
        alive = alive * chance
    return after


def expected_time(costs: StepCosts, prompt_tokens: np.ndarray, steps: Steps) -> TimeSplit:
    """Return the expected time of every text, [R]."""
    drafted, accepted = steps.drafted, np.arange(steps.after.shape[2])
    last = costs.verify.shape[1] - len(costs.host)
    at = np.minimum(prompt_tokens[:, None] - costs.first + np.arange(drafted.shape[1]), last)
    drafting = costs.drafting(len(accepted) - 1)[accepted, drafted[:, :, None], at[:, :, None]]
    return TimeSplit(
        draft=(steps.after * drafting).sum((1, 2)),
        verify=(steps.starts * costs.verify[drafted, at]).sum(1),
        host=(steps.starts * costs.host[drafted]).sum(1),
    )


def total_ms(costs: StepCosts, work: Workload, by_k: Mapping[int, Steps]) -> dict[int, float]:
    """Return the milliseconds of all texts by K. K = 0 is a server's draft that pauses."""
    return {
        k: float(expected_time(costs, work.prompt_tokens, each).total.sum())
        for k, each in by_k.items()
    }
