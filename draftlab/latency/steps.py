"""The expected number of steps to decode each text, and the time of the steps, by K.

R texts of at most n tokens, C contexts. Each kind of drafter computes its time per step (step_cost) from the latency of
its model's passes. As in the engine's measurements, both prefills are left out. A step that starts at token i has
prompt + i cached tokens. The first draft pass after the draft's prefill is assumed to take as long as a draft pass
after a target pass, which is slightly too slow. A step drafts only as many tokens as fit before the length limit
(Texts.room).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from draftlab.acceptance.expected import chain
from draftlab.drafters.base import DRAFTERS
from draftlab.drafters.passes import Passes
from draftlab.latency.cost_model import CostModel
from draftlab.latency.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The expected steps to decode each of R texts of at most n tokens at one K. K = 0 stands for plain decoding.

    Args:
        starts: Expected number of steps that start at each token, [R, n].
        drafted: Number of tokens that a step drafts if it starts at this token, [R, n].
        after: The values of `starts`, split by the number of tokens that the previous step accepted, [R, n, K + 1].
    """

    starts: np.ndarray
    drafted: np.ndarray
    after: np.ndarray


StepCost = Callable[[Passes, int, int], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedStepCosts:
    """Milliseconds of the parts of a step at one batch size: drafting, the target's pass, and the host's work.

    Args:
        step_cost: Function that returns the time of drafting, [C]. Its arguments are the drafter's passes, the number
            of tokens to draft, and the number of tokens that the step before accepted.
        verify: Time of the target's pass by number of drafted tokens, [K + 1, C].
        host: Time of sampling and verification on the host by number of drafted tokens, [K + 1].
        share: Factor by which the time of drafting is multiplied. 0 makes drafting free.
        tables: Results of drafting() computed so far, by K.
    """

    passes: Passes
    step_cost: StepCost
    verify: np.ndarray
    host: np.ndarray
    share: float = 1.0
    tables: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def first(self) -> int:
        """Return the number of cached tokens in the first column of C."""
        return int(self.passes.contexts[0])

    def without_turns(self, at: int) -> "ComputedStepCosts":
        """Return simpler costs: all steps have the context of column `at`, and no pass is slowed by another model."""
        passes = self.passes
        steady = self.passes.steady[at : at + 1]
        contexts = passes.contexts[at : at + 1]
        flat = replace(passes, contexts=contexts, steady=steady, warmup=passes.warmup[:0], by_width={1: steady})
        return replace(self, passes=flat, tables={})

    def drafting(self, k: int) -> np.ndarray:
        """Return the time of drafting, [K + 1, K + 1, C].

        The axes are the number of tokens that the step before accepted, the number of tokens to draft, and the context.
        """
        if k not in self.tables:
            passes = replace(self.passes, k=k)
            counts = range(k + 1)
            rows = [[self.step_cost(passes, drafted, accepted) for drafted in counts] for accepted in counts]
            self.tables[k] = np.array(rows)
        return self.share * self.tables[k]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Expected milliseconds to decode each text, [R]: for drafting, for the target's passes, and on the host."""

    draft: np.ndarray
    verify: np.ndarray
    host: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.draft + self.verify + self.host


def step_costs(draft: CostModel | None, target: CostModel, work: Workload, k: int, batch: int) -> ComputedStepCosts:
    """Return the costs of steps at every context of the texts.

    Args:
        draft: Latencies of the draft. None: the drafter has no model, and drafting takes no time.
        k: Largest K.

    Raises:
        UserError: A context, width or batch is outside a profile.
    """
    kind = DRAFTERS.get(work.kind, "acceptance")
    contexts = np.arange(int(work.prompt_tokens.min()) - kind.cache_lag, work.longest + k)
    drafting = target if draft is None else draft
    passes = Passes(
        draft=drafting,
        batch=batch,
        contexts=contexts,
        steady=drafting.steady_ms(batch, contexts),
        warmup=drafting.warmup_ms(batch, contexts),
        k=k,
        lag=kind.cache_lag,
    )
    verify = [target.steady_ms(batch, contexts)]
    verify += [target.forward_ms(drafted + 1, batch, contexts) for drafted in range(1, k + 1)]
    host = np.array([target.host_ms(drafted + 1) for drafted in range(k + 1)])
    return ComputedStepCosts(
        passes=passes,
        step_cost=no_time if draft is None else kind.step_cost,
        verify=np.stack(verify),
        host=host,
    )


def no_time(passes: Passes, k: int, accepted: int) -> np.ndarray:
    """Return the time of drafting by a drafter without a model, [C]: 0."""
    return np.zeros(len(passes.contexts))


def plain_ms(costs: ComputedStepCosts, work: Workload) -> np.ndarray:
    """Return the milliseconds to decode every text without a draft, [R]."""
    return expected_time(replace(costs, share=0.0), work.prompt_tokens, steps(work, 0)).total


def steps(work: Workload, k: int) -> Steps:
    """Return the expected steps to decode every text at one K."""
    texts = work.texts.at(k)
    chances = texts.chances
    inside = np.arange(chances.shape[1]) < texts.lengths[:, None]
    drafted = np.minimum(k, texts.room()) * inside
    starts = chain(texts, k).starts
    after = _after(starts, chances, drafted, k) * inside[:, :, None]
    return Steps(starts=starts, drafted=drafted, after=after)


def _after(starts: np.ndarray, chances: np.ndarray, drafted: np.ndarray, k: int) -> np.ndarray:
    """Split the steps that start at each token by the number of tokens that the previous step accepted, [R, n, K + 1].

    For the first step, the prefill counts as a previous step with 0 accepted tokens.
    """
    n = starts.shape[1]
    after = np.zeros((*starts.shape, k + 1))
    alive = starts
    after[:, 0, 0] = starts[:, 0]
    # alive: steps that have accepted at least a tokens, by the token at which they started
    for a in range(min(k + 1, n - 1)):
        chance = np.zeros_like(starts)
        if a < k:
            chance[:, : n - a] = chances[:, a:, a] if chances.ndim == 3 else chances[:, a:]
        chance *= drafted > a
        after[:, a + 1 :, a] = (alive * (1 - chance))[:, : n - a - 1]
        alive = alive * chance
    return after


def expected_time(costs: ComputedStepCosts, prompt_tokens: np.ndarray, steps: Steps) -> TimeSplit:
    """Return the expected time to decode every text, from its steps and their costs."""
    drafted = steps.drafted
    accepted = np.arange(steps.after.shape[2])
    last = costs.verify.shape[1] - len(costs.host)
    at = np.minimum(prompt_tokens[:, None] - costs.first + np.arange(drafted.shape[1]), last)
    drafting = costs.drafting(len(accepted) - 1)[accepted, drafted[:, :, None], at[:, :, None]]
    return TimeSplit(
        draft=(steps.after * drafting).sum((1, 2)),
        verify=(steps.starts * costs.verify[drafted, at]).sum(1),
        host=(steps.starts * costs.host[drafted]).sum(1),
    )


def total_ms(
    draft: CostModel | None, target: CostModel, work: Workload, by_k: Mapping[int, Steps], batch: int
) -> tuple[float, dict[int, float]]:
    """Return the milliseconds to decode all texts without a draft, and the milliseconds with the draft by K.

    draft: As in step_costs.

    Raises:
        UserError: A context, width or batch is outside a profile.
    """
    costs = step_costs(draft, target, work, max(by_k), batch)
    ms = dict[int, float]()
    for k, each in by_k.items():
        ms[k] = float(expected_time(costs, work.prompt_tokens, each).total.sum())
    return float(plain_ms(costs, work).sum()), ms
