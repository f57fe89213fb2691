"""Time only what decides: plain decoding, and the drafts that may be the fastest, each at one K.

1. The target writes the text of every prompt, without a draft.
2. A replay over these texts gives the acceptance of every draft at every K, and the time of single passes gives the
   cost of a step. From both follow the seconds of whole requests (prediction.py).
3. The drafts that may be the fastest are timed in turns with plain decoding, each conversation at the K that is fastest
   for the others by prediction. The timing looks at its results after 8, 12 and 24 conversations (sequential.py), and
   ends once the order is decided, the interval is narrow enough, or the time is over.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter

from draftlab.acceptance.token_logprobs import Text, TokenLogprobs, score_tokens
from draftlab.console import note, progress
from draftlab.drafters.base import DrafterSpec
from draftlab.drafters.context import DrafterRun, ReplayContext
from draftlab.drafters.parallel import drafts_in_parallel
from draftlab.engine.verify import rule_named
from draftlab.errors import UserError
from draftlab.heads.base import HeadSpec
from draftlab.intervals import tokens_per_second
from draftlab.latency.cost_model import CostModel
from draftlab.latency.machine_state import steady_clock, steady_step_clock
from draftlab.latency.profiler import LatencyCurves, PassTimer
from draftlab.model import checkpoint
from draftlab.model.checkpoint import Checkpoint
from draftlab.model.decoder import Decoder
from draftlab.model.llama import Llama
from draftlab.quantities import format_duration
from draftlab.results.decoding import Generation, request_timings
from draftlab.results.ranking import rank
from draftlab.results.score import Latency, Prediction, Score
from draftlab.scoring.comparison import Comparison
from draftlab.scoring.journal import Journal, Memo
from draftlab.scoring.models import Models
from draftlab.scoring.prediction import (
    MARGIN,
    Costs,
    WrittenTexts,
    cost_model,
    finalists,
    gains,
    k_without,
    predicted,
)
from draftlab.scoring.replay import drafter_of
from draftlab.scoring.throughput import OTHER_PLAIN, PLAIN, Arm, LiveTiming, TimedArms
from draftlab.sequential import is_decided, levels, looks_of

ROUNDS = 8  # rounds in which single passes are timed
# what an interrupted run leaves: the latencies of all models, and predictions by the name of the drafter
KEPT = TypeAdapter(tuple[list[LatencyCurves], dict[str, Prediction]])
SLOWER = 1.15  # plain decoding that takes this times as long is not timed any further


@dataclass(kw_only=True)
class QuickTiming:
    """The timing of a comparison at a batch size.

    Args:
        runs: Drafts and drafters, by name.
        heads: Passes of heads that were timed alone, by the name of the drafter.
        journal: Function that opens the journal of a part of the timing.
        memo: Latencies and predictions of an interrupted run.
        started: time.monotonic() at the start of the measurement.
        timer: Timer of the passes of all models.
    """

    comparison: Comparison
    models: Models
    runs: Mapping[str, DrafterRun]
    heads: Mapping[str, Decoder]
    batch: int
    journal: Callable[[str], Journal]
    memo: Memo
    started: float
    timer: PassTimer
    _prefills: dict[int, Latency] = field(default_factory=dict, init=False)  # by id of the model

    def prepare(self) -> None:
        """Let the target write its texts, time the passes, replay the drafts, and choose what to time.

        Raises:
            UserError: The time is too short for the texts, or every text has a single token.
        """
        self.texts = self._write_texts()
        self.written = self._written()
        self._predict()
        self.gains = gains(self.predictions, self.written.conversations)
        chosen = [*self.gains] if self.comparison.effort.every else finalists(self.gains)
        unknown = [name for name in self.runs if name not in self.predictions]
        for name in unknown:
            note(f"{name} cannot be replayed, so it is timed at every K")
        self.finalists = [name for name in self.runs if name in (*chosen, *unknown)]
        other = None if OTHER_PLAIN not in self.plain else self.models.other_target
        self.live = self._live(self.runs, "timed", other)

    def _predict(self) -> None:
        """Time the passes of all models and replay the drafters, unless an interrupted run did so."""
        # they are ids of this process, in an order that is always the same
        names = [*self.timer.grids]
        if (before := self.memo.read()) is not None:
            curves, self.predictions = KEPT.validate_python(before)
            self.curves = dict(zip(names, curves, strict=True))
            return
        with progress("timing single passes", ROUNDS) as advance:
            # few rounds warm up, because the target has just run
            self.timer.rounds.measure(ROUNDS, lambda done: advance(done, "rounds"), (1, 2))
        self.curves = self.timer.curves()
        self.predictions = self._predictions()
        kept = ([self.curves[name] for name in names], self.predictions)
        self.memo.write(KEPT.dump_python(kept, mode="json"))

    def run(self, scores: Callable[[], list[Score]]) -> list[Score]:
        """Time until the result is decided, and return the scores.

        scores: Function that makes scores from what has been timed so far.
        """
        order = self._order()
        talks = self.written.conversations
        self.live.warm_up(self._arms(order[0]), briefly=True)
        total = len(set(talks))
        looks = looks_of(total)
        passed = list[int]()
        waiting = {talk: talks.count(talk) for talk in talks}
        names = ", ".join(self.finalists)
        found = list[Score]()
        with progress(f"timing plain decoding, {names}", total) as advance:
            for group in order:
                for repeat in range(self.comparison.requests.repeats):
                    self.live.time_all(self._arms(group), group, repeat)
                for prompt in self.live.groups[group]:
                    waiting[talks[prompt]] -= 1
                done = sum(left == 0 for left in waiting.values())
                advance(done, "conversations")
                if done in looks and done not in passed:
                    passed.append(done)
                    self.alpha = levels([*passed, *looks[len(passed) :]])[len(passed) - 1]
                    found = scores()
                    if len(passed) == 1 and (added := self._missed(found)):
                        self._add(added, order[: order.index(group) + 1])
                        found = scores()
                    if self._is_decided(found):
                        return found
                elif self._time_is_over and done:
                    self.alpha = levels([*passed, done], total)[-1]
                    note(f"ended after {done} of {total} conversations, because the time is over")
                    return scores()
        return found

    def timed(self) -> TimedArms:
        return self.live.finish()

    def _missed(self, scores: Sequence[Score]) -> list[str]:
        """Return the drafters that may be the fastest, too, because the predictions were off by more than expected."""
        errors = [each.prediction.error for each in scores if each.prediction is not None]
        margin = 1 + max((error for error in errors if error is not None), default=0.0)
        best = max(score.best_k_speedup.value for score in scores if score.timed)
        return [
            name
            for name, gain in self.gains.items()
            if margin > MARGIN and name not in self.finalists and gain * margin >= best
        ]

    def _add(self, names: Sequence[str], groups: Sequence[int]) -> None:
        """Time further drafters, too. The groups so far are decoded again in all ways, one after the other."""
        note(f"predictions were off by more than {MARGIN - 1:.0%}, so {', '.join(names)} is timed, too")
        self.finalists += names
        self.live.warm_up(self._arms(groups[0])[-len(names) :], briefly=True)
        with progress(f"timing {', '.join(names)}, too", len(groups)) as advance:
            for done, group in enumerate(groups, 1):
                for repeat in range(self.comparison.requests.repeats):
                    self.live.time_all(self._arms(group), group, repeat)
                advance(done, "groups of prompts")

    def _is_decided(self, scores: Sequence[Score]) -> bool:
        """Return whether further conversations would probably not change what the user does."""
        first, *others = rank([score for score in scores if score.timed])
        slower = [other.significant for other in others]
        return is_decided(first.gain, slower, self.comparison.effort.precision)

    @property
    def _time_is_over(self) -> bool:
        minutes = self.comparison.effort.minutes
        return minutes is not None and time.monotonic() - self.started > 60 * minutes

    def _live(self, runs: Mapping[str, DrafterRun], part: str, other_target: Decoder | None) -> LiveTiming:
        comparison = self.comparison
        sampling = comparison.requests.sampling
        return LiveTiming(
            self.models.target,
            {name: run.drafter for name, run in runs.items()},
            [prompt.ids for prompt in comparison.requests.prompts.rows],
            sampling=sampling,
            other_target=other_target,
            clock=steady_step_clock(comparison.engine.device),
            batch=self.batch,
            rule=rule_named(comparison.rule.verify),
            draft_sampling=comparison.rule.draft_sampling(sampling),
            kept=self.journal(part),
        )

    def _write_texts(self) -> TimedArms:
        """Return the target's own texts. The first groups are also decoded at the other precision, if there is one."""
        live = self._live({}, "texts", self.models.other_target)
        live.warm_up([PLAIN], briefly=True)
        count = len(live.groups)
        started = time.monotonic()
        with progress("the target's own texts", len(live.prompts)) as advance:
            for group in range(count):
                kept = (PLAIN, 0, group) in live.runs
                live.time(PLAIN, 0, group)
                if not kept:
                    self._check_minutes(time.monotonic() - started, group + 1, count)
                advance(live.groups[group][-1] + 1, "prompts")
        self.plain: list[Arm] = [PLAIN]
        self.slower_plain: dict[str, float] = {}
        other = self.models.other_target
        if other is not None:
            groups = sorted({0, count // 2})
            label = f"the target's texts with {self.models.weights(other)} weights"
            with progress(label, len(groups)) as advance:
                live.warm_up([OTHER_PLAIN], briefly=True)
                for done, group in enumerate(groups, 1):
                    live.time(OTHER_PLAIN, 0, group)
                    advance(done, "groups of prompts")
        measured = live.finish()
        if other is not None:
            prompts = {run.prompt for run in measured.generations[OTHER_PLAIN]}
            pace, other_pace = (
                tokens_per_second(request_timings([g for g in measured.generations[arm] if g.prompt in prompts]))
                for arm in (PLAIN, OTHER_PLAIN)
            )
            if other_pace * SLOWER < pace:
                self.slower_plain[self.models.weights(other)] = other_pace / pace
            else:
                self.plain.append(OTHER_PLAIN)
        return measured

    def _check_minutes(self, seconds: float, done: int, count: int) -> None:
        """Check that the target's texts will be written in the given time. done: Number of groups, of `count`."""
        minutes = self.comparison.effort.minutes
        before = time.monotonic() - self.started - seconds
        needed = (before + seconds / done * count) / 60
        if minutes is not None and needed > minutes:
            raise UserError(
                f"--minutes {minutes:g} is too short: the target needs about {format_duration(60 * needed)} "
                f"to write its own texts for {len(self.comparison.requests.prompts.rows)} prompts, "
                "and drafts are timed after that; "
                "use more minutes, fewer prompts (--num-prompts) or shorter answers (--max-new-tokens)"
            )

    def _written(self) -> WrittenTexts:
        requests = self.comparison.requests
        generations = self.texts.generations[PLAIN]
        rows = requests.prompts.rows
        texts: list[Text] = []
        for i, prompt in enumerate(rows):
            texts.append((np.array(prompt.ids), np.array(self.texts.tokens[PLAIN][i])))
        return WrittenTexts(
            texts=texts,
            limits=np.full(len(rows), requests.sampling.max_tokens),
            conversations=requests.prompts.conversations,
            runs=sorted(generations, key=lambda run: run.prompt),
            batch=self.batch,
        )

    def _predictions(self) -> dict[str, Prediction]:
        """Return a prediction for each drafter whose acceptance and passes are known."""
        found: dict[str, Prediction] = {}
        known: dict[tuple[Path, bool, int], list[TokenLogprobs]] = {}
        own = self._target_logprobs()
        specs = {spec.name: spec for spec in self.comparison.drafters}
        for name, run in self.runs.items():
            spec = specs.get(name) or drafter_of(self.comparison.drafts[name])
            if not self._is_known(spec, run):
                continue
            clock = steady_clock(self.comparison.engine.device)
            start = clock()
            with progress(f"replaying {name}", len(self.written.texts)) as advance:
                context = self._context(spec, max(run.ks), known, lambda done: advance(done, "texts"))
                scored = spec.acceptance(context)
            calls = sum(len(text) for _, text in self.written.texts)
            found[name] = predicted(
                self.written,
                self.written.replayed(scored, own),
                run.ks,
                self._costs(spec, run, 1e3 * (clock() - start) / max(1, calls)),
            )
        return found

    def _is_known(self, spec: DrafterSpec, run: DrafterRun) -> bool:
        """Return whether a drafter can be replayed and its passes are timed."""
        if not spec.replays:
            return False
        if run.model is not None:
            return isinstance(run.model, Llama)
        return spec.name in self.heads or not isinstance(spec, HeadSpec)

    def _context(
        self,
        spec: DrafterSpec,
        most: int,
        known: dict[tuple[Path, bool, int], list[TokenLogprobs]],
        advance: Callable[[int], None],
    ) -> ReplayContext:
        """Return the context in which a drafter is replayed. most, known, advance: See ReplayContext."""
        comparison = self.comparison
        drafts = spec.paths(comparison.default_draft, models_only=True)
        vocab = checkpoint.vocab_size(comparison.target)
        return ReplayContext(
            texts=self.written.texts,
            limits=self.written.limits.tolist(),
            target_path=comparison.target,
            sampling=comparison.rule.draft_sampling(comparison.requests.sampling),
            vocab=Checkpoint(drafts[0]).common_vocabulary(Checkpoint(comparison.target)) if drafts else vocab,
            most=most,
            load=self.models.draft,
            load_target=lambda: self.models.eager(comparison.target),
            advance=advance,
            draft=comparison.default_draft,
            data=comparison.data,
            known=known,
        )

    def _target_logprobs(self) -> list[np.ndarray]:
        """Return the target's log-probability of each token, or 0 where a drafted token must equal the target's."""
        comparison = self.comparison
        texts = self.written.texts
        sampling = comparison.requests.sampling
        samples = comparison.rule.draft_sampling(sampling).temperature > 0
        if sampling.temperature == 0 or comparison.rule.verify == "match" or not samples:
            return [np.zeros(len(text)) for _, text in texts]
        vocab = checkpoint.vocab_size(comparison.target)
        with progress("the target's probabilities", len(texts)) as advance:
            scored = score_tokens(self.models.target, texts, vocab, sampling, lambda done: advance(done, "texts"))
        return [each.logprobs for each in scored]

    def _costs(self, spec: DrafterSpec, run: DrafterRun, call_ms: float) -> Costs:
        lengths = self.written.prompt_tokens
        host = self.written.host_ms
        target = self._cost_model(self.models.target, self._prefill(None))
        model = self.heads.get(spec.name, run.model)
        if model is None:
            return Costs(
                target=target,
                draft=target,
                kind="model",
                prefill_ms=np.zeros(len(lengths)),
                calls_ms=call_ms,
                has_model=False,
            )
        if id(model) not in self._prefills:  # drafters may share a model
            self._prefills[id(model)] = self._prefill(model)
        prefill = self._prefills[id(model)]
        in_parallel = run.model is not None and drafts_in_parallel(run.model)
        return Costs(
            target=target,
            draft=self._cost_model(model, prefill),
            # a kind without a price of its own, such as fallback, asks its draft model
            kind=spec.kind if spec.is_priced() else ("parallel" if in_parallel else "model"),
            prefill_ms=prefill.median_ms * lengths / prefill.width,
            calls_ms=host,
            has_model=True,
        )

    def _cost_model(self, model: Decoder, prefill: Latency) -> CostModel:
        curves = self.curves[str(id(model))]
        return cost_model("passes of this run", curves, prefill, self.written.host_ms)

    def _prefill(self, model: Decoder | None) -> Latency:
        """Return the time of a draft's pass over a prompt of median length. None: the target's, as it was measured."""
        runs = self.written.runs
        length = int(np.median(self.written.prompt_tokens))
        if model is None:
            ms = 1e3 * float(np.median([run.prefill_seconds for run in runs]))
        else:
            clock = steady_clock(self.comparison.engine.device)
            ids = torch.ones(1, length, dtype=torch.long, device=model.device)
            times = list[float]()
            for _ in range(2):
                cache = model.new_cache(1, length + 1)
                start = clock()
                model.forward(ids, cache, last=1)
                times.append(1e3 * (clock() - start))
            ms = min(times)
        return Latency(width=length, median_ms=ms, low_ms=ms, high_ms=ms, n=1)

    def _order(self) -> list[int]:
        """Return the groups in an order in which the first few are spread over all prompts."""
        talks = self.written.conversations
        places = {talk: i for i, talk in enumerate(dict.fromkeys(talks))}
        return sorted(
            range(len(self.live.groups)),
            key=lambda group: (_reversed_bits(places[talks[self.live.groups[group][0]]]), group),
        )

    def _arms(self, group: int) -> list[Arm]:
        """Return the ways to decode a group of prompts. K is the one that is fastest for other conversations."""
        talks = self.written.conversations
        here = {talks[prompt] for prompt in self.live.groups[group]}
        arms = [*self.plain]
        for name in self.finalists:
            prediction = self.predictions.get(name)
            if prediction is None:
                arms += [(name, k) for k in self.runs[name].ks]
            else:
                arms.append((name, k_without(prediction, [talk in here for talk in talks])))
        return arms


def _reversed_bits(number: int, bits: int = 32) -> int:
    return int(f"{number:0{bits}b}"[::-1], 2)


def with_errors(scores: Sequence[Score]) -> list[Score]:
    """Return the scores with the largest error of a predicted speed-up of those that were timed."""
    errors = [abs(ratio - 1) for ratio in _ratios(scores)]
    if not errors:
        return list(scores)
    found: list[Score] = []
    for score in scores:
        prediction = score.prediction
        if prediction is not None:
            prediction = prediction.model_copy(update={"error": max(errors)})
        found.append(score.model_copy(update={"prediction": prediction}))
    return found


def _ratios(scores: Sequence[Score]) -> Iterator[float]:
    """Yield the predicted speed-up of each timed score over the timed one, on the same requests and at the same K."""
    for score in scores:
        if score.prediction is None or not score.timed:
            continue
        rows = {prompt: row for row, prompt in enumerate(score.prediction.prompts)}
        drafted = plain = timed = 0.0
        for k, runs in score.speculative.items():
            for run in runs:
                drafted += score.prediction.by_k[k].seconds[rows[run.prompt]]
                plain += score.prediction.plain[rows[run.prompt]]
                timed += run.request[1]
        alone = sum(run.request[1] for run in score.plain if isinstance(run, Generation))
        yield (plain / drafted) / (alone / timed)
