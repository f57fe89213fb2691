"""Score drafts against a target: everything in one process, then one score.json per draft."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import torch

from draftlab import provenance
from draftlab.benchmark.drafter_factory import DrafterFactory, DrafterRun, Spec, check_rule, check_target
from draftlab.benchmark.lm_eval_model import whole_head, writer
from draftlab.benchmark.lm_eval_tasks import Tasks, check_tasks, evaluate_tasks, prepare
from draftlab.benchmark.throughput import PLAIN, Measured, measure_throughput
from draftlab.console import heartbeat, note, progress
from draftlab.engine.generate import ModelDrafter
from draftlab.engine.rejection_rules import LOSSY, rule_named
from draftlab.errors import UserError
from draftlab.latency.machine_state import device_name, read_environment, steady_clock, warn_if_busy
from draftlab.latency.profiler import measure_latency
from draftlab.model import Mode, checkpoint, hub, llama, memory
from draftlab.model.checkpoint import max_model_len
from draftlab.model.decoder import Decoder, load, model_vocab_size, with_mode
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import Llama
from draftlab.model.size import read_size
from draftlab.prompts import Prompts
from draftlab.results.score import Conditions, Environment, Latency, Model, Prompt, Score, TaskResult
from draftlab.sampling import SamplingParams
from draftlab.target_outputs.repeats import distinct_ngrams

LATENCY_PASSES = 60
DEFAULT_RULE = "rejection"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure and how."""

    target: Path
    drafts: dict[str, Path]
    inputs: list[Path]  # to record: where drafts were made of something else for this, what that is
    data: str  # of the code tasks
    ks: list[int]
    prompts: Prompts
    max_new_tokens: int
    repeats: int
    warp: SamplingParams
    tasks: list[str]
    task_limit: int
    dtype: torch.dtype
    device: torch.device
    threads: int | None
    seed: int
    command: str  # as typed
    mode: Mode = "eager"
    draft_int8: bool = False
    batches: Sequence[int] = (1,)
    drafters: Sequence[Spec] = ()
    default_draft: Path | None = None  # of drafters that name none
    rule: str = DEFAULT_RULE
    device_map: str | None = None  # of the target


def check(plan: Plan) -> None:
    """Fail before anything is loaded.

    Raises:
        UserError: texts beyond a context, batches that leave a smaller one over, a drafter that does not fit the rule,
            the target or the mode, two of one name, int8 in a mode that does not compute with it, or an unknown task.
    """
    count = len(plan.prompts.rows)
    for batch in plan.batches:
        if count % batch:
            raise UserError(f"{count} prompts do not fill batches of {batch}; take a number that all batches divide")
    taken = [*plan.drafts, *(file_name(spec) for spec in plan.drafters)]
    if twice := [name for name in taken if taken.count(name) > 1]:
        raise UserError(f"two results would both be called {twice[0]}; ask for one of them, or rename the draft")
    if plan.drafters:
        layers, vocab = _layers(plan.target), checkpoint.vocab_size(plan.target)
        for spec in plan.drafters:
            _check_drafter(spec, plan, layers, vocab)
    if plan.warp.temperature == 0 and (plan.rule != DEFAULT_RULE or plan.warp != SamplingParams()):
        note("greedily all rules are one and nothing is cut: --rule, --top-k, --top-p and --min-p need --temperature")
    if plan.device_map is not None and (plan.mode != "eager" or list(plan.batches) != [1]):
        raise UserError("--device-map has transformers run the target: take --mode eager --batch 1")
    if plan.draft_int8 and plan.mode != "native":
        raise UserError(f"--draft-int8 computes in mode native, not {plan.mode}")
    contexts = {name: max_model_len(path) for name, path in {"": plan.target, **plan.drafts}.items()}
    _check_context(contexts, plan, max(plan.ks))
    check_tasks(plan.tasks)  # last: lm-eval reads thousands of files


def _check_drafter(spec: Spec, plan: Plan, layers: int | None, vocab: int) -> None:
    check_rule(spec, plan.rule)
    check_target(spec, layers, vocab)
    if spec.kind == "medusa" and plan.mode != "eager":
        raise UserError(f"--drafter {spec.text} reads hidden states, which mode eager alone keeps, not {plan.mode}")


def check_memory(plan: Plan) -> None:
    """Raises UserError: weights, caches and logits do not fit what is free; what accelerate spreads is not counted."""
    paths = dict.fromkeys([plan.target, *plan.drafts.values(), *_drafter_paths(plan)])
    sizes = {path: read_size(path) for path in paths if plan.device_map is None or path != plan.target}
    width, texts = plan.dtype.itemsize, max(plan.batches) * (plan.prompts.longest + plan.max_new_tokens + max(plan.ks))
    passes = max(max(plan.batches) * (max(plan.ks) + 1), plan.prompts.longest)
    needs: dict[str, float] = {f"weights of {path}": size.weight_bytes(width) for path, size in sizes.items()}
    needs["caches"] = sum(texts * size.kv_bytes_per_token(width) for size in sizes.values())
    needs["logits"] = 2 * 4 * passes * checkpoint.vocab_size(plan.target)
    memory.check_fits(needs, plan.device, "--dtype bfloat16, --device-map auto, or a smaller --batch")


def _drafter_paths(plan: Plan) -> list[Path]:
    named = [spec.words("draft") for spec in plan.drafters if spec.needs_draft and spec.words("draft")]
    implied = any(spec.needs_draft and not spec.words("draft") for spec in plan.drafters)
    return [*map(hub.locate, named), *([plan.default_draft] if implied and plan.default_draft else [])]


class Loaded:
    """The models of a run, each checkpoint once: what is timed, in its mode, shares the weights of what is scored."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._models: dict[Path, Decoder] = {}
        self._running: dict[tuple[Path, bool], Decoder] = {}

    def model(self, directory: Path) -> Decoder:
        """As it is loaded."""
        if directory not in self._models:
            plan = self.plan
            note(f"loading {hub.checkpoint_name(directory)}")
            spread = plan.device_map if directory == plan.target else None
            model = load(directory, plan.dtype, plan.device, spread)
            if isinstance(model, HFDecoder) and (plan.mode != "eager" or list(plan.batches) != [1]):
                raise UserError(
                    f"transformers runs {directory}, one prompt at a time and eagerly: take --mode eager --batch 1"
                )
            self._models[directory] = model
        return self._models[directory]

    def running(self, directory: Path, int8: bool) -> Decoder:
        """As the run's mode computes it."""
        if (directory, int8) not in self._running:
            model = self.model(directory)
            made = with_mode(model, self.plan.mode, int8) if isinstance(model, Llama) else model
            self._running[directory, int8] = made
        return self._running[directory, int8]


def score(plan: Plan, *, out: Path, arguments: dict[str, object], began: float, force: bool) -> list[Score]:
    """Measure, write out/NAME/score.json for every draft, and return the scores, in the order of the drafts.

    Raises:
        UserError: too few prompts, a model that the engine does not know, task data that cannot be had, too little
            memory.
    """
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    check_memory(plan)
    wanted = _prepared(plan)
    directories = {"": plan.target, **plan.drafts}
    loaded = Loaded(plan)
    models = {name: loaded.running(path, plan.draft_int8 and bool(name)) for name, path in directories.items()}
    _check_context({name: model.context for name, model in models.items()}, plan, max(plan.ks))
    ways = _ways(models[""], loaded)
    for way in ways.values():
        asked = {"": models[""], **({"its draft": way.model} if way.model else {})}
        _check_context({name: model.context for name, model in asked.items()}, plan, max(way.ks))
    tasks = {name: _tasks(loaded.model(path), path, wanted) for name, path in directories.items()}
    assisted = {name: _assisted(models[""], models[name], name, plan, wanted) for name in plan.drafts}
    here = read_environment()
    warn_if_busy(here)
    known = {
        name: Model(
            name=hub.checkpoint_name(path),
            sha256=provenance.fingerprint(path),
            shape=model.shape if isinstance(model := models[name], Llama) else None,
            latency=[],
            tasks=tasks[name],
            via_transformers=isinstance(model, HFDecoder),
        )
        for name, path in directories.items()
    } | {
        name: Model(
            name=name,
            sha256=None,
            shape=way.model.shape if isinstance(way.model, Llama) else None,
            latency=[],
            tasks=[],
            via_transformers=isinstance(way.model, HFDecoder),
        )
        for name, way in ways.items()
    }
    scores = []
    for batch in plan.batches:
        latency = _latency(models | {n: w.model for n, w in ways.items() if w.model}, plan, batch)
        measured = _throughput(models, ways, plan, batch)
        described = {name: model.model_copy(update={"latency": latency.get(name, [])}) for name, model in known.items()}
        found = {name: _score(name, described, measured, plan, here, batch) for name in [*plan.drafts, *ways]}
        scores += [one.model_copy(update={"assisted": assisted.get(name, [])}) for name, one in found.items()]
    with checkpoint.new_directory(out, force=force) as work:
        for result in scores:
            (work / result.name).mkdir()
            (work / result.name / "score.json").write_text(result.model_dump_json(indent=1))
        provenance.write_record(work, "score", arguments, plan.inputs, began)
    return scores


def _latency(models: dict[str, Decoder], plan: Plan, batch: int) -> dict[str, list[Latency]]:
    """Of the models that the engine itself runs."""
    own = {name: model for name, model in models.items() if isinstance(model, Llama)}
    if not own:
        return {}
    widths = [1, *(k + 1 for k in plan.ks)]
    note(f"latency of {len(own)} models at widths {widths[0]} to {widths[-1]}, batch {batch}")
    with heartbeat("latency"):
        return measure_latency(
            own, widths=widths, context=_context(plan), passes=LATENCY_PASSES, batch=batch,
            clock=steady_clock(plan.device),
        )  # fmt: skip


def _ways(target: Decoder, loaded: Loaded) -> dict[str, DrafterRun]:
    """The drafters beside the drafts, by a name that a file can have."""
    plan = loaded.plan
    if not plan.drafters:
        return {}
    shop = DrafterFactory(
        target,
        plan.target,
        lambda path: loaded.running(path, plan.draft_int8),
        plan.default_draft,
        data=plan.data,
        sampling=_sampling(plan),
        ks=plan.ks,
        mode=plan.mode,
        clock=steady_clock(plan.device),
    )
    return {file_name(spec): shop.build(spec) for spec in plan.drafters}


def file_name(spec: Spec) -> str:
    return spec.text.replace("/", "_")


def _layers(target: Path) -> int | None:
    """None: transformers would have to run it."""
    try:
        return llama.check_supported(target).layers
    except UserError:
        return None


def _sampling(plan: Plan) -> SamplingParams:
    return replace(
        plan.warp,
        max_tokens=plan.max_new_tokens,
        seed=plan.seed,
        stop_token_ids=checkpoint.eos_token_ids(plan.target),
    )


def _throughput(models: dict[str, Decoder], ways: dict[str, DrafterRun], plan: Plan, batch: int) -> Measured:
    texts = [prompt.ids for prompt in plan.prompts.rows]
    drafts = {name: model for name, model in models.items() if name}
    arms = 1 + len(drafts) * len(plan.ks) + sum(len(way.ks) for way in ways.values())
    with progress("decode", len(texts) * plan.repeats) as advance:
        return measure_throughput(
            models[""],
            drafts,
            texts,
            ks=plan.ks,
            sampling=_sampling(plan),
            repeats=plan.repeats,
            batch=batch,
            drafters={name: (way.drafter, way.ks) for name, way in ways.items()},
            rule=None if plan.rule == DEFAULT_RULE else rule_named(plan.rule),
            advance=lambda done: advance(done, f"{arms} ways each"),
            clock=steady_clock(plan.device),
        )


def _prepared(plan: Plan) -> Tasks:
    if plan.tasks:
        note(f"data of {', '.join(plan.tasks)}")
    return prepare(plan.tasks, limit=plan.task_limit, seed=plan.seed, data=plan.data)


def _tasks(model: Decoder, directory: Path, wanted: Tasks) -> list[TaskResult]:
    if not len(wanted):
        return []
    note(f"lm-eval on {hub.checkpoint_name(directory)}")
    return evaluate_tasks(whole_head(model, directory), directory, wanted)


def _assisted(target: Decoder, draft: Decoder, name: str, plan: Plan, wanted: Tasks) -> list[TaskResult]:
    """Generation tasks of the target with the draft, at the largest K."""
    if not len(wanted.written):
        return []
    note(f"lm-eval on {hub.checkpoint_name(plan.target)} with {name}: {', '.join(wanted.written.registered['tasks'])}")
    tokenizer, ends = checkpoint.load_tokenizer(plan.target), checkpoint.eos_token_ids(plan.target)
    write = writer(target, ModelDrafter(draft, model_vocab_size(target)), max(plan.ks), tokenizer, ends)
    return evaluate_tasks(target, plan.target, wanted.written, write=write)


def _score(name: str, models: dict[str, Model], measured: Measured, plan: Plan, here: Environment, batch: int) -> Score:
    plain_tokens = measured.tokens[PLAIN]
    greedy = plan.warp.temperature == 0
    ks = [k for arm, k in measured.tokens if arm == name]
    same = all(measured.tokens[name, k] == plain_tokens for k in ks)
    lossy = plan.rule in LOSSY and not greedy
    label = f"{name}-LOSSY" if lossy else name
    trees = [file_name(spec) for spec in plan.drafters if spec.kind == "tree"]
    return Score(
        name=label if len(plan.batches) == 1 else f"{label}-b{batch}",
        target=models[""],
        draft=models[name],
        conditions=Conditions(
            device=device_name(plan.device),
            dtype=checkpoint.dtype_name(plan.dtype),
            mode=plan.mode,
            threads=torch.get_num_threads(),
            temperature=plan.warp.temperature,
            top_k=plan.warp.top_k,
            top_p=plan.warp.top_p,
            min_p=plan.warp.min_p,
            data=plan.prompts.source,
            prompts_sha256=plan.prompts.sha256,
            prompts=len(plan.prompts.rows),
            prompt_tokens=plan.prompts.tokens,
            max_tokens=plan.max_new_tokens,
            repeats=plan.repeats,
            context=_context(plan),
            seed=plan.seed,
            batch=batch,
            draft_int8=plan.draft_int8,
            rule="recursive" if plan.rule == DEFAULT_RULE and name in trees else plan.rule,
            lossy=lossy,
        ),
        environment=here,
        prompts=[Prompt(tokens=len(p.ids), category=p.category) for p in plan.prompts.rows],
        plain=measured.generations[PLAIN],
        speculative={k: measured.generations[name, k] for k in ks},
        identical=same if greedy else None,
        distinct_4grams=distinct_ngrams(plain_tokens, 4),
        command=plan.command,
        versions=provenance.versions(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _context(plan: Plan) -> int:
    """The middle of what is decoded."""
    return int(median(len(p.ids) for p in plan.prompts.rows)) + plan.max_new_tokens // 2


def _check_context(contexts: dict[str, int], plan: Plan, drafted: int) -> None:
    need = plan.prompts.longest + plan.max_new_tokens + drafted
    for name, context in contexts.items():
        if need > context:
            raise UserError(
                f"a prompt has {plan.prompts.longest} tokens; with {plan.max_new_tokens} more and {drafted} "
                f"drafted it does not fit the context of {name or 'the target'}, {context}"
            )
