"""Predict the seconds of every request at every K, before any request is timed with a draft.

The target has written the text of each prompt without a draft. A replay over these texts gives the acceptance at every
K (acceptance/expected.py), and the time of single passes gives the cost of a step (latency/steps.py). The predicted
decoding is scaled by what plain decoding took over what its passes add up to, which cancels what both have in common.

R prompts, n tokens of a text, K drafted tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from draftlab.acceptance import expected
from draftlab.acceptance.token_logprobs import Text, TokenLogprobs
from draftlab.intervals import Timings, by_conversation, speedup
from draftlab.latency.cost_model import CostModel, Profile
from draftlab.latency.profiler import LatencyCurves
from draftlab.latency.steps import expected_time, step_costs, steps
from draftlab.latency.workload import Workload
from draftlab.results.decoding import Expected, Generation
from draftlab.results.score import Latency, Prediction

# A drafter whose predicted speed-up is at least the best one divided by this may be the fastest, so it is timed.
# benchmarks/results/passes_in_place.json: predicted requests were off by 14 % at most.
MARGIN = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTexts:
    """The texts that the target wrote without a draft, and what they took.

    Args:
        texts: Prompt and completion of each prompt, [R].
        limits: Number of tokens at which decoding stops, of each text, [R].
        conversations: Number of the conversation of each prompt, [R].
        runs: Timed generations, in the order of the prompts, [R].
        batch: Number of texts that were decoded at once.
    """

    texts: Sequence[Text]
    limits: np.ndarray
    conversations: Sequence[int]
    runs: Sequence[Generation]
    batch: int

    @property
    def prompt_tokens(self) -> np.ndarray:
        return np.array([len(prompt) for prompt, _ in self.texts])

    @property
    def host_ms(self) -> float:
        """Return the milliseconds of a step outside the target's pass, for the whole batch."""
        passes = sum(len(run.emitted) for run in self.runs)
        return 1e3 * self.batch * sum(run.host_seconds for run in self.runs) / max(1, passes)

    def replayed(self, scored: Sequence[TokenLogprobs], logprobs: Sequence[np.ndarray]) -> expected.Texts:
        """Return the texts with the acceptance probability of each token after the first.

        Args:
            scored: A drafter's log-probabilities of the tokens of each text.
            logprobs: Those of the target; 0 if a token is accepted where the drafter's token equals it.
        """
        pairs = zip(scored, logprobs, strict=True)
        chances = [each.chances(own)[1:] for each, own in pairs]
        drafted = [each.drafted[1:] for each in scored if each.drafted is not None]
        modelled = [each.modelled[1:] for each in scored if each.modelled is not None]
        return expected.texts_of(chances, self.limits - 1, drafted or None, modelled or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the steps of a drafter cost.

    Args:
        target, draft: Latencies of passes. draft is the target's if the drafter has no model.
        kind: Kind of the drafter, as --drafter names it, whose step_cost counts the draft's passes.
        prefill_ms: Milliseconds of the draft's pass over each prompt, [R].
        calls_ms: Milliseconds of each call of the drafter besides passes of its model: all of drafting without a model,
            else work on the host.
        has_model: Whether the drafter has a model.
    """

    target: CostModel
    draft: CostModel
    kind: str
    prefill_ms: np.ndarray
    calls_ms: float
    has_model: bool


def cost_model(name: str, curves: LatencyCurves, prefill: Latency, host_ms: float) -> CostModel:
    """Return measured latencies as a cost model. prefill: Latency of a pass over a prompt.

    host_ms: Milliseconds of a step outside the target's pass.
    """
    host = [Latency(width=1, median_ms=host_ms, low_ms=host_ms, high_ms=host_ms, n=1)]
    profile = Profile(
        kind="measured",
        name=name,
        device="",
        dtype="",
        mode="eager",
        forward=curves.forward,
        steady=curves.steady,
        prefill=[prefill],
        host=host,
    )
    return CostModel.of(profile, extrapolate=True)


def predicted(written: WrittenTexts, texts: expected.Texts, ks: Sequence[int], costs: Costs) -> Prediction:
    """Predict every request at every K. texts: The texts with acceptance probabilities, see WrittenTexts.replayed."""
    runs = written.runs
    batch = written.batch
    work = Workload(texts=texts, prompt_tokens=written.prompt_tokens, kind=costs.kind)
    priced = step_costs(costs.draft, costs.target, work, max(ks), batch)
    alone = expected_time(replace(priced, share=0.0), work.prompt_tokens, steps(work, 0)).total
    measured = 1e3 * sum(run.decode_seconds for run in runs)
    scale = measured / float(alone.sum()) if alone.sum() else 1.0 / batch
    ttft = np.array([run.prefill_seconds for run in runs]) + costs.prefill_ms / 1e3
    by_k: dict[int, Expected] = {}
    for k in ks:
        each = steps(work, k)
        counts = expected.chain(texts, k)
        drafting = each.after
        if texts.modelled is not None:
            drafting = drafting * texts.modelled[:, :, None]
        time = expected_time(
            replace(priced, share=float(costs.has_model)),
            work.prompt_tokens,
            replace(each, after=drafting),
        )
        calls = costs.calls_ms * counts.steps
        draft = time.draft + (0.0 if costs.has_model else calls)
        host = time.host + (calls if costs.has_model else 0.0)
        phases = [scale / 1e3 * each for each in (draft, time.verify, host)]
        by_k[k] = Expected(
            seconds=(ttft + sum(phases)).tolist(),
            draft_seconds=phases[0].tolist(),
            verify_seconds=phases[1].tolist(),
            host_seconds=phases[2].tolist(),
            passes=counts.passes.tolist(),
            drafted=counts.drafted.tolist(),
            reached=counts.reached.tolist(),
            examined=counts.examined.tolist(),
            truncated=counts.truncated.tolist(),
        )
    totals = {k: sum(each.seconds) for k, each in by_k.items()}
    return Prediction(
        prompts=[run.prompt for run in runs],
        tokens=[run.tokens for run in runs],
        plain=[run.request[1] for run in runs],
        by_k=by_k,
        best_k=min(totals, key=lambda k: totals[k]),
    )


def gains(predictions: Mapping[str, Prediction], conversations: Sequence[int]) -> dict[str, float]:
    """Return the predicted speed-up of each drafter. K is chosen on other conversations."""
    found: dict[str, float] = {}
    for name, each in predictions.items():
        plain, *drafted = (by_conversation(each.timings(k), conversations) for k in (0, *each.by_k))
        found[name] = speedup(Timings(drafted, plain)).value
    return found


def finalists(gains: Mapping[str, float]) -> list[str]:
    """Return the names of the drafters that may be the fastest, see MARGIN. gains: Predicted speed-ups."""
    best = max(gains.values(), default=0.0)
    return [name for name, gain in gains.items() if gain * MARGIN >= best]


def k_without(prediction: Prediction, rows: Sequence[bool]) -> int:
    """Return the K that is fastest for the other requests. rows: Whether a request does not count, [R]."""
    kept = ~np.array(rows)
    kept = kept if kept.any() else ~kept
    seconds = {k: float(np.array(each.seconds)[kept].sum()) for k, each in prediction.by_k.items()}
    return min(seconds, key=lambda k: seconds[k])
