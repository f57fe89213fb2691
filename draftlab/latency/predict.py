"""Acceptance and latency made into throughput: every step of a replay at its own cost, for every K.

R texts of at most n tokens, C contexts. The counter is the engine's: the target's prefill is left out, the draft's is
part of its first step, and a step that begins at token i stands behind prompt + i cached tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from draftlab.acceptance.expected import Texts, chain, texts_of, visits
from draftlab.errors import UserError
from draftlab.intervals import Interval, ratio_intervals
from draftlab.latency.cost_model import CostModel, alpha_for, closed_form_speedup
from draftlab.results.decoding import Generation
from draftlab.results.score import Score

if TYPE_CHECKING:  # needs torch
    from draftlab.target_outputs.replay import Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is decoded: texts with their chances, and the length of each prompt, [R]."""

    texts: Texts
    prompt_tokens: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The expected steps at one K, by the token at which they begin, [R, n] each. K = 0 is plain decoding."""

    begun: np.ndarray
    drafted: np.ndarray
    behind: np.ndarray  # of those begun, with a draft cache one token behind: all that the step before drafted stood


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Milliseconds of a pair at one batch, by context; contexts count from first."""

    first: int
    draft: np.ndarray  # [C] one draft pass over one token behind another, and drawing from it
    warmup: np.ndarray  # [N, C] more for the first N passes of a step, behind the target's
    catch_up: np.ndarray  # [C] more if the first one takes two tokens
    draft_prefill: np.ndarray  # [R] more for the draft's very first pass, over the prompt
    verify: np.ndarray  # [K + 1, C] the target's pass, by tokens drafted
    host: np.ndarray  # [K + 1] accepting and drawing, by tokens drafted


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Milliseconds of each text, [R]."""

    draft: np.ndarray
    verify: np.ndarray
    host: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.draft + self.verify + self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One K. Lengths are tokens per target pass, the target's own included."""

    k: int
    tokens_per_pass: Interval
    speedup: Interval  # over texts; what the latencies' own spread adds is not in it
    tokens_per_second: float
    beta: float
    closed_form_speedup: float  # by the closed form at the middle of the texts: a sanity line
    free_draft: float  # speed-up if drafting took no time
    perfect_draft: float  # speed-up if everything were accepted
    split: dict[str, float]  # shares of the time: draft, verify, host

    @property
    def break_even_length(self) -> float:
        """What a step costs in plain tokens."""
        return self.tokens_per_pass.value / self.speedup.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A pair at one batch size."""

    name: str  # of the draft, and how it runs
    draft: str
    target: str
    batch: int
    c: float
    plain_tokens_per_second: float
    rows: list[Row]
    halved: dict[str, float]  # best speed-up if half of what is lost to one thing were not
    notes: list[str]

    @property
    def best(self) -> Row:
        return max(self.rows, key=lambda row: row.speedup.value)


def constant_workload(alpha: float, *, tokens: int, prompt_tokens: int) -> Workload:
    """One text of which every token is accepted with the same chance; its first comes with the prefill."""
    return Workload(texts=texts_of([np.full(tokens - 1, alpha)]), prompt_tokens=np.array([prompt_tokens]))


def workload_of(chances: list[np.ndarray], prompts: Sequence[int], limits: Sequence[int] | None = None) -> Workload:
    """limits: tokens behind the first at which decoding would have stopped; left out: each text was cut there."""
    return Workload(
        texts=texts_of(chances, None if limits is None else np.array(limits)), prompt_tokens=np.array(prompts)
    )


def workload_of_replay(replay: "Replay") -> Workload:
    """What a draft would have been accepted for on a trace."""
    return Workload(texts=replay.padded(), prompt_tokens=np.array([text.prompt_tokens for text in replay.texts]))


def workload_of_score(score: Score) -> Workload:
    """What a score saw: a token was accepted or not. Tokens that the target added behind a full acceptance were never
    proposed; they get the share accepted in the last place of the largest K, of those that reached it.

    Greedily every K decodes the same text, and what one K left open another has seen.

    Raises:
        UserError: servers decoded, which do not say what came of each token.
    """
    if score.served:
        raise UserError(f"{score.name} was scored on servers, which do not say what came of each token; use a replay")
    deepest = max(score.speculative)
    ks = sorted(score.speculative, reverse=True) if score.identical else [deepest]
    unseen = score.acceptance(deepest).conditional_acceptance[-1]
    seen: dict[int, np.ndarray] = {}
    for k in ks:
        for generation in score.generations(k):
            row = _outcomes(generation)
            old = seen.setdefault(generation.prompt, row)
            old[np.isnan(old)] = row[np.isnan(old)]
    chances = [np.nan_to_num(seen[prompt], nan=unseen) for prompt in sorted(seen)]
    limit = score.conditions.max_tokens - 1
    lengths = [score.prompts[i].tokens if score.prompts else score.conditions.prompt_tokens or 0 for i in sorted(seen)]
    return workload_of(chances, lengths, [limit] * len(chances))


def predict(draft: CostModel, target: CostModel, work: Workload, ks: Sequence[int], batch: int = 1) -> Prediction:
    """What each K would give.

    Raises:
        UserError: a context, width or batch outside the profiles, or texts of one token.
    """
    if not work.texts.lengths.any():
        raise UserError("no text goes on behind its first token, which comes with the prefill: nothing to predict from")
    paid = step_costs(draft, target, work, max(ks), batch)
    plain = expected_time(paid, work.prompt_tokens, steps(work, 0)).total
    tokens = float(work.texts.lengths.sum())
    middle = int((work.prompt_tokens + work.texts.lengths / 2).mean())
    at = middle - paid.first
    free = _drafting(paid, 0)
    taken = {k: steps(work, k) for k in ks}
    perfect = with_chances(work, np.ones_like(work.texts.chances))
    found = {k: expected_time(paid, work.prompt_tokens, taken[k]) for k in ks}
    counts = [chain(work.texts, k) for k in ks]
    lengths = ratio_intervals(
        np.stack([c.steps + c.accepted for c in counts], 1), np.stack([c.steps for c in counts], 1)
    )
    times = np.stack([s.total for s in found.values()], 1)
    speedups = ratio_intervals(np.stack([plain] * len(ks), 1), times)

    def row(k: int, length: Interval, speedup: Interval) -> Row:
        unit = paid.verify[0, at] + paid.host[0]
        spent = float(found[k].total.sum())
        return Row(
            k=k,
            tokens_per_pass=length,
            speedup=speedup,
            tokens_per_second=1e3 * batch * tokens / spent,
            beta=float(paid.verify[k, at] / paid.verify[0, at]),
            closed_form_speedup=closed_form_speedup(
                length.value,
                k,
                c=float(paid.draft[at] / unit),
                beta=float(paid.verify[k, at] / unit),
                host=float(paid.host[k] / unit),
            ),
            free_draft=float(plain.sum() / expected_time(free, work.prompt_tokens, taken[k]).total.sum()),
            perfect_draft=float(plain.sum() / expected_time(paid, work.prompt_tokens, steps(perfect, k)).total.sum()),
            split={name: float(getattr(found[k], name).sum() / spent) for name in ("draft", "verify", "host")},
        )

    return Prediction(
        name=f"{draft.profile.name}, {draft.profile.mode}",
        draft=draft.profile.describe(),
        target=target.profile.describe(),
        batch=batch,
        c=float(draft.steady_ms(batch, np.array(middle)) / paid.verify[0, at]),
        plain_tokens_per_second=1e3 * batch * tokens / float(plain.sum()),
        rows=[row(k, a, b) for k, a, b in zip(ks, lengths, speedups, strict=True)],
        halved=_halved(paid, work, taken, float(plain.sum())),
        notes=_notes(draft, target, work, max(ks), batch),
    )


def step_costs(draft: CostModel, target: CostModel, work: Workload, k: int, batch: int) -> StepCosts:
    """LatencyCurves read off once for every context that occurs."""
    first = int(work.prompt_tokens.min())
    contexts = np.arange(first, int((work.prompt_tokens + work.texts.lengths).max()) + k)
    one, two = (draft.forward_ms(width, batch, contexts) for width in (1, 2))
    return StepCosts(
        first=first,
        draft=draft.steady_ms(batch, contexts) + draft.host_ms(1),
        warmup=draft.warmup_ms(batch, contexts),
        catch_up=np.concatenate([two[:1], two[:-1]]) - one,  # two tokens begin one earlier
        draft_prefill=batch * draft.prefill_ms(work.prompt_tokens + 1) - one[work.prompt_tokens - first],
        verify=np.stack(
            [target.steady_ms(batch, contexts), *(target.forward_ms(j + 1, batch, contexts) for j in range(1, k + 1))]
        ),
        host=np.array([target.host_ms(j + 1) for j in range(k + 1)]),
    )


def steps(work: Workload, k: int) -> Steps:
    """Where steps begin. Whoever accepts all of K tokens never fed the last of them: the next draft pass takes two."""
    chances, n = work.texts.chances, work.texts.chances.shape[1]
    inside = np.arange(n) < work.texts.lengths[:, None]
    drafted = np.minimum(k, work.texts.room()) * inside
    begun = visits(chances, drafted) * inside
    behind = np.zeros_like(begun)
    if 0 < k < n:
        stood = begun[:, : n - k - 1] * (drafted[:, : n - k - 1] == k)
        for j in range(k):
            stood = stood * chances[:, j : j + n - k - 1]
        behind[:, k + 1 :] = stood * (drafted[:, k + 1 :] > 0)
    return Steps(begun=begun, drafted=drafted, behind=behind)


def expected_time(paid: StepCosts, prompts: np.ndarray, taken: Steps) -> TimeSplit:
    """Expected time of every text, [R]."""
    drafted, n = taken.drafted, taken.drafted.shape[1]
    at = np.minimum(prompts[:, None] - paid.first + np.arange(n), len(paid.draft) - len(paid.host))
    until = np.concatenate([[0.0], np.cumsum(paid.draft)])
    drafting = taken.begun * (until[at + drafted] - until[at]) + taken.behind * paid.catch_up[at]
    for j, more in enumerate(paid.warmup):
        drafting += taken.begun * (drafted > j) * more[np.minimum(at + j, len(more) - 1)]
    return TimeSplit(
        draft=drafting.sum(1) + np.where(drafted[:, 0] > 0, paid.draft_prefill, 0.0),
        verify=(taken.begun * paid.verify[drafted, at]).sum(1),
        host=(taken.begun * paid.host[drafted]).sum(1),
    )


def with_chances(work: Workload, chances: np.ndarray) -> Workload:
    """The same texts, were their tokens accepted otherwise: [R, n]."""
    return replace(work, texts=replace(work.texts, chances=chances))


def with_prompt_tokens(work: Workload, prompt_tokens: int) -> Workload:
    """The same texts behind prompts of another length."""
    return replace(work, prompt_tokens=np.full_like(work.prompt_tokens, prompt_tokens))


def best_k(
    draft: CostModel, target: CostModel, work: Workload, ks: Sequence[int], batch: int
) -> tuple[int, float, float]:
    """The fastest K, its speed-up, and tokens per second of the whole batch."""
    paid = step_costs(draft, target, work, max(ks), batch)
    plain, *rest = (float(expected_time(paid, work.prompt_tokens, steps(work, k)).total.sum()) for k in (0, *ks))
    total = dict(zip(ks, rest, strict=True))
    k = min(ks, key=lambda k: total[k])
    return k, plain / total[k], 1e3 * batch * float(work.texts.lengths.sum()) / total[k]


def required_length(prediction: Prediction, speedup: float) -> tuple[int, float] | None:
    """The K at which this draft would have to be accepted least to give speedup, and that acceptance length.

    None: not even a perfect draft at this price gets there.
    """
    wanted = {row.k: speedup * row.break_even_length for row in prediction.rows}
    within = {k: length for k, length in wanted.items() if length <= k + 1}
    if not within:
        return None
    k = min(within, key=lambda k: alpha_for(max(1.0, within[k]), k))
    return k, within[k]


def verdict(prediction: Prediction) -> str:
    """What the pair would gain, what limits it, and what to change first."""
    row = prediction.best
    gain, n = row.speedup, row.speedup.n
    spread = f"{gain.low:.2f} to {gain.high:.2f}" if n > 1 else "one text"
    opening = "Faster" if gain.low > 1 else "Slower than no draft" if gain.high < 1 else "No clear difference"
    first = max(prediction.halved, key=lambda name: prediction.halved[name])
    halves = ", ".join(f"{LOSSES[name]} {value:.2f}x" for name, value in prediction.halved.items())
    return (
        f"{opening}, by prediction. K = {row.k} gives {gain.value:.2f}x ({spread}): "
        f"{row.tokens_per_pass.value:.2f} tokens per target pass, break-even {row.break_even_length:.2f}. "
        f"Halving one loss would give: {halves}. "
        f"So {REMEDIES[first]}."
    )


LOSSES = {
    "draft": "time to draft",
    "acceptance": "rejections",
    "verify": "what verifying costs beyond one token",
    "host": "time on the host",
}
REMEDIES = {
    "draft": "draft latency is the limit: fewer layers first, then graphs or a smaller dtype",
    "acceptance": "acceptance is the limit: distil longer, on the target's own text, or take a bigger draft as deep",
    "verify": "verification is the limit: fewer rows at once, or kernels that read the weights once for all tokens",
    "host": "the engine's own work is the limit: capture steps in graphs, or accept and sample on the device",
}


def _drafting(paid: StepCosts, share: float) -> StepCosts:
    """The same pair if drafting took this share of its time."""
    return replace(
        paid, **{name: share * getattr(paid, name) for name in ("draft", "warmup", "catch_up", "draft_prefill")}
    )


def _halved(paid: StepCosts, work: Workload, taken: dict[int, Steps], plain: float) -> dict[str, float]:
    """Best speed-up over plain decoding as it is, if half of one loss were gone."""
    likelier = with_chances(work, (1 + work.texts.chances) / 2)
    cases = {
        "draft": (_drafting(paid, 0.5), taken),
        "acceptance": (paid, {k: steps(likelier, k) for k in taken}),
        "verify": (replace(paid, verify=(paid.verify + paid.verify[0]) / 2), taken),
        "host": (replace(paid, host=paid.host / 2), taken),
    }
    return {
        name: max(
            plain / float(expected_time(prices, work.prompt_tokens, each).total.sum()) for each in all_steps.values()
        )
        for name, (prices, all_steps) in cases.items()
    }


def _outcomes(generation: Generation) -> np.ndarray:
    """1 accepted, 0 rejected, nan never proposed: of the tokens behind the first, [n]."""
    row = np.full(generation.tokens - 1, np.nan)
    begin = 0
    for drafted, accepted, emitted in zip(generation.drafted, generation.accepted, generation.emitted, strict=True):
        row[begin : begin + min(accepted, emitted)] = 1
        if accepted < drafted and emitted > accepted:
            row[begin + accepted] = 0
        begin += emitted
    return row


def _notes(draft: CostModel, target: CostModel, work: Workload, k: int, batch: int) -> list[str]:
    first, last = int(work.prompt_tokens.min()), int(work.prompt_tokens.max())
    contexts = first, int((work.prompt_tokens + work.texts.lengths).max()) + k - 1
    notes = draft.beyond("prompt", first + 1, last + 1)
    for cost, width in ((draft, 2), (target, k + 1)):
        notes += cost.beyond("width", 1, width) + cost.beyond("context", *contexts)
    kinds = {cost.profile.kind for cost in (draft, target)}
    if "analytic" in kinds:
        notes.append("computed from constants of devices, not measured")
    if "fitted" in kinds:
        notes.append("by a latency law of other shapes, not measured")
    for name in ("device", "dtype", "mode"):
        a, b = getattr(draft.profile, name), getattr(target.profile, name)
        if a != b:
            notes.append(f"draft and target profiles differ in {name}: {a}, {b}")
    if batch > 1:
        notes.append("time on the host is taken as for one row")
    return notes
