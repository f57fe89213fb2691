"""Score drafts against a target in one process, and write one score.json per draft."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn import functional as F

from draftlab.console import note, note_if_slow, progress
from draftlab.drafters.context import DrafterContext, DrafterRun
from draftlab.drafters.parallel import drafts_in_parallel, model_drafter
from draftlab.engine.batch_generate import answer_turns
from draftlab.engine.verify import rule_named
from draftlab.errors import about
from draftlab.exporting.hf import parse_quantized_name
from draftlab.heads.base import HeadSpec
from draftlab.intervals import ALPHA
from draftlab.latency.machine_state import (
    CoreTime,
    device_name,
    read_core_time,
    read_environment,
    steady_clock,
    steady_step_clock,
    warn_if_busy,
    with_waiting,
)
from draftlab.latency.profiler import AFTER, Grid, LatencyCurves, PassTimer
from draftlab.model import devices, hub
from draftlab.model.decoder import Decoder
from draftlab.model.llama import Llama
from draftlab.model.modes import set_threads
from draftlab.output import Output
from draftlab.registry import REJECTION
from draftlab.results.decoding import Generation
from draftlab.results.ranking import ScoreResult
from draftlab.results.score import (
    Conditions,
    Environment,
    FollowingLatency,
    Latency,
    Model,
    Prediction,
    Rounding,
    Score,
    TaskResult,
)
from draftlab.runs import provenance
from draftlab.runs.atomic import remove_state
from draftlab.scoring.comparison import Comparison, with_rounded_drafts
from draftlab.scoring.journal import Journal, Memo
from draftlab.scoring.models import Models
from draftlab.scoring.quick import QuickTiming, with_errors
from draftlab.scoring.throughput import OTHER_PLAIN, PLAIN, TimedArms, measure_throughput

AnyLatency = TypeVar("AnyLatency", bound=Latency)
# rounds in which single passes are timed, spread over the time of the decoding
ROUNDS = 30
# tokens on which the target with int8 weights is compared with itself; with --exhaustive all
ROUNDING_TOKENS = 256
# verify rules whose acceptance follows from the text alone
PREDICTED_RULES = (REJECTION, "match")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalScoring:
    """The measurement of a comparison in this process."""

    comparison: Comparison

    @property
    def name(self) -> str:
        return self.comparison.name

    def facts(self) -> Mapping[str, object]:
        return self.comparison.facts()

    def run(self, output: Output) -> ScoreResult:
        """Measure every draft and drafter, write NAME/score.json for each, and return the scores.

        Raises:
            UserError: Memory is too small, or a text does not fit into a model's context.
        """
        comparison = self.comparison
        output.inputs(comparison.inputs)
        set_threads(comparison.engine.mode, comparison.engine.threads)
        comparison.check_memory()
        output.claim_state(comparison.inputs)
        with with_rounded_drafts(comparison) as used:
            scores = measure(used, output.command_line, output.state)
        output.inputs(comparison.earlier_turns)
        with output.directory() as work:
            for result in scores:
                (work / result.name).mkdir()
                (work / result.name / "score.json").write_text(result.model_dump_json(indent=1))
            output.record(work)
        remove_state(output.state)
        return ScoreResult(scores)


def measure(comparison: Comparison, command: str, state: Path) -> list[Score]:
    """Measure all drafts and drafters, and return the scores.

    command: Command line to record in the scores. state: Folder for unfinished work.
    """
    started = time.monotonic()
    tasks = _accuracies(comparison)
    models = Models(comparison)
    runs = _runs(comparison, models)
    comparison = _with_turns(comparison, models)
    for name, run in runs.items():
        called = name if name in comparison.drafts else f"the draft of {name}"
        context = {} if run.model is None else {called: run.model.context}
        comparison.check_context({"the target": models.target.context} | context, max(run.ks))
    measurement = Measurement(
        comparison=comparison,
        models=models,
        runs=runs,
        tasks=tasks,
        environment=read_environment().model_copy(update={"dtype_reason": comparison.engine.dtype_reason}),
        command=command,
        learnt_prompts={name: comparison.learnt_prompts(name) for name in runs},
        state=state,
        started=started,
    )
    warn_if_busy(measurement.environment, "; speed-ups are less affected, because runs are interleaved")
    return [score for batch in comparison.batches for score in measurement.scores(batch)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was measured at a batch size.

    Args:
        curves: Latencies of passes, by the id of the model's object.
        rounding: What int8 weights change in the target, or None.
        predictions: What was predicted, by the name of the draft or drafter.
        slower_plain: Speed of plain decoding at a precision that is clearly slower and was not timed in full, as a
            fraction of the speed at the other precision, by the name of the precision.
        alpha: See Score.alpha.
    """

    measured: TimedArms
    curves: Mapping[str, LatencyCurves]
    environment: Environment
    rounding: Rounding | None
    predictions: Mapping[str, Prediction] = field(default_factory=dict)
    slower_plain: dict[str, float] = field(default_factory=dict)
    alpha: float = ALPHA


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The loaded models of a comparison, ready to be timed.

    Args:
        runs: Drafts and drafters, by name.
        tasks: Results of lm-eval, by the directory of the model.
        command: Command line to record in the scores.
        learnt_prompts: Number of prompts in the training data of each draft or drafter, by name.
        state: Folder for unfinished work.
        started: time.monotonic() at the start of the measurement.
    """

    comparison: Comparison
    models: Models
    runs: Mapping[str, DrafterRun]
    tasks: Mapping[Path, list[TaskResult]]
    environment: Environment
    command: str
    learnt_prompts: Mapping[str, int]
    state: Path
    started: float

    def scores(self, batch: int) -> list[Score]:
        """Time drafts and drafters at a batch size, and return the score of each draft and drafter.

        Raises:
            UserError: The time that the comparison allows is too short for the target's own texts.
        """
        before = read_core_time()
        every_k = self._why_every_k()
        if every_k is None:
            return self._quick(batch, before)
        if not self.comparison.effort.exhaustive:
            note(f"every draft is timed at every K, because {every_k}")
        return self._exhaustive(batch, before)

    def _why_every_k(self) -> str | None:
        """Return why nothing can be predicted from replays and passes, or None."""
        comparison = self.comparison
        if comparison.effort.exhaustive:
            return "--exhaustive asks for it"
        if not isinstance(self.models.target, Llama):
            return "transformers runs the target, whose passes are not timed alone"
        if comparison.rule.verify not in PREDICTED_RULES and comparison.requests.sampling.temperature:
            return f"the acceptance of --rule {comparison.rule.verify} is not known before decoding"
        return None

    def _exhaustive(self, batch: int, before: CoreTime) -> list[Score]:
        """Time every draft at every K. Rounds of the pass timer are spread over the decoding."""
        timer = self._pass_timer(batch)
        with note_if_slow("warming up the passes of single models"):
            timer.rounds.warm_up()
        measured = self._throughput(batch, timer)
        found = Found(
            measured=measured,
            curves=timer.curves(),
            environment=with_waiting(self.environment, before, read_core_time()),
            rounding=self._rounding(measured.tokens[PLAIN]),
        )
        return self._scores(found, batch)

    def _quick(self, batch: int, before: CoreTime) -> list[Score]:
        """Time plain decoding and the drafts that may be the fastest, each at one K."""
        heads = _heads(self.comparison, self.models)
        timing = QuickTiming(
            comparison=self.comparison,
            models=self.models,
            runs=self.runs,
            heads=heads,
            batch=batch,
            journal=lambda part: self._journal(f"{part}-b{batch}"),
            memo=Memo(self.state / f"predictions-b{batch}.json", self._machine),
            started=self.started,
            timer=self._pass_timer(batch, heads),
        )
        timing.prepare()
        rounding = self._rounding(timing.texts.tokens[PLAIN])

        def scores() -> list[Score]:
            found = Found(
                measured=timing.timed(),
                curves=timing.curves,
                environment=with_waiting(self.environment, before, read_core_time()),
                rounding=rounding,
                predictions=timing.predictions,
                slower_plain=timing.slower_plain,
                alpha=timing.alpha,
            )
            return with_errors(self._scores(found, batch))

        return timing.run(scores)

    def _journal(self, part: str) -> Journal:
        return Journal(self.state / f"{part}.jsonl", self._machine)

    @property
    def _machine(self) -> dict[str, Any]:
        """Return what must be the same for times of an interrupted run to count."""
        return {
            "processor": self.environment.processor,
            "cores": self.environment.cores,
            "device": device_name(self.comparison.engine.device),
            "threads": torch.get_num_threads(),
            **provenance.versions(),
        }

    def _scores(self, found: "Found", batch: int) -> list[Score]:
        comparison = self.comparison
        measured = found.measured
        target = self._model("", self.models.target, comparison.target, found.curves, {})
        other_plain = dict[str, list[Generation]]()
        if OTHER_PLAIN in measured.generations:
            assert self.models.other_target is not None
            weights = self.models.weights(self.models.other_target)
            other_plain[weights] = measured.generations[OTHER_PLAIN]
        scores = []
        for name, run in self.runs.items():
            draft = comparison.drafts.get(name)
            arms = [arm for arm in measured.generations if arm[0] == name and arm[1]]
            score = Score(
                name=self._label(name, batch),
                target=target,
                draft=self._model(name, run.model, draft, found.curves, run.facts),
                conditions=self._conditions(name, batch),
                environment=found.environment,
                plain=measured.generations[PLAIN],
                other_plain=other_plain,
                slower_plain=found.slower_plain,
                rounding=found.rounding,
                speculative={k: measured.generations[name, k] for _, k in arms},
                prediction=found.predictions.get(name),
                alpha=found.alpha,
                command=self.command,
                versions=provenance.versions(),
                learnt=run.learnt,
                made=comparison.made(name),
                learnt_prompts=self.learnt_prompts[name],
                **comparison.requests.score_facts(measured.tokens[PLAIN], [measured.tokens[arm] for arm in arms]),
            )
            scores.append(score)
        return scores

    def _rounding(self, answers: Mapping[int, list[int]]) -> Rounding | None:
        """Compare the target with and without int8 weights, on prompts and the answers of plain decoding.

        answers: Token ids of the answers, by prompt. If the target has no int8 weights, return None.
        """
        whole = self.models.target
        rounded = self.models.other_target
        if rounded is None:
            return None
        if self.comparison.engine.target_int8:
            whole, rounded = rounded, whole
        prompts = self.comparison.requests.prompts.rows
        texts = [[*prompts[i].ids, *answer] for i, answer in sorted(answers.items())]
        if not self.comparison.effort.exhaustive:
            texts = some_of(texts, ROUNDING_TOKENS)
        return compare(whole, rounded, texts)

    def _pass_timer(self, batch: int, heads: Mapping[str, Decoder] | None = None) -> PassTimer:
        """Return a timer of the passes of all models that draftlab's engine runs, each named by its object's id.

        heads: Passes of heads whose first pass in a step reads up to K + 1 tokens.
        """
        comparison = self.comparison
        ks = self.comparison.ks

        def grid(widths: list[int], after: Sequence[int], last: int) -> Grid:
            return Grid(
                widths=widths,
                batches=[batch],
                contexts=[comparison.context],
                prompts=[],
                repeats=ROUNDS,
                after=after,
                last=last,
            )

        models: dict[str, tuple[Decoder, Grid]] = {}
        for model in (run.model for run in self.runs.values()):
            if not isinstance(model, Llama):
                continue
            after = {1, *(number for number in (*AFTER, max(ks) - 1) if 0 < number < max(ks))}
            if drafts_in_parallel(model):
                # the tokens of an accepted draft and one more, and mask tokens
                widths = sorted({1, 2, *ks, *(2 * k for k in ks)})
                models[str(id(model))] = model, grid(widths, sorted(after), max(ks))
            else:
                models[str(id(model))] = model, grid([1, 2], sorted(after), 1)
        for head in (heads or {}).values():
            models[str(id(head))] = head, grid([*range(1, max(ks) + 2)], [1, 2], 1)
        target = self.models.target
        if isinstance(target, Llama):
            # plain decoding has a pass of the target before each pass
            models[str(id(target))] = target, grid([1, *(k + 1 for k in ks)], [1, 2], 0)
        return PassTimer(models, steady_clock(comparison.engine.device))

    def _throughput(self, batch: int, timer: PassTimer) -> TimedArms:
        """Decode all prompts in all ways. Rounds of the timer are spread over the decoding."""
        comparison = self.comparison
        requests = self.comparison.requests
        prompts = [prompt.ids for prompt in requests.prompts.rows]
        ways = 1 + comparison.two_precisions + sum(len(run.ks) for run in self.runs.values())
        note(
            f"decoding {len(prompts)} prompts {requests.repeats} times in each of {ways} ways (without a draft, "
            "and with each draft and K)"
        )
        runs = ways * requests.repeats * len(prompts) // batch

        def run_rounds(done: int) -> None:
            while timer.rounds.done < done * ROUNDS // runs:
                timer.rounds.run()

        return measure_throughput(
            self.models.target,
            {name: (run.drafter, run.ks) for name, run in self.runs.items()},
            prompts,
            other_target=self.models.other_target,
            sampling=requests.sampling,
            repeats=requests.repeats,
            batch=batch,
            rule=rule_named(comparison.rule.verify),
            draft_sampling=comparison.rule.draft_sampling(requests.sampling),
            advance=run_rounds,
            clock=steady_step_clock(comparison.engine.device),
            kept=self._journal(f"every-k-b{batch}"),
        )

    def _label(self, name: str, batch: int) -> str:
        """Return the name of a score: the name of the draft or drafter, with @int8 if its weights are rounded.

        If there are several batch sizes, the name ends in -bBATCH.
        """
        comparison = self.comparison
        models = [*comparison.drafts, *(s.name for s in comparison.drafters if s.drafts)]
        rounded = "@int8" if comparison.engine.draft_int8 and name in models else ""
        return f"{name}{rounded}" + (f"-b{batch}" if len(comparison.batches) > 1 else "")

    def _conditions(self, name: str, batch: int) -> Conditions:
        comparison = self.comparison
        engine = comparison.engine
        rule = comparison.rule.verify
        if rule == REJECTION:
            own_rules = {spec.name: spec.rejection_rule for spec in comparison.drafters}
            rule = own_rules.get(name, REJECTION)
        return Conditions(
            **comparison.requests.conditions(),
            device=device_name(engine.device),
            dtype=devices.dtype_name(engine.dtype),
            mode=engine.mode,
            threads=torch.get_num_threads(),
            context=comparison.context,
            batch=batch,
            target_weights=self.models.weights(self.models.target),
            draft_weights=self._draft_weights(name, self.runs[name]),
            draft_filters=comparison.rule.draft,
            rule=rule,
        )

    def _model(
        self,
        name: str,
        decoder: Decoder | None,
        path: Path | None,
        latency: Mapping[str, LatencyCurves],
        facts: Mapping[str, Any],
    ) -> Model:
        curves = latency.get(str(id(decoder)))
        return Model(
            name=name if path is None else hub.checkpoint_name(path),
            sha256=provenance.fingerprint(path) if path else None,
            shape=decoder.architecture if decoder else None,
            latency=[] if curves is None else [_fields(Latency, p) for p in curves.forward],
            following=[] if curves is None else [_fields(FollowingLatency, p) for p in curves.steady],
            tasks=self.tasks.get(path, []) if path else [],
            via_transformers=decoder is not None and decoder.architecture is None,
            **facts,
        )

    def _draft_weights(self, name: str, run: DrafterRun) -> str | None:
        engine = self.comparison.engine
        if "heads_sha256" in run.facts:
            return "int8" if engine.draft_int8 else devices.dtype_name(engine.dtype)
        rounded = parse_quantized_name(name)[1] if name in self.comparison.drafts else None
        return rounded or (None if run.model is None else self.models.weights(run.model))


def _fields(kind: type[AnyLatency], point: Latency) -> AnyLatency:
    """Return a point of a latency curve without its batch size and context, which the conditions of a score have."""
    return kind(**point.model_dump(include=set(kind.model_fields)))


def _accuracies(comparison: Comparison) -> dict[Path, list[TaskResult]]:
    """Evaluate target and drafts with lm-eval, and return the results by directory. Without --tasks, return {}."""
    tasks = comparison.tasks
    engine = comparison.engine
    if tasks is None:
        return {}
    target = tasks.of_checkpoint(
        comparison.target,
        engine.task_dtype,
        engine.device,
        spread=engine.device_map is not None,
        int8=engine.target_int8,
    )
    return {
        path: tasks.of_checkpoint(path, engine.task_dtype, engine.device, int8=engine.draft_int8)
        for path in comparison.drafts.values()
    } | {comparison.target: target}


def some_of(texts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Return texts, evenly spaced, that have about this number of tokens together, or all texts if they have fewer."""
    count = max(1, round(len(texts) * min(1.0, tokens / sum(map(len, texts)))))
    return [texts[i * len(texts) // count] for i in range(count)]


def compare(whole: Decoder, rounded: Decoder, texts: Sequence[Sequence[int]]) -> Rounding:
    """Compare the next-token distributions of a model and of its rounded copy, after every token of the texts.

    texts: Token ids of each text.
    """
    divergence = 0.0
    equal = 0
    count = sum(map(len, texts))
    with progress("measuring what int8 weights change", len(texts)) as advance:
        for done, text in enumerate(texts, 1):
            ids = torch.tensor([text])
            p, q = (
                model.forward_uncached(ids, len(text)).float().log_softmax(-1) for model in (whole, rounded)
            )  # [1, T, V]
            divergence += float(F.kl_div(q, p, reduction="sum", log_target=True))
            equal += int((p.argmax(-1) == q.argmax(-1)).sum())
            advance(done, "texts")
    return Rounding(tokens=count, kl=divergence / count, top1=equal / count)


def _with_turns(comparison: Comparison, models: Models) -> Comparison:
    """Return a copy of the comparison with a prompt for every turn of a conversation.

    The prompt of a turn contains the earlier turns and the target's answers to them.
    """
    requests = comparison.requests
    target = comparison.target
    native = comparison.engine.mode == "native"
    model = models.running(target, False) if native else models.eager(target)
    prompts = answer_turns(requests.prompts, target, model, requests.sampling)
    return replace(comparison, requests=replace(requests, prompts=prompts))


def _heads(comparison: Comparison, models: Models) -> dict[str, Decoder]:
    """Load the heads whose passes can be timed alone, and return them by the name of the drafter."""
    found: dict[str, Decoder] = {}
    target = models.eager(comparison.target)
    for spec in comparison.drafters:
        if isinstance(spec, HeadSpec) and spec.replays and spec.is_priced():
            model = spec.readable(target)
            found[spec.name] = spec.passes_of(Path(spec.heads), comparison.target, model, comparison.engine.mode)
    return found


def _runs(comparison: Comparison, models: Models) -> dict[str, DrafterRun]:
    """Load all drafts, build all drafters, and return them by name."""
    context = DrafterContext(
        models.target,
        comparison.target,
        models.draft,
        comparison.default_draft,
        data=comparison.data,
        sampling=comparison.requests.sampling,
        ks=comparison.ks,
        mode=comparison.engine.mode,
        clock=steady_clock(comparison.engine.device),
        device=comparison.engine.device,
        int8=comparison.engine.draft_int8,
    )
    runs: dict[str, DrafterRun] = {}
    for name, path in comparison.drafts.items():
        model = models.draft(path)
        drafter = model_drafter(model, models.target.vocab)
        facts = {"parallel": drafts_in_parallel(model)}
        runs[name] = context.run(drafter, model=model, facts=facts)
    for spec in comparison.drafters:
        with about(f"--drafter {spec.text}"):
            runs[spec.name] = spec.build(context)
    return runs
