"""Predict throughput for every K from acceptance and latency.

The time of a text is the expected number of its steps times the cost of a step.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

from draftlab.acceptance.expected import chain
from draftlab.drafters.base import DRAFTERS
from draftlab.errors import UserError
from draftlab.intervals import Interval, by_conversation, ratio_intervals
from draftlab.latency.cost_model import CostModel, Profile, alpha_for, closed_form_speedup
from draftlab.latency.steps import (
    ComputedStepCosts,
    Steps,
    expected_time,
    plain_ms,
    step_costs,
    steps,
    total_ms,
)
from draftlab.latency.workload import Workload
from draftlab.runs.atomic import writing

TITLE_WIDTH = 44  # characters of a line above a plot


@dataclass(frozen=True, slots=True, kw_only=True)
class KPrediction:
    """The predicted speed and speed-up with one K.

    Args:
        tokens_per_pass: Tokens per target pass, including the target's own token. Passes without a draft count only if
            the drafter may have no draft.
        speedup: Speed-up with its 95 % interval over conversations, which does not include the spread of latencies.
        beta: Time of a target pass over K + 1 tokens divided by the time of a pass over one token.
        closed_form_speedup: Speed-up by closed_form_speedup() at the mean context of the texts, as a check.
        free_draft: Speed-up if drafting took no time.
        perfect_draft: Speed-up if every drafted token were accepted.
        shares: Fractions of the time for "draft", "verify" and "host".
    """

    k: int
    tokens_per_pass: Interval
    speedup: Interval
    tokens_per_second: float
    beta: float
    closed_form_speedup: float
    free_draft: float
    perfect_draft: float
    shares: dict[str, float]

    @property
    def break_even_length(self) -> float:
        """Return the tokens per target pass at which this K neither gains nor loses time."""
        return self.tokens_per_pass.value / self.speedup.value


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPrediction:
    """The prediction for a draft and a target at one batch size.

    Args:
        c: Time of a one-token draft pass divided by the time of a one-token target pass. 0: the drafter has no model.
        rows: The prediction for each K.
        halved: Best speed-up over all K if one cost were halved, by the name of the cost (see LOSSES). A drafter
            without a model has no cost "draft".
    """

    name: str
    draft: str
    target: str
    batch: int
    c: float
    plain_tokens_per_second: float
    rows: list[KPrediction]
    halved: dict[str, float]
    notes: list[str]

    @property
    def best(self) -> KPrediction:
        return max(self.rows, key=lambda row: row.speedup.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestK:
    """The best K at one batch size and prompt length.

    Args:
        prompt_tokens: Length of all prompts. None: each prompt has its length in the data.
        k: Best K; 0 if the target alone is fastest.
        speedup: Speed-up with the best K.
        speedups: Speed-up by K, without K = 0.
    """

    batch: int
    prompt_tokens: int | None
    k: int
    speedup: float
    tokens_per_second: float
    speedups: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPrediction:
    """The prediction for one draft.

    Args:
        prediction: LatencyPrediction for every K, at the first batch size and the first prompt length.
        best_ks: Best K at every batch size and prompt length.
        model: Name and hash of the draft.
        selection: Hash of the prompts of the acceptance. None: unknown, or the acceptance is assumed.
    """

    prediction: LatencyPrediction
    best_ks: list[BestK]
    model: tuple[str, str | None]
    selection: str | None

    def as_dict(self) -> dict[str, Any]:
        rows = [to_jsonable_python(row) | {"break_even_length": row.break_even_length} for row in self.prediction.rows]
        return to_jsonable_python(self.prediction) | {
            "rows": rows,
            "best_k": self.prediction.best.k,
            "best_ks": to_jsonable_python(self.best_ks),
            "draft_model": self.model[0],
            "draft_sha256": self.model[1],
            "selection": self.selection,
        }


def predict_draft(
    draft: CostModel | None,
    target: CostModel,
    work: Workload,
    ks: Sequence[int],
    *,
    batches: Sequence[int],
    prompts: Sequence[int | None],
) -> DraftPrediction:
    """Predict a draft's speed-up for every K, and its best K at every batch size and prompt length.

    Args:
        draft: Latencies of the draft. None: the drafter has no model, and drafting takes no time.
        batches: Batch sizes to predict.
        prompts: Prompt lengths to predict; None stands for the lengths in the data.

    Raises:
        UserError: The prediction is impossible, see predict; or the acceptance was measured with another kind of draft.
    """
    work = _drafted_by(draft, work)
    works = {prompt: work if prompt is None else work.with_prompt_tokens(prompt) for prompt in prompts}
    prediction = predict(draft, target, works[prompts[0]], ks, batches[0])
    by_k = {k: steps(work, k) for k in ks}
    best_ks: list[BestK] = []
    for batch, prompt in product(batches, prompts):
        plain, ms = total_ms(draft, target, works[prompt], by_k, batch)
        fastest = min(ms, key=lambda k: ms[k])
        least = min(plain, ms[fastest])
        best = BestK(
            batch=batch,
            prompt_tokens=prompt,
            k=fastest if least < plain else 0,
            speedup=plain / least,
            tokens_per_second=1e3 * batch * work.tokens / least,
            speedups={k: plain / value for k, value in ms.items()},
        )
        best_ks.append(best)
    model = work.model or (draft and (draft.profile.name, draft.profile.sha256))
    assert model is not None  # a drafter without a model has a replay
    return DraftPrediction(prediction=prediction, best_ks=best_ks, model=model, selection=work.selection)


def _drafted_by(draft: CostModel | None, work: Workload) -> Workload:
    """Check that the acceptance was measured with the kind of draft that was profiled, and return its texts.

    Raises:
        UserError: The kinds of draft differ, or the draft is not used in every step.
    """
    if work.model is not None and work.texts.modelled is not None:
        raise UserError(
            f"{work.model[0]} drafts with its model only in steps without a draft of prompt lookup, which predict "
            "cannot time; measure the drafter with draftlab score"
        )
    if draft is None:
        return work
    profiled = draft.profile.drafter
    replayed = work.kind
    if work.model is None:  # assumed acceptance fits any draft
        return replace(work, kind=profiled)
    if not DRAFTERS.get(replayed, "acceptance").is_priced():
        raise UserError(f"{work.model[0]} has no model, and so no profile; leave --draft-profile out")
    # a parallel draft is profiled as a draft model
    if profiled != ("model" if replayed == "parallel" else replayed):
        raise UserError(
            f"{draft.profile.name} was profiled as drafter {profiled}, but its acceptance was measured as drafter "
            f"{replayed}; use a profile and an acceptance of the same drafter"
        )
    return work


def predict(
    draft: CostModel | None, target: CostModel, work: Workload, ks: Sequence[int], batch: int = 1
) -> LatencyPrediction:
    """Predict the throughput of a draft with a target for every K.

    draft: Latencies of the draft. None: the drafter has no model, and drafting takes no time.

    Raises:
        UserError: A context, width or batch is outside the profiles, a K is beyond those of the replay, or every text
            has one token.
    """
    if work.most is not None and max(ks) > work.most:
        raise UserError(
            f"--k {max(ks)}: the replay drafted at most {work.most} tokens per step; use --k 1-{work.most}, or replay "
            f"with --k {max(ks)}"
        )
    if not work.texts.lengths.any():
        raise UserError(
            "every text has one token, which the prefill emits, so there is nothing to predict; measure longer texts"
        )
    costs = step_costs(draft, target, work, max(ks), batch)
    plain = plain_ms(costs, work)
    by_k = {k: steps(work, k) for k in ks}
    times = [expected_time(costs, work.prompt_tokens, each).total for each in by_k.values()]
    counts = [chain(work.texts, k) for k in ks]

    def ratios(over: Sequence[np.ndarray], under: Sequence[np.ndarray]) -> list[Interval]:
        sums = (by_conversation(np.stack(each, 1), work.conversations) for each in (over, under))
        return ratio_intervals(*sums)

    if work.texts.drafted is None:
        lengths = ratios([c.steps + c.accepted for c in counts], [c.steps for c in counts])
    else:
        lengths = ratios([c.tokens for c in counts], [c.passes for c in counts])
    speedups = ratios([plain] * len(ks), times)
    c = 0.0
    if draft is not None:
        c = float(draft.steady_ms(batch, np.array(work.middle)) / costs.verify[0, work.middle - costs.first])
    name, described = _names(draft, work)
    notes = _notes(draft, target, work, max(ks), batch, max(costs.passes.by_width, default=1))
    if not speedups[0].exists:
        notes.append(_no_interval(work))
    return LatencyPrediction(
        name=name,
        draft=described,
        target=target.profile.describe(),
        batch=batch,
        c=c,
        plain_tokens_per_second=1e3 * batch * work.tokens / float(plain.sum()),
        rows=[
            _row(k, costs, work, by_k[k], length, speedup, batch)
            for k, length, speedup in zip(ks, lengths, speedups, strict=True)
        ],
        halved=_halved(costs, work, by_k, float(plain.sum()), free=draft is None),
        notes=notes,
    )


def _names(draft: CostModel | None, work: Workload) -> tuple[str, str]:
    """Return the name of a draft for tables and plots, and its name with what was profiled for titles."""
    if draft is not None:
        return f"{draft.profile.name}, {draft.profile.mode}", draft.profile.describe()
    assert work.model is not None  # the replay of a drafter without a model
    return work.model[0], f"{work.model[0]}, which has no model"


def best_k(draft: CostModel, target: CostModel, work: Workload, ks: Sequence[int]) -> tuple[int, float, float]:
    """Return the fastest K at batch size 1, its speed-up, and its tokens per second."""
    plain, ms = total_ms(draft, target, work, {k: steps(work, k) for k in ks}, 1)
    k = min(ms, key=lambda k: ms[k])
    return k, plain / ms[k], 1e3 * work.tokens / ms[k]


def required_length(prediction: LatencyPrediction, speedup: float) -> tuple[int, float] | None:
    """Return the K that reaches a speed-up with the lowest acceptance probability, and its tokens per target pass.

    Return None if the draft does not reach the speed-up even if all of its tokens are accepted.
    """
    needed = {row.k: speedup * row.break_even_length for row in prediction.rows}
    possible = {k: length for k, length in needed.items() if length <= k + 1}
    if not possible:
        return None
    k = min(possible, key=lambda k: alpha_for(max(1.0, possible[k]), k))
    return k, possible[k]


def verdict(prediction: LatencyPrediction) -> str:
    """Return text with the predicted speed-up, the largest cost, and what to change first."""
    row = prediction.best
    gain = prediction.best.speedup
    opening = "No clear difference" if gain.decides else "Speed-up"
    if gain.above(1):
        opening = "Faster"
    elif gain.below(1):
        opening = "Slower than no draft"
    shown = gain.as_speedup() if gain.exists else f"{gain.value:.2f}x"
    limit = max(prediction.halved, key=lambda name: prediction.halved[name])
    remedies = REMEDIES if "draft" in prediction.halved else REMEDIES | WITHOUT_MODEL
    halves = ", ".join(f"{LOSSES[name]} {value:.2f}x" for name, value in prediction.halved.items())
    return (
        f"{opening} (predicted): {shown} at K = {row.k}, with {row.tokens_per_pass.value:.2f} tokens per "
        f"target pass (break-even: {row.break_even_length:.2f}). Speed-up if only one cost were halved: {halves}. "
        f"{remedies[limit]}."
    )


LOSSES = {
    "draft": "drafting time",
    "acceptance": "rejections",
    "verify": "the extra time of verifying several tokens",
    "host": "time on the host",
}
REMEDIES = {
    "draft": "Drafting costs most: use a draft with fewer layers, then CUDA graphs or a smaller dtype",
    "acceptance": "Rejected tokens cost most: distil longer on the target's answers, or use a wider draft with as "
    "many layers",
    "verify": "Verification costs most: use a smaller batch, or kernels that read the weights once for all tokens",
    "host": "Host time costs most: use CUDA graphs, or sample and verify on the device",
}
# for drafters without a model
WITHOUT_MODEL = {
    "acceptance": "Rejected and missing drafts cost most: let a draft model draft where this drafter has no match "
    "(--drafter fallback:draft=DRAFT)",
}
ASSUMPTIONS = {
    "analytic": "latencies are computed from a device's constants, not measured",
    "fitted": "latencies are predicted by a latency law fitted to other shapes, not measured",
}


def _row(
    k: int,
    costs: ComputedStepCosts,
    work: Workload,
    steps_: Steps,
    length: Interval,
    speedup: Interval,
    batch: int,
) -> KPrediction:
    prompts = work.prompt_tokens
    plain = float(plain_ms(costs, work).sum())
    at = work.middle - costs.first
    unit = costs.verify[0, at] + costs.host[0]
    time = expected_time(costs, prompts, steps_)
    total = float(time.total.sum())
    drafting = costs.without_turns(at).drafting(k)[min(round(length.value - 1), k - 1), k, 0]
    free = expected_time(replace(costs, share=0.0), prompts, steps_)
    always = work.with_chances(np.ones_like(work.texts.chances))
    perfect = expected_time(costs, prompts, steps(always, k))
    return KPrediction(
        k=k,
        tokens_per_pass=length,
        speedup=speedup,
        tokens_per_second=1e3 * batch * work.tokens / total,
        beta=float(costs.verify[k, at] / costs.verify[0, at]),
        closed_form_speedup=closed_form_speedup(
            length.value,
            k,
            c=drafting / k / unit,
            beta=float(costs.verify[k, at] / unit),
            host=costs.host[k] / unit,
        ),
        free_draft=plain / float(free.total.sum()),
        perfect_draft=plain / float(perfect.total.sum()),
        shares={name: float(getattr(time, name).sum() / total) for name in ("draft", "verify", "host")},
    )


def _halved(
    costs: ComputedStepCosts, work: Workload, by_k: dict[int, Steps], plain: float, *, free: bool
) -> dict[str, float]:
    """Return the best speed-up over all K if one cost were halved, by the name of the cost.

    Args:
        plain: Milliseconds of decoding without a draft. They are the same in all cases.
        free: Whether drafting takes no time, so that its cost is left out.
    """
    likelier = work.with_chances((1 + work.texts.chances) / 2)
    cases = {
        "draft": (replace(costs, share=0.5), by_k),
        "acceptance": (costs, {k: steps(likelier, k) for k in by_k}),
        "verify": (replace(costs, verify=(costs.verify + costs.verify[0]) / 2), by_k),
        "host": (replace(costs, host=costs.host / 2), by_k),
    }
    if free:
        del cases["draft"]
    speedups: dict[str, float] = {}
    for name, (case, all_steps) in cases.items():
        times = [expected_time(case, work.prompt_tokens, s).total for s in all_steps.values()]
        speedups[name] = plain / min(float(time.sum()) for time in times)
    return speedups


def _notes(draft: CostModel | None, target: CostModel, work: Workload, k: int, batch: int, widest: int) -> list[str]:
    """Return notes on what limits the prediction's accuracy. widest: Number of tokens in the draft's widest pass."""
    first = int(work.prompt_tokens.min())
    last = int(work.prompt_tokens.max())
    contexts = first, work.longest + k - 1
    notes = [] if draft is None else draft.beyond("prompt", first + 1, last + 1)
    widths = [(target, k + 1)] if draft is None else [(draft, widest), (target, k + 1)]
    for cost, width in widths:
        notes += cost.beyond("width", 1, width) + cost.beyond("context", *contexts)
    kinds = {cost.profile.kind for cost, _ in widths}
    notes += [text for kind, text in ASSUMPTIONS.items() if kind in kinds]
    if draft is None:
        notes.append("a drafter without a model is assumed to draft in no time; draftlab score measures its time")
    else:
        notes += _differences(draft.profile, target.profile)
    if batch > 1:
        notes.append("host time is assumed to be that of batch size 1")
    return notes


def _no_interval(work: Workload) -> str:
    if work.model is None:
        return "there is no interval, because the acceptance is assumed"
    return f"there is no interval, because the acceptance of {work.model[0]} is that of one conversation"


def _differences(draft: Profile, target: Profile) -> list[str]:
    """Return a note for each condition in which the profiles of draft and target differ."""
    conditions = [(name, getattr(draft, name), getattr(target, name)) for name in ("device", "dtype", "mode")]
    return [f"the profiles of draft and target differ in {name}: {a} and {b}" for name, a, b in conditions if a != b]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicting:
    """The prediction for several drafts and a target.

    Attributes:
        drafts: The cost of each draft, and the acceptance of its texts. A drafter without a model has no cost.
        prompts: Prompt lengths in tokens. None: each prompt has its own length.
        notes: Sentences to add to each prediction.
        plot: Picture to write, or None.
    """

    target: CostModel
    drafts: Sequence[tuple[CostModel | None, Workload]]
    ks: Sequence[int]
    batches: Sequence[int]
    prompts: Sequence[int | None]
    notes: Sequence[str]
    plot: Path | None

    def run(self) -> list[DraftPrediction]:
        """Return a prediction for each draft, and draw the picture. Raises UserError: it cannot be written."""
        predicted = [
            predict_draft(draft, self.target, work, self.ks, batches=self.batches, prompts=self.prompts)
            for draft, work in self.drafts
        ]
        for each in predicted:
            each.prediction.notes.extend(self.notes)
        if self.plot is not None:
            _draw(self.plot, [each.prediction for each in predicted])
        return predicted


def _draw(plot: Path, predictions: list[LatencyPrediction]) -> None:
    """Draw the speed-up of every draft by K. The file's directory is made.

    Raises:
        UserError: The file cannot be written.
    """
    from draftlab.results.plots import Panel, save_panels, short  # matplotlib is optional

    first = predictions[0]
    ordered = sorted(predictions, key=lambda p: p.best.speedup.value, reverse=True)
    panel = Panel(
        title=textwrap.fill(f"{first.target}, batch {first.batch}", TITLE_WIDTH),
        x="K, drafted tokens per step",
        y="predicted speed-up",
        series={short(p.name): [(row.k, row.speedup.value) for row in p.rows] for p in ordered},
        level=(1, "no draft"),
    )
    with writing(plot):
        save_panels(plot, [panel])
