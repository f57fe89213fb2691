"""Measure the accuracy of models by lm-eval: one result per model and task, each kept as soon as it is there."""

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from pydantic import TypeAdapter

from draftlab import provenance
from draftlab.atomic import remove_state, write_atomic
from draftlab.benchmark.code_tasks import OWN_TASKS
from draftlab.benchmark.lm_eval_model import BATCH_SIZE, with_whole_head
from draftlab.benchmark.lm_eval_tasks import (
    TaskOptions,
    Tasks,
    check_chat_template,
    check_tasks,
    evaluate_tasks,
    prepare,
    tokens_per_item,
)
from draftlab.config.accuracy import AccuracyConfig
from draftlab.console import note
from draftlab.engine.timing import bandwidth_gbs, matmul_tflops
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub, memory
from draftlab.model.decoder import Decoder, in_native_mode, load
from draftlab.model.size import read_size
from draftlab.output import Output
from draftlab.reading import validated
from draftlab.results.accuracy import FILE, Accuracy, AccuracyConditions, ModelAccuracy
from draftlab.results.score import TaskResult

RESULTS = TypeAdapter(list[TaskResult])
EFFICIENCY = 0.4  # of the rate of a large product, in passes over texts (SmolLM2-135M, one core)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A run with all names resolved and the data of the tasks, by their names, in memory."""

    config: AccuracyConfig
    models: dict[str, Path]
    tasks: dict[str, Tasks]
    options: TaskOptions
    device: torch.device
    dtype: torch.dtype


def measure_accuracy(config: AccuracyConfig, output: Output) -> Accuracy:
    """Evaluate every model on every task, and write accuracy.json. What a killed run finished is not measured again.

    Raises:
        UserError: a model or the data of a task that cannot be had, or options that a task ignores.
    """
    setup = set_up(config)
    paths = list(setup.models.values())
    output.claim_state([*paths, *_files(config)], but=["batch_size", "threads"])
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    result = Accuracy(
        models=[_measure(setup, name, output.state) for name in setup.models],
        conditions=AccuracyConditions(
            limit=config.limit, num_fewshot=config.num_fewshot, apply_chat_template=config.apply_chat_template,
            data=config.data, dtype=checkpoint.dtype_name(setup.dtype), seed=config.seed,
        ),
        items={name: tasks.items for name, tasks in setup.tasks.items()},
        command=output.command_line,
        versions=provenance.versions(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )  # fmt: skip
    with output.directory() as work:
        (work / FILE).write_text(result.model_dump_json(indent=1))
        output.record(work, [*paths, *_files(config)])
    remove_state(output.state)
    return result


def describe(config: AccuracyConfig) -> dict[str, object]:
    """Return what would be evaluated, and about how long it would take here."""
    setup = set_up(config, weights=False)
    sizes = {name: read_size(path) for name, path in setup.models.items()}
    facts: dict[str, object] = {name: size.describe() for name, size in sizes.items()}
    tokenizer = checkpoint.load_tokenizer(next(iter(setup.models.values())))
    read = written = 0.0
    for name, tasks in setup.tasks.items():
        per_item, answer = tokens_per_item(tasks, tokenizer)
        facts[name] = f"{tasks.items:,} items, about {tasks.items * per_item:,.0f} tokens to read"
        facts[name] = f"{facts[name]}, at most {tasks.items * answer:,} to write" if answer else facts[name]
        read, written = read + tasks.items * per_item, written + tasks.items * answer
    rate = EFFICIENCY * matmul_tflops(setup.dtype, setup.device) * 1e12
    rows, width = min(config.batch_size or BATCH_SIZE, BATCH_SIZE), setup.dtype.itemsize
    seconds = sum(2 * read * size.params() / rate for size in sizes.values())
    if written:  # each pass reads all weights for a token of each row
        seconds += sum(
            written / rows * size.params() * width / 1e9 / bandwidth_gbs(size.params(), setup.dtype, setup.device)
            for size in sizes.values()
        )
    return facts | {"time": "about a minute or less" if seconds < 60 else f"about {seconds / 60:,.0f} min here and now"}


def set_up(config: AccuracyConfig, *, weights: bool = True) -> Setup:
    """Resolve names and load the data of all tasks. weights: False fetches configurations and tokenizers only."""
    options = TaskOptions(
        limit=config.limit, num_fewshot=config.num_fewshot, apply_chat_template=config.apply_chat_template,
        batch_size=config.batch_size, seed=config.seed, include_path=config.include_path,
    )  # fmt: skip
    paths = [hub.locate(name, weights) for name in config.models]
    models = {hub.checkpoint_name(path): path for path in paths}
    if len(models) < len(paths):
        raise UserError(f"two models have the same directory name; rename one: {', '.join(config.models)}")
    for path in paths:
        check_chat_template(path, options)
        if weights:
            checkpoint.check(path)
    device = checkpoint.resolve_device(config.device)
    check_tasks(config.task_names, options)
    if set(config.task_names) & set(OWN_TASKS):
        hub.check_data(config.data)
    tasks = {name: prepare([name], options, config.data) for name in config.task_names}
    return Setup(
        config=config, models=models, tasks=tasks, options=options, device=device,
        dtype=checkpoint.resolve_dtype(config.dtype, device),
    )  # fmt: skip


def _measure(setup: Setup, name: str, state: Path) -> ModelAccuracy:
    """Evaluate one model on the tasks that have no file in the state directory; it is loaded if there are any."""
    path, results = setup.models[name], list[TaskResult]()
    model: Decoder | None = None
    for number, (task, tasks) in enumerate(setup.tasks.items()):
        file = state / f"{name}.{number}.json"
        if not file.exists():
            model = model or _load(setup, path)
            measured = evaluate_tasks(model, path, tasks, label=task)
            write_atomic(file, RESULTS.dump_json(measured).decode())
        results += validated(RESULTS, file)
    return ModelAccuracy(name=name, sha256=provenance.fingerprint(path), results=results)


def _load(setup: Setup, path: Path) -> Decoder:
    """Load a model in the mode that is fastest for lm-eval, with the whole head of a trimmed one."""
    needed = {"weights": read_size(path).weight_bytes(setup.dtype.itemsize)}
    memory.check_fits(needed, setup.device, "--dtype bfloat16")
    note(f"loading {hub.checkpoint_name(path)}")
    model = with_whole_head(load(path, setup.dtype, setup.device), path)
    return in_native_mode(model, setup.dtype, "evaluating")


def _files(config: AccuracyConfig) -> list[Path]:
    return [Path(name) for name in config.task_names if Path(name).is_file()]
