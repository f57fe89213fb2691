"""Score drafts against a target: everything in one process, then one score.json per draft."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import torch

from draftlab import provenance, turns
from draftlab.benchmark.example import record_example
from draftlab.benchmark.setup import (
    Setup,
    check_context,
    check_memory,
    quantized_drafts,
    set_up,
    shared_conditions,
    tasks_of,
)
from draftlab.benchmark.throughput import OTHER_PLAIN, PLAIN, Measured, measure_throughput
from draftlab.config.score import ScoreConfig
from draftlab.console import heartbeat, note, note_if_slow, progress
from draftlab.engine.batch_generate import turn_answers
from draftlab.engine.drafters.context import DrafterContext, DrafterRun
from draftlab.engine.drafters.parallel import drafts_in_parallel, model_drafter
from draftlab.engine.rejection_rules import rule_named
from draftlab.errors import OtherArchitecture, Quantised, UserError
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
from draftlab.latency.profiler import measure_latency
from draftlab.model import checkpoint, hub, llama
from draftlab.model.decoder import Decoder, load, model_vocab_size, with_mode
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.hf_files import quantization_method
from draftlab.model.llama import Llama
from draftlab.model.native_cpu import NativeLlama
from draftlab.model.size import read_size
from draftlab.model.tokenizer import known_ids
from draftlab.output import Output
from draftlab.registry import REJECTION
from draftlab.results.decoding import Example, share_of_equal_texts
from draftlab.results.environment import Environment
from draftlab.results.score import Conditions, Latency, Model, Prompt, Score, TaskResult
from draftlab.target_outputs.repeats import distinct_ngrams

LATENCY_PASSES = 60


def score(config: ScoreConfig, output: Output) -> list[Score]:
    """Measure every draft, write NAME/score.json for each, and return the scores in the order of the drafts.

    Raises:
        UserError: settings that do not fit, too little memory, or task data that cannot be had.
    """
    setup = set_up(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with quantized_drafts(setup) as used:
        scores = measure(used, output.command_line)
    with output.directory() as work:
        for result in scores:
            (work / result.name).mkdir()
            (work / result.name / "score.json").write_text(result.model_dump_json(indent=1))
        output.record(work, setup.inputs)
    return scores


def describe(config: ScoreConfig) -> dict[str, object]:
    """Return what score would do, for a plan."""
    setup = set_up(config, weights=False)
    drafts = {name: _describe_model(path) for name, path in setup.drafts.items()}
    drafters = {spec.name: _described_inputs(spec.paths(setup.default_draft)) for spec in setup.drafters}
    work = f"at most {setup.generations()} generations of {config.max_tokens} tokens"
    return {"target": _describe_model(setup.target), **drafts, **drafters, "work": work}


def measure(setup: Setup, command: str) -> list[Score]:
    """Run everything and return the scores. command: the command line, for the record."""
    config = setup.config
    check_memory(setup)
    tasks = _accuracies(setup)
    loaded = LoadedModels(setup)
    models = loaded.directories()
    target = models[""]
    setup = _with_turns(setup, loaded)
    largest = max(config.k)
    check_context({name: model.context for name, model in models.items()}, setup, largest)
    runs = _drafter_runs(target, loaded)
    for run in runs.values():
        decoders = {"": target, **({"its draft": run.model} if run.model else {})}
        check_context({name: model.context for name, model in decoders.items()}, setup, max(run.ks))
    measurement = Measurement(
        setup=setup, models=models, other_target=loaded.other_target(), runs=runs,
        described=_described(loaded, models, runs, tasks), command=command,
        environment=read_environment(),
    )  # fmt: skip
    warn_if_busy(measurement.environment)
    return [score for batch in config.batch for score in measurement.scores(batch)]


class LoadedModels:
    """The models of a run, each checkpoint loaded once."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._models: dict[Path, Decoder] = {}
        self._running: dict[tuple[Path, bool], Decoder] = {}

    def model(self, directory: Path) -> Decoder:
        """Return a checkpoint in mode eager."""
        if directory not in self._models:
            setup, config = self.setup, self.setup.config
            note(f"loading {hub.checkpoint_name(directory)}")
            model = load(directory, setup.dtype, setup.device, setup.device_map(directory))
            if isinstance(model, HFDecoder) and (setup.mode != "eager" or config.batch != [1]):
                raise UserError(f"transformers runs {directory}, which needs --mode eager --batch 1")
            self._models[directory] = model
        return self._models[directory]

    def running(self, directory: Path, int8: bool) -> Decoder:
        """Return a checkpoint in the mode of the run."""
        if (directory, int8) not in self._running:
            model = self.model(directory)
            running = with_mode(model, self.setup.mode, int8) if isinstance(model, Llama) else model
            self._running[directory, int8] = running
        return self._running[directory, int8]

    def directories(self) -> dict[str, Decoder]:
        """Return the target, by the empty name, and the drafts."""
        int8 = self.setup.config.draft_int8
        drafts = {name: self.running(path, int8) for name, path in self.setup.drafts.items()}
        return {"": self.running(self.setup.target, self.setup.config.target_int8), **drafts}

    def other_target(self) -> Decoder | None:
        """Return the target with the weights that do not verify; None where its dtype is the only precision."""
        if not self.setup.other_plain:
            return None
        return self.running(self.setup.target, not self.setup.config.target_int8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run's models, ready to be timed. described: every model by name, without its latency."""

    setup: Setup
    models: Mapping[str, Decoder]
    other_target: Decoder | None
    runs: Mapping[str, DrafterRun]
    described: Mapping[str, Model]
    environment: Environment
    command: str

    def scores(self, batch: int) -> list[Score]:
        """Time all models and drafters at a batch size."""
        latency = self._latency(batch)
        before = read_core_time()
        measured = self._throughput(batch)
        timed = replace(self, environment=with_waiting(self.environment, before, read_core_time()))
        models = {
            name: model.model_copy(update={"latency": latency.get(name, [])}) for name, model in self.described.items()
        }
        return [timed._score(name, models, measured, batch) for name in [*self.setup.drafts, *self.runs]]

    def _latency(self, batch: int) -> dict[str, list[Latency]]:
        """Time single passes of the models that our own engine runs."""
        decoders = {**self.models, **{name: run.model for name, run in self.runs.items() if run.model}}
        own = {name: model for name, model in decoders.items() if isinstance(model, Llama)}
        if not own:
            return {}
        widths = [1, *(k + 1 for k in self.setup.config.k)]
        note(f"latency of {len(own)} models at widths {widths[0]} to {widths[-1]}, batch {batch}")
        with heartbeat("latency"):
            return measure_latency(
                own, widths=widths, context=self.setup.context, passes=LATENCY_PASSES, batch=batch,
                clock=steady_clock(self.setup.device),
            )  # fmt: skip

    def _throughput(self, batch: int) -> Measured:
        setup, config = self.setup, self.setup.config
        prompts = [prompt.ids for prompt in setup.prompts.rows]
        drafts = {name: model for name, model in self.models.items() if name}
        arms = 1 + self.setup.other_plain + len(drafts) * len(config.k) + sum(len(run.ks) for run in self.runs.values())
        with progress("decode", len(prompts) * config.repeats) as advance:
            return measure_throughput(
                self.models[""], drafts, prompts, other_target=self.other_target,
                ks=config.k, sampling=setup.sampling, repeats=config.repeats,
                batch=batch, drafters={name: (run.drafter, run.ks) for name, run in self.runs.items()},
                rule=rule_named(config.acceptance.rule), draft_temperature=config.acceptance.draft_temperature,
                advance=lambda done: advance(done, f"{arms} ways each"),
                clock=steady_step_clock(setup.device),
            )  # fmt: skip

    def _score(self, name: str, models: Mapping[str, Model], measured: Measured, batch: int) -> Score:
        config, plain_tokens = self.setup.config, measured.tokens[PLAIN]
        ks = [k for arm, k in measured.tokens if arm == name]
        texts = [measured.tokens[name, k] for k in ks]
        other = {} if self.other_target is None else {_weights(self.other_target, self.setup): OTHER_PLAIN}
        result = Score(
            name=self._label(name, batch),
            target=models[""],
            draft=models[name],
            conditions=self._conditions(name, batch),
            environment=self.environment,
            prompts=[Prompt(tokens=len(p.ids), category=p.category) for p in self.setup.prompts.rows],
            plain=measured.generations[PLAIN],
            other_plain={weights: measured.generations[arm] for weights, arm in other.items()},
            speculative={k: measured.generations[name, k] for k in ks},
            equal_texts=share_of_equal_texts(plain_tokens, texts) if config.temperature == 0 else None,
            distinct_4grams=distinct_ngrams(plain_tokens, 4),
            command=self.command,
            versions=provenance.versions(),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            learnt=self.runs[name].learnt if name in self.runs else None,
            made=self.setup.made(name),
        )
        return result.model_copy(update={"example": self._example(name, result)})

    def _label(self, name: str, batch: int) -> str:
        """Return the name of a result: of a drafter or draft, of int8 weights, at a batch size."""
        models = [*self.setup.drafts, *(s.name for s in self.setup.drafters if s.drafts)]
        rounded = "@int8" if self.setup.config.draft_int8 and name in models else ""
        return f"{name}{rounded}" + (f"-b{batch}" if len(self.setup.config.batch) > 1 else "")

    def _example(self, name: str, score: Score) -> Example:
        target, setup, prompt = self.models[""], self.setup, score.median_prompt
        run = self.runs.get(name)
        drafter = run.drafter if run else model_drafter(self.models[name], model_vocab_size(target))
        tokenizer = checkpoint.load_tokenizer(setup.target)
        with note_if_slow(f"{name}: prompt {prompt} once more, step by step"):
            return record_example(
                target, drafter, lambda ids: str(tokenizer.decode(ids)), setup.prompts.rows[prompt].ids, number=prompt,
                k=score.best_k, sampling=setup.sampling, rule=rule_named(setup.config.acceptance.rule),
                draft_temperature=setup.config.acceptance.draft_temperature,
            )  # fmt: skip

    def _conditions(self, name: str, batch: int) -> Conditions:
        setup, config = self.setup, self.setup.config
        rejection = {spec.name: spec.rejection_rule for spec in setup.drafters}.get(name, REJECTION)
        return Conditions(
            **shared_conditions(config, setup.prompts),
            device=device_name(setup.device),
            dtype=checkpoint.dtype_name(setup.dtype),
            mode=setup.mode,
            threads=torch.get_num_threads(),
            context=setup.context,
            batch=batch,
            target_weights=_weights(self.models[""], setup),
            draft_weights=self._draft_weights(name),
            draft_temperature=config.acceptance.draft_temperature,
            rule=rejection if config.acceptance.rule == REJECTION else config.acceptance.rule,
        )

    def _draft_weights(self, name: str) -> str | None:
        setup, run = self.setup, self.runs.get(name)
        if run is None:
            return parse_quantized_name(name)[1] or _weights(self.models[name], setup)
        if "heads_sha256" in run.facts:
            return "int8" if setup.config.draft_int8 else checkpoint.dtype_name(setup.dtype)
        return None if run.model is None else _weights(run.model, setup)


def _with_turns(setup: Setup, loaded: LoadedModels) -> Setup:
    """Return the setup with a prompt for every turn."""
    if setup.turns is None:
        return setup
    model = loaded.running(setup.target, False) if setup.mode == "native" else loaded.model(setup.target)
    prompts = turns.answered(
        setup.prompts, checkpoint.load_tokenizer(setup.target), target=provenance.fingerprint(setup.target),
        sampling=setup.sampling, answer=turn_answers(model, known_ids(setup.target), setup.sampling),
    )  # fmt: skip
    return replace(setup, prompts=prompts)


def _describe_model(directory: Path) -> str:
    try:
        return llama.check_supported(directory).describe()
    except OtherArchitecture as error:
        return f"{read_size(directory).describe()}; {error}; transformers runs it"
    except Quantised:
        return f"{read_size(directory).describe()}; quantised; transformers runs it"


def _described_inputs(paths: list[Path]) -> str:
    return f"reads {', '.join(map(str, paths))}" if paths else "reads no files"


def _drafter_runs(target: Decoder, loaded: LoadedModels) -> dict[str, DrafterRun]:
    """Return the drafters of --drafter by name."""
    setup = loaded.setup
    if not setup.drafters:
        return {}
    context = DrafterContext(
        target, setup.target, lambda path: loaded.running(path, setup.config.draft_int8), setup.default_draft,
        data=setup.config.data, sampling=setup.sampling, ks=setup.config.k, mode=setup.mode,
        clock=steady_clock(setup.device), int8=setup.config.draft_int8,
    )  # fmt: skip
    return {spec.name: spec.build(context) for spec in setup.drafters}


def _weights(model: Decoder, setup: Setup) -> str:
    """Return the precision of a model's weights: int8, how its checkpoint is quantised, or the run's dtype."""
    if isinstance(model, NativeLlama) and model.int8:
        return "int8"
    quantised = quantization_method(model.model.config.to_dict()) if isinstance(model, HFDecoder) else None
    return quantised or checkpoint.dtype_name(setup.dtype)


def _described(
    loaded: LoadedModels,
    models: Mapping[str, Decoder],
    runs: Mapping[str, DrafterRun],
    tasks: Mapping[str, list[TaskResult]],
) -> dict[str, Model]:
    """Return all models by name, with their lm-eval results and without their latency."""
    setup = loaded.setup
    described = {
        name: _model(models[name], hub.checkpoint_name(path), path, tasks.get(name, []))
        for name, path in {"": setup.target, **setup.drafts}.items()
    }
    described |= {name: _model(run.model, name, None, []) for name, run in runs.items()}
    facts: dict[str, Mapping[str, object]] = {name: run.facts for name, run in runs.items()}
    facts |= {name: {"parallel": True} for name in setup.drafts if drafts_in_parallel(models[name])}
    return described | {name: described[name].model_copy(update=each) for name, each in facts.items()}


def _model(decoder: Decoder | None, name: str, path: Path | None, tasks: list[TaskResult]) -> Model:
    return Model(
        name=name,
        sha256=provenance.fingerprint(path) if path else None,
        shape=decoder.shape if isinstance(decoder, Llama) else None,
        latency=[],
        tasks=tasks,
        via_transformers=isinstance(decoder, HFDecoder),
    )


def _accuracies(setup: Setup) -> dict[str, list[TaskResult]]:
    """Return the lm-eval results of the target, by the empty name, and of the drafts, loaded one after the other."""
    if not setup.config.task_names:
        return {}
    tasks = tasks_of(setup.config)
    return {
        name: tasks.of_checkpoint(path, setup.dtype, setup.device, spread=setup.device_map(path) is not None)
        for name, path in {"": setup.target, **setup.drafts}.items()
    }
