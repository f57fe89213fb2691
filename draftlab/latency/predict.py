"""Predict throughput from acceptance and latency: the expected steps of every text, each at its own cost, for every K.

R texts of at most n tokens, C contexts. A parallel draft reads the tokens of the step before and K - 1 mask tokens in
one pass, up to 2 K wide. An EAGLE-3 head's first pass of a step is over the tokens since the last. Time is counted as
the engine counts it: both prefills are left out, and a step that starts at token i has prompt + i cached tokens. The
first pass after the draft's prefill counts as one after the target's, which is a little too much.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from draftlab.acceptance.expected import chain, visits
from draftlab.errors import UserError
from draftlab.intervals import Interval, ratio_intervals
from draftlab.latency.cost_model import CostModel, alpha_for, closed_form_speedup
from draftlab.latency.workload import Workload


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
    eagle: bool = False

    def drafting(self, k: int, accepted: float, at: int) -> float:
        """Return the time of drafting k tokens at a context, after a step that accepted so many."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The prediction for one K."""

    k: int
    tokens_per_pass: Interval  # including the target's own
    speedup: Interval  # over texts, without the spread of latencies
    tokens_per_second: float
    beta: float
    closed_form_speedup: float  # at the middle of the texts, as a check
    free_draft: float  # speed-up if drafting took no time
    perfect_draft: float  # speed-up if every token were accepted
    shares: dict[str, float]  # of the time: draft, verify, host

    @property
    def break_even_length(self) -> float:
        """Tokens per target pass at which this K neither gains nor loses."""
        return self.tokens_per_pass.value / self.speedup.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A pair at one batch size."""

    name: str  # of the draft, and its mode
    draft: str
    target: str
    batch: int
    c: float
    plain_tokens_per_second: float
    rows: list[Row]
    halved: dict[str, float]  # best speed-up if one kind of loss were halved
    notes: list[str]

    @property
    def best(self) -> Row:
        return max(self.rows, key=lambda row: row.speedup.value)


def predict(draft: CostModel, target: CostModel, work: Workload, ks: Sequence[int], batch: int = 1) -> Prediction:
    """Predict the throughput of a pair for every K.

    Raises:
        UserError: a context, width or batch outside the profiles, or texts of one token.
    """
    if not work.texts.lengths.any():
        raise UserError("every text ends with its first token, which comes with the prefill: nothing to predict")
    costs = step_costs(draft, target, work, max(ks), batch)
    plain = expected_time(costs, work.prompt_tokens, steps(work, 0)).total
    tokens = float(work.texts.lengths.sum())
    middle = int((work.prompt_tokens + work.texts.lengths / 2).mean())
    by_k = {k: steps(work, k) for k in ks}
    times = {k: expected_time(costs, work.prompt_tokens, by_k[k]) for k in ks}
    counts = [chain(work.texts, k) for k in ks]
    emitted, passes = np.stack([c.steps + c.accepted for c in counts], 1), np.stack([c.steps for c in counts], 1)
    lengths = ratio_intervals(emitted, passes)
    speedups = ratio_intervals(np.stack([plain] * len(ks), 1), np.stack([t.total for t in times.values()], 1))
    return Prediction(
        name=f"{draft.profile.name}, {draft.profile.mode}",
        draft=draft.profile.describe(),
        target=target.profile.describe(),
        batch=batch,
        c=float(draft.steady_ms(batch, np.array(middle)) / costs.verify[0, middle - costs.first]),
        plain_tokens_per_second=1e3 * batch * tokens / float(plain.sum()),
        rows=[
            _row(k, costs, work, by_k[k], times[k], length, speedup, float(plain.sum()), batch)
            for k, length, speedup in zip(ks, lengths, speedups, strict=True)
        ],
        halved=_halved(costs, work, by_k, float(plain.sum())),
        notes=_notes(draft, target, work, max(ks), batch),
    )


def step_costs(draft: CostModel, target: CostModel, work: Workload, k: int, batch: int) -> StepCosts:
    """Return the costs for every context that occurs."""
    first = int(work.prompt_tokens.min()) - work.eagle  # a head reads the prompt's last place again
    contexts = np.arange(first, work.longest + k)
    single, two = (draft.forward_ms(width, batch, contexts) for width in (1, 2))
    widths = range(1, _widest(work, k) + 1 if work.by_age else 1)
    return StepCosts(
        first=first,
        draft=draft.steady_ms(batch, contexts) + draft.host_ms(1),
        warmup=draft.warmup_ms(batch, contexts),
        catch_up=np.concatenate([two[:1], two[:-1]]) - single,  # a pass over two tokens starts one token earlier
        verify=np.stack(
            [target.steady_ms(batch, contexts), *(target.forward_ms(j + 1, batch, contexts) for j in range(1, k + 1))]
        ),
        host=np.array([target.host_ms(j + 1) for j in range(k + 1)]),
        wide=np.array([draft.forward_ms(w, batch, contexts) + draft.host_ms(1) for w in widths]),
        eagle=work.eagle,
    )


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
    if steps.after is not None:
        drafting_time = _drafting_by_head if costs.eagle else _drafting_in_parallel
        return TimeSplit(draft=drafting_time(costs, at, drafted, steps.after), verify=verify, host=host)
    until = np.concatenate([[0.0], np.cumsum(costs.draft)])
    drafting = steps.starts * (until[at + drafted] - until[at]) + steps.catching_up * costs.catch_up[at]
    for j, extra in enumerate(costs.warmup):
        drafting += steps.starts * (drafted > j) * extra[np.minimum(at + j, len(extra) - 1)]
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


def _widest(work: Workload, k: int) -> int:
    """Return the most tokens of a draft's pass, but for its prefill."""
    return 2 * k if work.parallel else k + 1 if work.eagle else 2


def best_k(
    draft: CostModel, target: CostModel, work: Workload, ks: Sequence[int], batch: int
) -> tuple[int, float, float]:
    """Return the fastest K, its speed-up, and tokens per second of the whole batch."""
    costs = step_costs(draft, target, work, max(ks), batch)
    total = {k: float(expected_time(costs, work.prompt_tokens, steps(work, k)).total.sum()) for k in (0, *ks)}
    k = min(ks, key=lambda k: total[k])
    return k, total[0] / total[k], 1e3 * batch * float(work.texts.lengths.sum()) / total[k]


def required_length(prediction: Prediction, speedup: float) -> tuple[int, float] | None:
    """Return the K at which a speed-up needs the lowest acceptance, and the tokens per pass that it needs there.

    None: not even a perfect draft of this latency reaches it.
    """
    needed = {row.k: speedup * row.break_even_length for row in prediction.rows}
    possible = {k: length for k, length in needed.items() if length <= k + 1}
    if not possible:
        return None
    k = min(possible, key=lambda k: alpha_for(max(1.0, possible[k]), k))
    return k, possible[k]


def verdict(prediction: Prediction) -> str:
    """Return in words what the pair gains, what limits it, and what to change first."""
    row, gain = prediction.best, prediction.best.speedup
    opening = "Faster" if gain.low > 1 else "Slower than no draft" if gain.high < 1 else "No clear difference"
    limit = max(prediction.halved, key=lambda name: prediction.halved[name])
    halves = ", ".join(f"{LOSSES[name]} {value:.2f}x" for name, value in prediction.halved.items())
    return (
        f"{opening} (predicted): {gain.as_speedup()} at K = {row.k}, with {row.tokens_per_pass.value:.2f} tokens per "
        f"target pass (break-even: {row.break_even_length:.2f}). Halving one loss would give: {halves}. "
        f"{REMEDIES[limit]}."
    )


LOSSES = {
    "draft": "drafting time",
    "acceptance": "rejections",
    "verify": "the extra time of verifying several tokens",
    "host": "time on the host",
}
REMEDIES = {
    "draft": "Draft latency is the limit: use fewer layers first, then CUDA graphs or a smaller dtype",
    "acceptance": "Acceptance is the limit: distil longer, on the target's output, or use a wider draft of this depth",
    "verify": "Verification is the limit: use a smaller batch, or kernels that read the weights once for all tokens",
    "host": "Time on the host is the limit: use CUDA graphs, or sample and verify on the device",
}


def _row(
    k: int,
    costs: StepCosts,
    work: Workload,
    steps_: Steps,
    time: TimeSplit,
    length: Interval,
    speedup: Interval,
    plain_ms: float,
    batch: int,
) -> Row:
    at = int((work.prompt_tokens + work.texts.lengths / 2).mean()) - costs.first
    unit, total = costs.verify[0, at] + costs.host[0], float(time.total.sum())
    free = expected_time(_scaled_drafting(costs, 0), work.prompt_tokens, steps_)
    perfect = steps(work.with_chances(np.ones_like(work.texts.chances)), k)
    return Row(
        k=k,
        tokens_per_pass=length,
        speedup=speedup,
        tokens_per_second=1e3 * batch * float(work.texts.lengths.sum()) / total,
        beta=float(costs.verify[k, at] / costs.verify[0, at]),
        closed_form_speedup=closed_form_speedup(
            length.value,
            k,
            c=costs.drafting(k, length.value - 1, at) / k / unit,
            beta=float(costs.verify[k, at] / unit),
            host=float(costs.host[k] / unit),
        ),
        free_draft=plain_ms / float(free.total.sum()),
        perfect_draft=plain_ms / float(expected_time(costs, work.prompt_tokens, perfect).total.sum()),
        shares={name: float(getattr(time, name).sum() / total) for name in ("draft", "verify", "host")},
    )


def _scaled_drafting(costs: StepCosts, factor: float) -> StepCosts:
    """Return the costs if drafting took this share of its time."""
    names = ("draft", "warmup", "catch_up", "wide")
    return replace(costs, **{name: factor * getattr(costs, name) for name in names})


def _halved(costs: StepCosts, work: Workload, by_k: dict[int, Steps], plain_ms: float) -> dict[str, float]:
    """Return the best speed-up over plain decoding as it is, if one kind of loss were halved."""
    likelier = work.with_chances((1 + work.texts.chances) / 2)
    cases = {
        "draft": (_scaled_drafting(costs, 0.5), by_k),
        "acceptance": (costs, {k: steps(likelier, k) for k in by_k}),
        "verify": (replace(costs, verify=(costs.verify + costs.verify[0]) / 2), by_k),
        "host": (replace(costs, host=costs.host / 2), by_k),
    }
    return {
        name: plain_ms / min(float(expected_time(case, work.prompt_tokens, s).total.sum()) for s in all_steps.values())
        for name, (case, all_steps) in cases.items()
    }


def _notes(draft: CostModel, target: CostModel, work: Workload, k: int, batch: int) -> list[str]:
    first, last = int(work.prompt_tokens.min()), int(work.prompt_tokens.max())
    contexts = first, work.longest + k - 1
    notes = draft.beyond("prompt", first + 1, last + 1)
    for cost, width in ((draft, _widest(work, k)), (target, k + 1)):
        notes += cost.beyond("width", 1, width) + cost.beyond("context", *contexts)
    kinds = {cost.profile.kind for cost in (draft, target)}
    if "analytic" in kinds:
        notes.append("latencies are computed from constants of devices, not measured")
    if "fitted" in kinds:
        notes.append("latencies follow a latency law fitted to other shapes; they are not measured")
    for name in ("device", "dtype", "mode"):
        a, b = getattr(draft.profile, name), getattr(target.profile, name)
        if a != b:
            notes.append(f"draft and target profiles differ in {name}: {a}, {b}")
    if batch > 1:
        notes.append("time on the host is assumed to be that of one row")
    return notes
