"""Score drafts against a target in one process, and write one score.json per draft."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn import functional as F

from draftlab import provenance
from draftlab.console import note, note_if_slow
from draftlab.engine.batch_generate import answer_turns
from draftlab.engine.drafters.context import DrafterContext, DrafterRun
from draftlab.engine.drafters.parallel import drafts_in_parallel, model_drafter
from draftlab.engine.verify import rule_named
from draftlab.errors import UserError
from draftlab.exporting.hf import parse_quantized_name
from draftlab.latency.machine_state import (
    device_name,
    read_core_time,
    read_environment,
    steady_clock,
    steady_step_clock,
    warn_if_busy,
    with_waiting,
)
from draftlab.latency.profiler import AFTER, Grid, LatencyCurves, PassTimer
from draftlab.model import checkpoint, hub
from draftlab.model.decoder import Decoder
from draftlab.model.llama import Llama
from draftlab.model.modes import load, set_threads, with_mode
from draftlab.output import Output
from draftlab.registry import REJECTION
from draftlab.results.decoding import Generation
from draftlab.results.score import (
    Conditions,
    Environment,
    FollowingLatency,
    Latency,
    Model,
    Rounding,
    Score,
    TaskResult,
)
from draftlab.scoring.comparison import Comparison, with_rounded_drafts
from draftlab.scoring.throughput import OTHER_PLAIN, PLAIN, TimedArms, measure_throughput

AnyLatency = TypeVar("AnyLatency", bound=Latency)
# rounds in which single passes are timed, spread over the time of the decoding
ROUNDS = 30


def score(comparison: Comparison, output: Output) -> list[Score]:
    """Measure every draft and drafter, write NAME/score.json for each, and return the scores.

    Raises:
        UserError: Memory is too small, or a text does not fit into a model's context.
    """
    output.inputs(comparison.inputs)
    with with_rounded_drafts(comparison) as used:
        scores = measure(used, output.command_line)
    output.inputs(comparison.earlier_turns)
    with output.directory() as work:
        for result in scores:
            (work / result.name).mkdir()
            (work / result.name / "score.json").write_text(result.model_dump_json(indent=1))
        output.record(work)
    return scores


def measure(comparison: Comparison, command: str) -> list[Score]:
    """Measure all drafts and drafters, and return the scores. command: Command line to record in the scores."""
    set_threads(comparison.engine.mode, comparison.engine.threads)
    comparison.check_memory()
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
        environment=read_environment().model_copy(
            update={"dtype_reason": comparison.engine.dtype_reason}
        ),
        command=command,
        learnt_prompts={name: comparison.learnt_prompts(name) for name in runs},
    )
    warn_if_busy(measurement.environment)
    return [score for batch in comparison.batches for score in measurement.scores(batch)]


class Models:
    """The models of a comparison. Each checkpoint is loaded once, at its first use."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison, self.engine = comparison, comparison.engine
        self._loaded: dict[Path, Decoder] = {}
        self._running: dict[tuple[Path, bool], Decoder] = {}

    def eager(self, directory: Path) -> Decoder:
        """Return the model of a checkpoint in mode eager.

        Raises:
            UserError: The model cannot decode in batches.
        """
        if directory not in self._loaded:
            engine = self.engine
            note(f"loading {hub.checkpoint_name(directory)}")
            device_map = engine.device_map if directory == self.comparison.target else None
            model = load(directory, engine.dtype, engine.device, device_map)
            if self.comparison.batches != [1] and not model.takes_rows:
                raise UserError(
                    f"{directory} cannot decode texts of different lengths in one batch; use --batch 1"
                )
            self._loaded[directory] = model
        return self._loaded[directory]

    def running(self, directory: Path, int8: bool) -> Decoder:
        """Return the model of a checkpoint in the engine's mode. int8: Whether to round its weights to 8 bits."""
        if (directory, int8) not in self._running:
            model = self.eager(directory)
            running = (
                with_mode(model, self.engine.mode, int8) if isinstance(model, Llama) else model
            )
            self._running[directory, int8] = running
        return self._running[directory, int8]

    def draft(self, directory: Path) -> Decoder:
        return self.running(directory, self.engine.draft_int8)

    @property
    def target(self) -> Decoder:
        return self.running(self.comparison.target, self.engine.target_int8)

    @property
    def other_target(self) -> Decoder | None:
        """Return the target at the other precision: with full weights if `target` has int8 weights, else with int8.

        Only plain decoding is timed with it. If plain decoding is timed at one precision only, return None, see
        Comparison.two_precisions.
        """
        if not self.comparison.two_precisions:
            return None
        return self.running(self.comparison.target, not self.engine.target_int8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The loaded models of a comparison, ready to be timed.

    Args:
        runs: Drafts and drafters, by name.
        tasks: Results of lm-eval, by the directory of the model.
        command: Command line to record in the scores.
        learnt_prompts: Number of prompts in the training data of each draft or drafter, by name.
    """

    comparison: Comparison
    models: Models
    runs: Mapping[str, DrafterRun]
    tasks: Mapping[Path, list[TaskResult]]
    environment: Environment
    command: str
    learnt_prompts: Mapping[str, int]

    def scores(self, batch: int) -> list[Score]:
        """Time all drafts and drafters at a batch size, and return the score of each draft and drafter."""
        comparison = self.comparison
        timer = self._pass_timer(batch)
        with note_if_slow("warming up the passes of single models"):
            timer.rounds.warm_up()
        before = read_core_time()
        measured = self._throughput(batch, timer)
        latency = timer.curves()
        environment = with_waiting(self.environment, before, read_core_time())
        target = self._model("", self.models.target, comparison.target, latency, {})
        rounding, other_plain = None, dict[str, list[Generation]]()
        other_target = self.models.other_target
        if other_target is not None:
            with note_if_slow("measuring what rounding costs the target"):
                rounding = self._rounding(other_target, measured.tokens[PLAIN])
            other_plain[self._weights(other_target)] = measured.generations[OTHER_PLAIN]
        scores = []
        for name, run in self.runs.items():
            draft = comparison.drafts.get(name)
            score = Score(
                name=self._label(name, batch),
                target=target,
                draft=self._model(name, run.model, draft, latency, run.facts),
                conditions=self._conditions(name, batch),
                environment=environment,
                plain=measured.generations[PLAIN],
                other_plain=other_plain,
                rounding=rounding,
                speculative={k: measured.generations[name, k] for k in run.ks},
                command=self.command,
                versions=provenance.versions(),
                learnt=run.learnt,
                made=comparison.made(name),
                learnt_prompts=self.learnt_prompts[name],
                **comparison.requests.score_facts(
                    measured.tokens[PLAIN], [measured.tokens[name, k] for k in run.ks]
                ),
            )
            scores.append(score)
        return scores

    def _rounding(self, other_target: Decoder, answers: list[list[int]]) -> Rounding:
        """Compare the target with and without int8 weights, on the prompts and the answers of plain decoding."""
        whole, rounded = self.models.target, other_target
        if self.comparison.engine.target_int8:
            whole, rounded = rounded, whole
        prompts = self.comparison.requests.prompts.rows
        pairs = zip(prompts, answers, strict=True)
        return compare(whole, rounded, [[*prompt.ids, *answer] for prompt, answer in pairs])

    def _pass_timer(self, batch: int) -> PassTimer:
        """Return a timer of the passes of all models that draftlab's engine runs, each named by its object's id."""
        comparison, ks = self.comparison, self.comparison.ks

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
            if drafts_in_parallel(model):
                # the tokens of an accepted draft and one more, and mask tokens
                widths = sorted({1, *ks, *(2 * k for k in ks)})
                models[str(id(model))] = model, grid(widths, (), max(ks))
            else:
                after = sorted({number for number in (*AFTER, max(ks) - 1) if 0 < number < max(ks)})
                models[str(id(model))] = model, grid([1, 2], after, 1)
        target = self.models.target
        if isinstance(target, Llama):
            # plain decoding has a pass of the target before each pass
            models[str(id(target))] = target, grid([1, *(k + 1 for k in ks)], [2], 0)
        return PassTimer(models, steady_clock(comparison.engine.device))

    def _throughput(self, batch: int, timer: PassTimer) -> TimedArms:
        """Decode all prompts in all ways. Rounds of the timer are spread over the decoding."""
        comparison, requests = self.comparison, self.comparison.requests
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
        engine, rule = comparison.engine, comparison.rule.verify
        if rule == REJECTION:
            own_rules = {spec.name: spec.rejection_rule for spec in comparison.drafters}
            rule = own_rules.get(name, REJECTION)
        return Conditions(
            **comparison.requests.conditions(),
            device=device_name(engine.device),
            dtype=checkpoint.dtype_name(engine.dtype),
            mode=engine.mode,
            threads=torch.get_num_threads(),
            context=comparison.context,
            batch=batch,
            target_weights=self._weights(self.models.target),
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
            following=[]
            if curves is None
            else [_fields(FollowingLatency, p) for p in curves.steady],
            tasks=self.tasks.get(path, []) if path else [],
            via_transformers=decoder is not None and decoder.architecture is None,
            **facts,
        )

    def _draft_weights(self, name: str, run: DrafterRun) -> str | None:
        engine = self.comparison.engine
        if "heads_sha256" in run.facts:
            return "int8" if engine.draft_int8 else checkpoint.dtype_name(engine.dtype)
        rounded = parse_quantized_name(name)[1] if name in self.comparison.drafts else None
        return rounded or (None if run.model is None else self._weights(run.model))

    def _weights(self, model: Decoder) -> str:
        """Return the precision of a model's weights: int8, the checkpoint's quantisation, or the engine's dtype."""
        return model.weights_dtype or checkpoint.dtype_name(self.comparison.engine.dtype)


def _fields(kind: type[AnyLatency], point: Latency) -> AnyLatency:
    """Return a point of a latency curve without its batch size and context, which the conditions of a score have."""
    return kind(**point.model_dump(include=set(kind.model_fields)))


def _accuracies(comparison: Comparison) -> dict[Path, list[TaskResult]]:
    """Evaluate target and drafts with lm-eval, and return the results by directory. Without --tasks, return {}."""
    tasks, engine = comparison.tasks, comparison.engine
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


def compare(whole: Decoder, rounded: Decoder, texts: Sequence[Sequence[int]]) -> Rounding:
    """Compare the next-token distributions of a model and of its rounded copy, after every token of the texts.

    texts: Token ids of each text.
    """
    divergence, equal, count = 0.0, 0, sum(map(len, texts))
    for text in texts:
        ids = torch.tensor([text])
        p, q = (
            model.forward_uncached(ids, len(text)).float().log_softmax(-1)
            for model in (whole, rounded)
        )  # [1, T, V]
        divergence += float(F.kl_div(q, p, reduction="sum", log_target=True))
        equal += int((p.argmax(-1) == q.argmax(-1)).sum())
    return Rounding(tokens=count, kl=divergence / count, top1=equal / count)


def _with_turns(comparison: Comparison, models: Models) -> Comparison:
    """Return a copy of the comparison with a prompt for every turn of a conversation.

    The prompt of a turn contains the earlier turns and the target's answers to them.
    """
    requests, target = comparison.requests, comparison.target
    native = comparison.engine.mode == "native"
    model = models.running(target, False) if native else models.eager(target)
    prompts = answer_turns(requests.prompts, target, model, requests.sampling)
    return replace(comparison, requests=replace(requests, prompts=prompts))


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
    return runs | {spec.name: spec.build(context) for spec in comparison.drafters}
