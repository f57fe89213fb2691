"""Accuracy of a model by lm-eval: two tasks from held-out code on this disk, and all tasks of lm-eval."""

import contextlib
import difflib
import functools
import hashlib
import logging
import math
import numbers
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from draftlab.benchmark.code_tasks import OWN_TASKS, own_tasks
from draftlab.benchmark.lm_eval_model import Generate, code_model, language_model
from draftlab.console import heartbeat
from draftlab.errors import UserError, did_you_mean
from draftlab.model import hub
from draftlab.model.checkpoint import load_tokenizer
from draftlab.model.decoder import Decoder
from draftlab.results.score import TaskResult

if TYPE_CHECKING:  # lm-eval takes seconds to import, and who scores without tasks does not need it
    from lm_eval.api.model import LM
    from lm_eval.api.task import Task
    from lm_eval.tasks.manager import TaskDict, TaskManager
    from transformers import PreTrainedTokenizerBase

NOTHING: "TaskDict" = {"tasks": {}, "groups": {}}
FEWSHOT_SEED = 1234  # lm-eval's, so that it shows the same examples
LOCAL_FORMATS = ("json", "csv", "parquet", "text", "arrow")  # data sets that are files on this disk
SAMPLED_ITEMS = 16  # to estimate the tokens of a task
MAX_GEN_TOKENS = 256  # of an answer, lm-eval's default
BOOTSTRAP_SAMPLES = 1000  # for the few metrics without a closed form; lm-eval's 100,000 take minutes
NOISY_LOGGERS = ("lm_eval", "datasets", "huggingface_hub")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """Options of an evaluation, with lm-eval's names. limit: the first items of each task."""

    limit: int | None = None
    num_fewshot: int | None = None  # None: the task's own number
    apply_chat_template: bool = False
    batch_size: int | None = None  # None: as many texts as memory allows
    seed: int = 0
    include_path: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """Tasks with their data."""

    own: "TaskDict"
    registered: "TaskDict"
    options: TaskOptions

    @property
    def generation(self) -> "Tasks":
        """Return the tasks whose answers are generated."""
        tasks = {n: t for n, t in self.registered["tasks"].items() if t.OUTPUT_TYPE == "generate_until"}
        return replace(self, own=NOTHING, registered={"tasks": tasks, "groups": {}})

    @property
    def items(self) -> int:
        """Return the number of items that are evaluated."""
        tasks = [*self.own["tasks"].values(), *self.registered["tasks"].values()]
        return sum(min(len(task.eval_docs), self.options.limit or len(task.eval_docs)) for task in tasks)

    def __len__(self) -> int:
        return len(self.own["tasks"]) + len(self.registered["tasks"])


def prepare(tasks: list[str], options: TaskOptions, data: str = "stdlib") -> Tasks:
    """Load the data of every task, before any model is loaded.

    Args:
        tasks: code_next_line, code_bits_per_byte, names that lm-eval registers, or paths to its YAML files.
        data: source of the two code tasks; its held-out split is used.

    Raises:
        UserError: an unknown task, data that is not available, or options that a task ignores.
    """
    if options.limit is not None and options.limit < 1:
        raise UserError(f"task limit {options.limit}: want at least 1 item per task")
    check_tasks(tasks, options)
    with heartbeat(f"data of {', '.join(tasks)}"), _quiet(), _seeded(options.seed):
        own = own_tasks([name for name in tasks if name in OWN_TASKS], data, options.limit, options.seed)
        registered = _registered_tasks([name for name in tasks if name not in OWN_TASKS], options)
    for task in registered["tasks"].values():
        _set_fewshot(task, options.num_fewshot)
    return Tasks(own=own, registered=registered, options=options)


def evaluate_tasks(
    model: Decoder,
    directory: Path,
    tasks: Tasks,
    *,
    context: int = 512,
    generate: Generate | None = None,
    label: str = "lm-eval",
) -> list[TaskResult]:
    """Return every metric of every task for a loaded model.

    Args:
        directory: checkpoint of the model.
        context: window of the two code tasks in tokens, at most the model's own; lm-eval's tasks get the model's own.
        generate: generates the answers of generation tasks instead of the model alone.
        label: what progress is called.

    Raises:
        UserError: a chat template is asked for, and the tokenizer has none.
    """
    tokenizer, results, options = load_tokenizer(directory), list[TaskResult](), tasks.options
    check_chat_template(directory, options)
    with heartbeat(f"{label} on {directory.name}") as beat, _quiet(), _seeded(options.seed):
        advance = lambda done, total: beat(f"{done:,} of {total:,} requests")  # noqa: E731
        if tasks.own["tasks"]:
            window = min(context, model.context)
            lm = code_model(model, directory, tokenizer, window, options.batch_size, advance)
            results += _evaluate(lm, tasks.own, options)
        if tasks.registered["tasks"]:
            lm = language_model(model, directory, tokenizer, generate, options.seed, options.batch_size, advance)
            results += _evaluate(lm, tasks.registered, options)
    return results


def tokens_per_item(tasks: Tasks, tokenizer: "PreTrainedTokenizerBase") -> tuple[float, int]:
    """Return about how many tokens a model reads for an item, and at most writes, from the first few items."""
    read, written, few = 0.0, 0, min(tasks.items, SAMPLED_ITEMS)
    every = [*tasks.own["tasks"].values(), *tasks.registered["tasks"].values()]
    with _quiet(), _seeded(tasks.options.seed):
        for task in every:
            task.build_all_requests(limit=few, rank=0, world_size=1)
            texts = {text for request in task.instances for text in _texts(request.arguments)}
            docs = len({request.doc_id for request in task.instances})
            read += sum(len(ids) for ids in tokenizer(list(texts), verbose=False)["input_ids"]) / docs
            kwargs = task.get_config("generation_kwargs") or {}
            written += kwargs.get("max_gen_toks", MAX_GEN_TOKENS) if task.OUTPUT_TYPE == "generate_until" else 0
    return read / len(every), written // len(every)


def _texts(arguments: tuple[Any, ...]) -> list[str]:
    """Return the texts of a request, without the settings of generation."""
    return [text for text in arguments if isinstance(text, str)]


def check_tasks(names: list[str], options: TaskOptions) -> None:
    """Check the names of tasks, and that no option means nothing to one of them; no data is read.

    Raises:
        UserError: neither a task of draftlab or lm-eval nor a file, or a task of code with an option of lm-eval's.
    """
    if options.include_path is not None and not options.include_path.is_dir():
        raise UserError(f"--include-path {options.include_path}: no such directory")
    for name in names:
        if name in OWN_TASKS:
            if options.apply_chat_template or options.num_fewshot:
                flag = "--apply-chat-template" if options.apply_chat_template else "--num-fewshot"
                raise UserError(
                    f"{flag}: {name} is plain text of code; evaluate it without, or leave it out of --tasks"
                )
            continue
        if Path(name).is_file() or name in _index(name, options.include_path).all_tasks:
            continue
        known = [*OWN_TASKS, *_index(name, options.include_path).all_tasks]
        near = difflib.get_close_matches(name, known, n=1)
        hint = did_you_mean(name, near or [*OWN_TASKS, "what `lm-eval ls tasks` lists"])
        raise UserError(f"--tasks {name}: neither a task of draftlab or lm-eval nor a YAML file{hint}")


def check_chat_template(directory: Path, options: TaskOptions) -> None:
    """Raises UserError: a chat template is asked for, and the tokenizer has none."""
    if options.apply_chat_template and not load_tokenizer(directory).chat_template:
        raise UserError(f"--apply-chat-template: the tokenizer of {directory} has no chat template")


def _registered_tasks(names: list[str], options: TaskOptions) -> "TaskDict":
    """Load lm-eval's tasks with their data. Raises UserError: one is not available."""
    loaded = [_load(name, options.include_path) for name in names]
    return {
        "tasks": {name: task for tasks in loaded for name, task in tasks["tasks"].items()},
        "groups": {name: group for tasks in loaded for name, group in tasks.get("groups", {}).items()},
    }


def _set_fewshot(task: "Task", num_fewshot: int | None) -> None:
    """Set the number of examples as simple_evaluate does. Raises UserError: the task fixes it, or has no examples."""
    name, fixed = task.get_config("task"), task.get_config("num_fewshot")
    if num_fewshot and fixed == 0:
        raise UserError(f"--num-fewshot {num_fewshot}: {name} sets 0, which lm-eval does not change; evaluate it alone")
    task.set_config("num_fewshot", (fixed or 0) if num_fewshot is None else num_fewshot)
    task.set_fewshot_seed(FEWSHOT_SEED)
    if task.get_config("num_fewshot") and task.fewshot_docs() is None:
        raise UserError(f"--num-fewshot {num_fewshot}: {name} has no split to take examples from")


def _index(name: str, include_path: Path | None) -> "TaskManager":
    """Return the index in which a task is found: of lm-eval's own tasks only where it must be, for it takes long."""
    folder = None if Path(name).is_file() else include_path
    alone = _tasks_in(folder, False)
    entry = alone.task_index.get(name)
    plain = entry is not None and "dataset_path" in (entry.cfg or {})
    return alone if Path(name).is_file() or plain else _tasks_in(folder, True)


@functools.cache
def _tasks_in(folder: Path | None, defaults: bool) -> "TaskManager":
    """Return the index of a folder's tasks, and of lm-eval's: ten seconds, because it reads all of its YAML files."""
    with heartbeat("reading lm-eval's list of tasks"), _quiet():
        from lm_eval.tasks import TaskManager

        return TaskManager(include_path=folder, include_defaults=defaults)


def _load(name: str, include_path: Path | None) -> "TaskDict":
    index = _index(name, include_path)
    needed: list[str] = []
    try:
        needed += _data_sets(index, name)
        with _offline_if_unreachable([source for source in needed if source not in LOCAL_FORMATS]):
            loaded = index.load([name])
    except Exception as error:  # offline, unknown split, missing package, bad YAML: each raises other classes
        raise UserError(_missing(name, needed, f"{type(error).__name__}: {error}")) from error
    for task in loaded["tasks"].values():
        if any(task.get_config(key) for key in ("unsafe_code", "doc_to_image", "doc_to_audio")):
            raise UserError(f"lm-eval task {name!r} runs generated code or needs images or sound; not supported")
    return loaded


def _data_sets(index: "TaskManager", name: str) -> list[str]:
    """Return the data sets of a task, group, tag or YAML file, as far as its YAML says."""
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = index.task_index.get(name)
    config = load_yaml(Path(name), resolve_func=False) if entry is None else entry.cfg or {}
    children = [*(entry.tags if entry and not config else ()), *(config.get("task", []) if "group" in config else [])]
    if not children:
        return [config["dataset_path"]] if "dataset_path" in config else []
    names = [child if isinstance(child, str) else child.get("task", "") for child in children]
    return list(dict.fromkeys(path for child in names if child != name for path in _data_sets(index, child)))


def _missing(name: str, needed: list[str], reason: str) -> str:
    """Return why a task cannot be loaded, and what helps."""
    remote = [source for source in needed if source not in LOCAL_FORMATS]
    reason, more = " ".join(reason.split())[:200], f" and {len(remote) - 1} more" if len(remote) > 1 else ""
    if not remote:
        return f"lm-eval task {name!r} cannot be loaded: {reason}"
    return (
        f"lm-eval task {name!r} needs the data set {remote[0]}{more}, which is not in the Hugging Face cache and "
        f"cannot be downloaded ({hub.offline_reason() or reason}); run once where the hub is reachable and copy its "
        "cache ($HF_HOME), or name a YAML task with local data (docs/accuracy.md)"
    )


@contextlib.contextmanager
def _offline_if_unreachable(data_sets: list[str]) -> Iterator[None]:
    """Have datasets look into its cache only where the hub cannot be reached; it would try for half a minute."""
    from datasets import config as data_config
    from huggingface_hub import constants

    before = data_config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    offline = bool(data_sets) and hub.offline_reason() is not None
    if offline:
        data_config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        data_config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _evaluate(lm: "LM", tasks: "TaskDict", options: TaskOptions) -> list[TaskResult]:
    """Evaluate as simple_evaluate does, without its three seconds of listing the environment."""
    from lm_eval.evaluator import evaluate

    chat: Any = options.apply_chat_template
    results: Any = evaluate(
        lm=lm, task_dict=tasks, limit=options.limit, bootstrap_iters=BOOTSTRAP_SAMPLES, log_samples=True,
        apply_chat_template=chat, fewshot_as_multiturn=chat,
    )  # fmt: skip
    if results is None:
        raise RuntimeError("lm-eval returns results in the first process only; evaluate in one process")
    better, samples = results["higher_is_better"], results["samples"]
    return [
        result
        for name, measured in results["results"].items()
        for result in _results(name, measured, better.get(name, {}), samples.get(name, []))
    ]


def _results(
    task: str, measured: dict[str, Any], higher_is_better: dict[str, bool | None], samples: list[dict[str, Any]]
) -> Iterator[TaskResult]:
    """Yield lm-eval's flat "metric,filter" and "metric_stderr,filter" as records; the filter "none" is not named."""
    digest = hashlib.sha256()
    for sample in sorted(samples, key=lambda s: s["doc_id"]):
        digest.update((sample["doc_hash"] + sample["prompt_hash"] + sample["target_hash"]).encode())
    for key, value in measured.items():
        metric, comma, filtered = key.partition(",")
        number = _number(value)
        if not comma or metric.endswith("_stderr") or number is None:
            continue
        better = higher_is_better.get(metric)
        if better is None:
            log.warning("%s: %s is left out: lm-eval does not define whether higher is better", task, metric)
            continue
        yield TaskResult(
            task=task,
            metric=metric if filtered == "none" else key,
            value=number,
            stderr=_number(measured.get(f"{metric}_stderr,{filtered}")),
            higher_is_better=better,
            items=_items(samples, metric, filtered),
            items_sha256=digest.hexdigest() if samples else None,
        )


def _items(samples: list[dict[str, Any]], metric: str, filtered: str) -> list[float]:
    """Return a metric's value of each item in task order, or [] if items have no value of their own."""
    ordered = sorted((s for s in samples if s.get("filter", "none") == filtered), key=lambda s: s["doc_id"])
    values = [_number(s.get(metric)) for s in ordered]
    return [v for v in values if v is not None] if None not in values else []


def _number(value: object) -> float | None:
    """Return a finite number, or None for 'N/A', text and NaN."""
    return float(value) if isinstance(value, numbers.Real) and math.isfinite(value) else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Send lm-eval's prints to stderr, drop its logging, and its progress bars unless stderr is a terminal."""
    loggers = [logging.getLogger(name) for name in NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    with contextlib.ExitStack() as stack:
        if not sys.stderr.isatty():
            stack.enter_context(contextlib.redirect_stderr(stack.enter_context(open(os.devnull, "w"))))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed python, numpy and torch as simple_evaluate does, and restore their states at the end."""
    before, before_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(before_numpy)
