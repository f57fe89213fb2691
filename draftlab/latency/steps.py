"""The expected steps of every text, and their time, by K: with draftlab's engine, or as a server runs them.

R texts of at most n tokens, C contexts. A parallel draft reads the tokens of the step before and K - 1 mask tokens in
one pass, up to 2 K wide. An EAGLE-3 head's first pass of a step is over the tokens since the last. Time is counted as
the engine counts it: both prefills are left out, and a step that starts at token i has prompt + i cached tokens. The
first pass after the draft's prefill counts as one after the target's, which is a little too much.

vLLM's steps (0.32, v1/spec_decode/llm_base_proposer.py): the first draft pass of a step is over all tokens that the
target has just read, rejected ones included, and one more for a draft model; where its schedule says K = 0 that pass
still runs, so that the draft's cache stays complete.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from draftlab.acceptance.expected import visits
from draftlab.latency.cost_model import CostModel
from draftlab.latency.workload import Workload

Server = Literal["vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The expected steps at one K, by the token at which they start, [R, n] each. K = 0 is plain decoding."""

    starts: np.ndarray
    drafted: np.ndarray
    catching_up: np.ndarray  # starts right after a full acceptance, when the draft's cache lacks one token more
    after: np.ndarray | None = None  # if by age: starts by the tokens accepted before, [R, n, K + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Milliseconds of a pair at one batch size, by context; contexts count from first."""

    first: int
    draft: np.ndarray  # [C] one-token draft pass in the steady state, with its sampling
    warmup: np.ndarray  # [N, C] in addition for the first N draft passes of a step, after the target's pass
    catch_up: np.ndarray  # [C] in addition if the first draft pass takes two tokens
    verify: np.ndarray  # [K + 1, C] target pass, by tokens drafted
    host: np.ndarray  # [K + 1] sampling and verification on the host, by tokens drafted
    wide: np.ndarray  # [2 K, C] pass of a parallel draft, or a head's first, by tokens - 1, with sampling; or empty
    first_pass: np.ndarray  # [K + 1, C] vLLM's first draft pass beyond one in the steady state, by drafted; or empty
    eagle: bool = False

    def drafting(self, k: int, accepted: float, at: int) -> float:
        """Return the time of drafting k tokens at a context, after a step that accepted so many."""
        if len(self.first_pass):
            return float(k * self.draft[at] + self.first_pass[k, at])
        if self.eagle:
            return float(self.wide[round(accepted), at] + (k - 1) * self.draft[at])
        return float(self.wide[k + round(accepted) - 1, at] if len(self.wide) else k * self.draft[at])


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
    draft: CostModel, target: CostModel, work: Workload, k: int, batch: int, server: Server | None = None
) -> StepCosts:
    """Return the costs for every context that occurs."""
    first = int(work.prompt_tokens.min()) - work.eagle  # a head reads the prompt's last place again
    contexts = np.arange(first, work.longest + k)
    single, two = (draft.forward_ms(width, batch, contexts) for width in (1, 2))
    widths = range(1, widest(work, k) + 1 if work.by_age else 1)
    costs = StepCosts(
        first=first,
        draft=draft.steady_ms(batch, contexts) + draft.host_ms(1),
        warmup=draft.warmup_ms(batch, contexts),
        catch_up=np.concatenate([two[:1], two[:-1]]) - single,  # a pass over two tokens starts one token earlier
        verify=np.stack(
            [target.steady_ms(batch, contexts), *(target.forward_ms(j + 1, batch, contexts) for j in range(1, k + 1))]
        ),
        host=np.array([target.host_ms(j + 1) for j in range(k + 1)]),
        wide=np.array([draft.forward_ms(w, batch, contexts) + draft.host_ms(1) for w in widths]),
        first_pass=np.empty(0),
        eagle=work.eagle,
    )
    if server is None:
        return costs
    first_pass = np.stack([draft.forward_ms(_vllm_width(work, j), batch, contexts) for j in range(k + 1)])
    if work.parallel:  # one pass for all
        first_pass[1:] += draft.host_ms(1)
        return replace(scaled_drafting(costs, 0), first_pass=first_pass)
    first_pass[1:] -= draft.steady_ms(batch, contexts)
    warmup = np.concatenate([0 * costs.warmup[:1], costs.warmup[1:]])
    return replace(costs, catch_up=0 * costs.catch_up, warmup=warmup, first_pass=first_pass)


def plain_ms(costs: StepCosts, work: Workload) -> np.ndarray:
    """Return the milliseconds of every text without a draft, [R]."""
    return expected_time(scaled_drafting(costs, 0), work.prompt_tokens, steps(work, 0)).total


def steps(work: Workload, k: int) -> Steps:
    """Return where steps start. After a full acceptance the draft has not read its last token: it reads two next."""
    chances, n = work.texts.chances, work.texts.chances.shape[1]
    inside = np.arange(n) < work.texts.lengths[:, None]
    drafted = np.minimum(k, work.texts.room()) * inside
    starts = visits(chances, drafted) * inside
    catching_up = np.zeros_like(starts)
    if work.by_age:
        after = _after(starts, chances, drafted, k)
        return Steps(starts=starts, drafted=drafted, catching_up=catching_up, after=after)
    if 0 < k < n:
        accepted = starts[:, : n - k - 1] * (drafted[:, : n - k - 1] == k)
        for j in range(k):
            accepted = accepted * chances[:, j : j + n - k - 1]
        catching_up[:, k + 1 :] = accepted * (drafted[:, k + 1 :] > 0)
    return Steps(starts=starts, drafted=drafted, catching_up=catching_up)


def _after(starts: np.ndarray, chances: np.ndarray, drafted: np.ndarray, k: int) -> np.ndarray:
    """Return the steps that start at each token by the tokens accepted in the step before, [R, n, K + 1].

    The first step follows the prefill, which accepted none.
    """
    n = starts.shape[1]
    after, alive = np.zeros((*starts.shape, k + 1)), starts
    after[:, 0, 0] = starts[:, 0]
    for a in range(min(k + 1, n - 1)):  # alive: by where they started, steps that accepted at least a tokens
        chance = np.zeros_like(starts)
        if a < k:
            chance[:, : n - a] = chances[:, a:, a]
        chance *= drafted > a
        after[:, a + 1 :, a] = (alive * (1 - chance))[:, : n - a - 1]
        alive = alive * chance
    return after


def expected_time(costs: StepCosts, prompt_tokens: np.ndarray, steps: Steps) -> TimeSplit:
    """Return the expected time of every text, [R]."""
    drafted, n = steps.drafted, steps.drafted.shape[1]
    at = np.minimum(prompt_tokens[:, None] - costs.first + np.arange(n), len(costs.draft) - len(costs.host))
    verify, host = (steps.starts * costs.verify[drafted, at]).sum(1), (steps.starts * costs.host[drafted]).sum(1)
    if steps.after is not None and not len(costs.first_pass):
        drafting_time = _drafting_by_head if costs.eagle else _drafting_in_parallel
        return TimeSplit(draft=drafting_time(costs, at, drafted, steps.after), verify=verify, host=host)
    until = np.concatenate([[0.0], np.cumsum(costs.draft)])
    drafting = steps.starts * (until[at + drafted] - until[at]) + steps.catching_up * costs.catch_up[at]
    for j, extra in enumerate(costs.warmup):
        drafting += steps.starts * (drafted > j) * extra[np.minimum(at + j, len(extra) - 1)]
    if len(costs.first_pass):
        drafting += steps.starts * costs.first_pass[drafted, at]
    return TimeSplit(draft=drafting.sum(1), verify=verify, host=host)


def _drafting_in_parallel(costs: StepCosts, at: np.ndarray, drafted: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the time of a parallel draft's passes over each text, [R].

    After a accepted tokens a pass reads those, one of the target and d - 1 mask tokens, behind a fewer cached ones.
    """
    accepted = np.arange(after.shape[2])
    width, cached = drafted[:, :, None] + accepted, np.maximum(at[:, :, None] - accepted, 0)
    return (after * costs.wide[np.maximum(width - 1, 0), cached] * (drafted > 0)[:, :, None]).sum((1, 2))


def _drafting_by_head(costs: StepCosts, at: np.ndarray, drafted: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the time of an EAGLE-3 head's passes over each text, [R].

    After a accepted tokens its first pass reads a + 1 behind those before, and each other pass one more.
    """
    fed = np.arange(after.shape[2]) + 1
    first = (after * costs.wide[fed - 1, np.maximum(at[:, :, None] - fed, 0)] * (drafted > 0)[:, :, None]).sum((1, 2))
    starts, until = after.sum(2), np.concatenate([[0.0], np.cumsum(costs.draft)])
    chain = starts * (until[at + np.maximum(drafted - 1, 0)] - until[at])
    for j, extra in enumerate(costs.warmup[1:], 1):
        chain += starts * (drafted > j) * extra[np.minimum(at + j - 1, len(extra) - 1)]
    return first + chain.sum(1)


def _vllm_width(work: Workload, k: int) -> int:
    """Return the tokens of the first draft pass of vLLM's step: behind the target's k + 1, those it has not read."""
    return k + 1 + (k if work.parallel else 0 if work.eagle else 1)


def widest(work: Workload, k: int, server: Server | None = None) -> int:
    """Return the most tokens of a draft's pass, but for its prefill."""
    if server is not None:
        return _vllm_width(work, k)
    return 2 * k if work.parallel else k + 1 if work.eagle else 2


def total_ms(costs: StepCosts, work: Workload, by_k: Mapping[int, Steps]) -> dict[int, float]:
    """Return the milliseconds of all texts by K. by_k: as steps() returns them; K = 0: a server's draft that pauses."""
    return {k: float(expected_time(costs, work.prompt_tokens, each).total.sum()) for k, each in by_k.items()}


def scaled_drafting(costs: StepCosts, factor: float) -> StepCosts:
    """Return the costs if drafting took this share of its time."""
    names = ("draft", "warmup", "catch_up", "wide", "first_pass")
    return replace(costs, **{name: factor * getattr(costs, name) for name in names})
