"""Accuracy of a model by lm-eval: two tasks from held-out code on this disk, and all tasks of lm-eval."""

import contextlib
import difflib
import functools
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
from draftlab.model.checkpoint import load_tokenizer
from draftlab.model.decoder import Decoder
from draftlab.results.score import TaskResult

if TYPE_CHECKING:  # lm-eval takes seconds to import, and who scores without tasks does not need it
    from lm_eval.api.model import LM
    from lm_eval.tasks.manager import TaskDict, TaskManager

NOTHING: "TaskDict" = {"tasks": {}, "groups": {}}
BOOTSTRAP_SAMPLES = 1000  # for the few metrics without a closed form; lm-eval's 100,000 take minutes
NOISY_LOGGERS = ("lm_eval", "datasets", "huggingface_hub")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """Tasks with their data. limit: the first items of each, so a smaller limit is a subset of a larger one."""

    own: "TaskDict"
    registered: "TaskDict"
    limit: int | None
    seed: int

    @property
    def generation(self) -> "Tasks":
        """Return the tasks whose answers are generated."""
        tasks = {n: t for n, t in self.registered["tasks"].items() if t.OUTPUT_TYPE == "generate_until"}
        return replace(self, own=NOTHING, registered={"tasks": tasks, "groups": {}})

    def __len__(self) -> int:
        return len(self.own["tasks"]) + len(self.registered["tasks"])


def prepare(tasks: list[str], *, limit: int | None, seed: int = 0, data: str = "stdlib") -> Tasks:
    """Load the data of every task, before any model is loaded.

    Args:
        tasks: code_next_line, code_bits_per_byte, names that lm-eval registers, or paths to its YAML files.
        data: source of the two code tasks; its held-out split is used.

    Raises:
        UserError: an unknown task, or data that is not available.
    """
    if limit is not None and limit < 1:
        raise UserError(f"task limit {limit}: want at least 1 item per task")
    check_tasks(tasks)
    with _quiet(), _seeded(seed):
        own = own_tasks([name for name in tasks if name in OWN_TASKS], data, limit, seed)
        registered = _registered_tasks([name for name in tasks if name not in OWN_TASKS])
    return Tasks(own=own, registered=registered, limit=limit, seed=seed)


def evaluate_tasks(
    model: Decoder, directory: Path, tasks: Tasks, *, context: int = 512, generate: Generate | None = None
) -> list[TaskResult]:
    """Return every metric of every task for a loaded model.

    Args:
        directory: checkpoint of the model.
        context: window of the two code tasks in tokens, at most the model's own; lm-eval's tasks get the model's own.
        generate: generates the answers of generation tasks instead of the model alone.
    """
    tokenizer, results = load_tokenizer(directory), list[TaskResult]()
    with heartbeat(f"lm-eval on {directory.name}") as beat, _quiet(), _seeded(tasks.seed):
        if tasks.own["tasks"]:
            lm = code_model(model, directory, tokenizer, min(context, model.context), beat)
            results += _evaluate(lm, tasks.own, tasks.limit, tasks.seed)
        if tasks.registered["tasks"]:
            lm = language_model(model, directory, tokenizer, generate, tasks.seed, beat)
            results += _evaluate(lm, tasks.registered, tasks.limit, tasks.seed)
    return results


def check_tasks(names: list[str]) -> None:
    """Raises UserError: a name is neither a task of draftlab or lm-eval nor a file."""
    for name in names:
        if name in OWN_TASKS or Path(name).is_file() or name in _registry().all_tasks:
            continue
        near = difflib.get_close_matches(name, [*OWN_TASKS, *_registry().all_tasks], n=1)
        hint = did_you_mean(name, near or [*OWN_TASKS, "what `lm-eval ls tasks` lists"])
        raise UserError(f"--tasks {name}: neither a task of draftlab or lm-eval nor a YAML file{hint}")


def _registered_tasks(names: list[str]) -> "TaskDict":
    """Load lm-eval's tasks with their data. Raises UserError: one is not available."""
    loaded = [_load(name) for name in names]
    return {
        "tasks": {name: task for tasks in loaded for name, task in tasks["tasks"].items()},
        "groups": {name: group for tasks in loaded for name, group in tasks.get("groups", {}).items()},
    }


@functools.cache
def _registry() -> "TaskManager":
    """Return the index of all lm-eval tasks; takes ten seconds, because it reads all of its YAML files."""
    with _quiet():
        from lm_eval.tasks import TaskManager

        return TaskManager()


@functools.cache
def _files() -> "TaskManager":
    """Return an index without lm-eval's own tasks, for tasks in files."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False)


def _load(name: str) -> "TaskDict":
    try:
        loaded = (_files() if Path(name).is_file() else _registry()).load([name])
    except Exception as error:  # offline, unknown split, missing package, bad YAML: each raises other classes
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"lm-eval task {name!r} cannot be loaded here ({type(error).__name__}: {reason}); "
            "its data must be in the Hugging Face cache, or be reachable"
        ) from error
    for task in loaded["tasks"].values():
        if any(task.get_config(key) for key in ("unsafe_code", "doc_to_image", "doc_to_audio")):
            raise UserError(f"lm-eval task {name!r} runs generated code or needs images or sound; not supported")
    return loaded


def _evaluate(lm: "LM", tasks: "TaskDict", limit: int | None, seed: int) -> list[TaskResult]:
    """Evaluate as simple_evaluate does, without its three seconds of listing the environment."""
    from lm_eval.evaluator import evaluate

    for task in tasks["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(seed)
    results: Any = evaluate(lm=lm, task_dict=tasks, limit=limit, bootstrap_iters=BOOTSTRAP_SAMPLES, log_samples=True)
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
