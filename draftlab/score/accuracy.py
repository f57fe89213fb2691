"""Accuracy of a checkpoint by lm-eval: two tasks made from held-out code on this disk, and every task lm-eval knows.

``code_next_line``: which of four lines of real code comes next. ``code_bits_per_byte``: how well text is predicted.
"""

import contextlib
import difflib
import functools
import itertools
import logging
import math
import numbers
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftlab.checkpoint import CPU, load_model, load_tokenizer
from draftlab.data import Document, documents
from draftlab.errors import UserError, did_you_mean
from draftlab.record import TaskResult
from draftlab.score.assisted import Write, assisted_lm

if TYPE_CHECKING:  # lm-eval takes seconds to import, and who scores without tasks does not need it
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks.manager import TaskDict, TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NEXT_LINE = "code_next_line"
BITS_PER_BYTE = "code_bits_per_byte"
OWN_TASKS = (NEXT_LINE, BITS_PER_BYTE)
ITEMS = 256  # of code_next_line where no limit is set
CONTEXT_CHARACTERS = (200, 700)  # least and most before an answer; some 60 to 250 tokens of code
LINE_CHARACTERS = (12, 120)  # least and most of an answer, indentation left out
LENGTH_RATIO = (0.7, 1.3)  # of a distractor to the answer
DISTRACTORS = 3
DOCUMENT_CHARACTERS = 4000  # of each document of code_bits_per_byte
BOOTSTRAP_SAMPLES = 1000  # for the few metrics without a closed form; lm-eval's 100,000 take minutes
NOISY_LOGGERS = ("lm_eval", "datasets", "huggingface_hub")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineItem:
    """One question of code_next_line; context and choices end with a line break."""

    context: str
    choices: list[str]
    answer: int


def evaluate_tasks(
    directory: Path,
    tasks: list[str],
    *,
    limit: int | None,
    dtype: torch.dtype,
    device: torch.device = CPU,
    batch_size: int = 16,
    seed: int = 0,
    data: str = "stdlib",
    context: int = 512,
    write: Write | None = None,
) -> list[TaskResult]:
    """Every metric of every task, for one checkpoint.

    Args:
        tasks: code_next_line, code_bits_per_byte, names that lm-eval registers, or paths to its YAML files.
        limit: items per task; the first ones, so that a smaller limit asks a part of the same questions.
        data: source of the two code tasks; its held-out split is used.
        context: window of the two code tasks in tokens, at most the model's own, which lm-eval's tasks get.
        write: what writes the answers of generation tasks, instead of the checkpoint alone.

    Raises:
        UserError: an unknown task, data that cannot be had, or a checkpoint that cannot be loaded.
    """
    if limit is not None and limit < 1:
        raise UserError(f"task limit {limit}: want at least 1 item per task")
    check_tasks(tasks)
    with _quiet(), _seeded(seed):
        own = _own_tasks([name for name in tasks if name in OWN_TASKS], data, limit, seed)
        registered = _registered_tasks([name for name in tasks if name not in OWN_TASKS])
        tokenizer = load_tokenizer(directory)
        model = load_model(directory, dtype, device).eval()
        window = min(context, model.config.max_position_embeddings)
        results: list[TaskResult] = []
        if own["tasks"]:
            results += _evaluate(code_lm(model, tokenizer, batch_size, window), own, limit, seed)
        if registered["tasks"]:
            plain = _plain_lm(model, tokenizer, batch_size)
            lm = plain if write is None else assisted_lm(model, tokenizer, batch_size, write)
            results += _evaluate(lm, registered, limit, seed)
    return results


def check_tasks(names: list[str]) -> None:
    """Raises UserError: a name that is none of draftlab's, none of lm-eval's and no file."""
    for name in names:
        if name in OWN_TASKS or Path(name).is_file() or name in _registry().all_tasks:
            continue
        near = difflib.get_close_matches(name, [*OWN_TASKS, *_registry().all_tasks], n=1)
        hint = did_you_mean(name, near or [*OWN_TASKS, "what `lm-eval ls tasks` lists"])
        raise UserError(f"unknown task {name!r}: neither a task of draftlab or lm-eval nor a YAML file here{hint}")


def generation_tasks(names: list[str]) -> list[str]:
    """Those of names whose answers the model writes."""
    return [name for name in names if name not in OWN_TASKS and _is_written(name)]


def next_line_items(docs: list[Document], *, count: int, seed: int) -> list[LineItem]:
    """Up to count questions, of which the first n are the same for every count from n on.

    A distractor is a line of these documents as deep as the answer and about as long, and is not in the context.
    """
    rng = random.Random(seed)
    lines = [doc.text.split("\n") for doc in docs]
    places = [(document, number) for document, of in enumerate(lines) for number in range(1, len(of) - 1)]
    rng.shuffle(places)
    pool = _by_indentation(lines)
    items = (_item(lines[document], number, pool, rng) for document, number in places)
    return list(itertools.islice((item for item in items if item is not None), count))


@torch.no_grad()
def continuation_log_probs(
    model: "PreTrainedModel", prefix: list[int], continuations: list[list[int]]
) -> list[tuple[float, bool]]:
    """Log-probability of each continuation of prefix, and whether greedy decoding would give it.

    The prefix, of two tokens or more, is run once for all; the four choices of an item cost little more than one.
    """
    ids = [torch.tensor(c, device=model.device) for c in continuations]
    head = torch.tensor(prefix, device=model.device)
    cache = model.base_model(head[None, :-1], use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(ids))
    rows = pad_sequence([torch.cat([head[-1:], i[:-1]]) for i in ids], batch_first=True)  # [N, T]
    log_probs = model(rows, past_key_values=cache).logits.float().log_softmax(-1)  # [N, T, V]
    return [_chosen(row[: len(i)], i) for row, i in zip(log_probs, ids, strict=True)]


def code_lm(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", batch_size: int, window: int) -> "LM":
    """lm-eval's model, set right for code: choices begin at a token of the whole text, and bos stands once in front.

    HFLM encodes a context alone, without its closing white space, and counts its tokens off the whole. Where a token
    holds punctuation, line break and indentation at once, as in code tokenizers, the model would not see the line
    break. And where a tokenizer puts bos in front, bos would be predicted from bos at the start of every document.
    """

    class CodeLM(_hflm()):
        def loglikelihood(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            groups = itertools.groupby((request.arguments for request in requests), key=lambda pair: pair[0])
            split = (_split(tokenizer, text, [pair[1] for pair in pairs], window) for text, pairs in groups)
            return [score for prefix, rest in split for score in continuation_log_probs(model, prefix, rest)]

    return CodeLM(model, tokenizer=tokenizer, batch_size=batch_size, max_length=window, add_bos_token=False)


def _chosen(log_probs: Tensor, ids: Tensor) -> tuple[float, bool]:
    picked = log_probs.gather(-1, ids[:, None])  # [T, 1]
    return float(picked.sum()), bool((log_probs.argmax(-1) == ids).all())


def _by_indentation(lines: list[list[str]]) -> dict[str, list[str]]:
    """Every line that may be asked for, once, under its indentation; last lines may be cut off and are left out."""
    fit = dict.fromkeys(line for of in lines for line in of[:-1] if _within(len(line.strip()), LINE_CHARACTERS))
    pool: dict[str, list[str]] = {}
    for line in fit:
        pool.setdefault(_indentation(line), []).append(line)
    return pool


def _item(lines: list[str], number: int, pool: dict[str, list[str]], rng: random.Random) -> LineItem | None:
    """The question what line number is; None where it is too short or long, comes too early, or has no like."""
    answer, context = lines[number], _context(lines[:number])
    if not _within(len(answer.strip()), LINE_CHARACTERS) or len(context) < CONTEXT_CHARACTERS[0]:
        return None
    least, most = (ratio * len(answer.strip()) for ratio in LENGTH_RATIO)
    as_long = [line for line in pool[_indentation(answer)] if least <= len(line.strip()) <= most]
    others = [line for line in as_long if line.strip() != answer.strip() and line.strip() not in context]
    if len(others) < DISTRACTORS:
        return None
    choices = rng.sample(others, DISTRACTORS)
    at = rng.randrange(DISTRACTORS + 1)
    choices.insert(at, answer)
    return LineItem(context=context, choices=[line + "\n" for line in choices], answer=at)


def _context(before: list[str]) -> str:
    """As many whole lines from the end of before as fit."""
    sizes = itertools.accumulate(len(line) + 1 for line in reversed(before))
    kept = sum(1 for _ in itertools.takewhile(lambda size: size <= CONTEXT_CHARACTERS[1], sizes))
    return "".join(line + "\n" for line in before[len(before) - kept :])


def _indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _within(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]


def _own_tasks(names: list[str], data: str, limit: int | None, seed: int) -> "TaskDict":
    if not names:
        return {"tasks": {}, "groups": {}}
    docs = documents(data, "heldout")
    makers = {
        NEXT_LINE: lambda: _next_line_task(next_line_items(docs, count=limit or ITEMS, seed=seed), data),
        BITS_PER_BYTE: lambda: _bits_per_byte_task(docs),
    }
    return {"tasks": {name: makers[name]() for name in names}, "groups": {}}


def _next_line_task(items: list[LineItem], data: str) -> "ConfigurableTask":
    if not items:
        raise UserError(f"data {data!r}: its held-out split is too short, or too uniform, for {NEXT_LINE}")
    config = {
        "task": NEXT_LINE,
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [_metric("acc", "mean", True), _metric("acc_norm", "mean", True)],
    }
    return _task(config, [asdict(item) for item in items])


def _bits_per_byte_task(docs: list[Document]) -> "ConfigurableTask":
    config = {
        "task": BITS_PER_BYTE,
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [
            _metric("bits_per_byte", "bits_per_byte", False),
            _metric("byte_perplexity", "weighted_perplexity", False),
        ],
    }
    return _task(config, [{"text": doc.text[:DOCUMENT_CHARACTERS]} for doc in docs])


def _metric(name: str, aggregation: str, higher_is_better: bool) -> dict[str, object]:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": higher_is_better}


def _task(config: dict[str, Any], rows: list[dict[str, object]]) -> "ConfigurableTask":
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    made = {"custom_dataset": lambda **_: {"test": Dataset.from_list(rows)}, "test_split": "test"}
    plain = {"target_delimiter": "", "num_fewshot": 0, "metadata": {"version": 1}}
    return ConfigurableTask(config=config | made | plain)


def _registered_tasks(names: list[str]) -> "TaskDict":
    """lm-eval's own tasks with their data, or one line on which cannot be had."""
    found = [_load(name) for name in names]
    return {
        "tasks": {name: task for of in found for name, task in of["tasks"].items()},
        "groups": {name: group for of in found for name, group in of.get("groups", {}).items()},
    }


@functools.cache
def _registry() -> "TaskManager":
    """All of lm-eval's tasks; ten seconds, for it reads every one of its YAML files."""
    with _quiet():
        from lm_eval.tasks import TaskManager

        return TaskManager()


@functools.cache
def _files() -> "TaskManager":
    """For tasks in files, which need none of lm-eval's own."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False)


def _load(name: str) -> "TaskDict":
    try:
        found = (_files() if Path(name).is_file() else _registry()).load([name])
    except Exception as error:  # offline, unknown split, missing package, bad YAML: each has classes of its own
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"lm-eval task {name!r} cannot be loaded here ({type(error).__name__}: {reason}); "
            "its data must be in the Hugging Face cache, or be reachable"
        ) from error
    for task in found["tasks"].values():
        if any(task.get_config(key) for key in ("unsafe_code", "doc_to_image", "doc_to_audio")):
            raise UserError(f"lm-eval task {name!r} runs generated code or needs images or sound; not supported")
    return found


def _is_written(name: str) -> bool:
    return any(task.OUTPUT_TYPE == "generate_until" for task in _registered_tasks([name])["tasks"].values())


def _split(
    tokenizer: "PreTrainedTokenizerBase", text: str, choices: list[str], window: int
) -> tuple[list[int], list[list[int]]]:
    """The tokens of text that it has before every choice, as many as the window lets, and what follows by choice."""
    alone, *wholes = tokenizer([text, *(text + choice for choice in choices)], verbose=False)["input_ids"]
    same = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(alone, *wholes, strict=False))
    shared = sum(1 for _ in same)
    longest = max(len(whole) for whole in wholes) - shared
    if longest >= window:
        raise UserError(f"a window of {window} tokens is too short for {NEXT_LINE}: a line here has {longest}")
    first = max(0, shared + longest - window - 1)  # the last token of all is only predicted
    return alone[first:shared], [whole[shared:] for whole in wholes]


def _plain_lm(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", batch_size: int) -> "LM":
    """lm-eval's model as it is, so that numbers compare with published ones."""
    return _hflm()(model, tokenizer=tokenizer, batch_size=batch_size)


def _hflm() -> Any:
    """HFLM; the decorator that registers it hides its constructor from type checkers."""
    from lm_eval.models.huggingface import HFLM

    return HFLM


def _evaluate(lm: "LM", tasks: "TaskDict", limit: int | None, seed: int) -> list[TaskResult]:
    """What simple_evaluate does with loaded tasks, without its three seconds of listing the environment."""
    from lm_eval.evaluator import evaluate

    for task in tasks["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(seed)
    found: Any = evaluate(lm=lm, task_dict=tasks, limit=limit, bootstrap_iters=BOOTSTRAP_SAMPLES, log_samples=True)
    if found is None:
        raise RuntimeError("lm-eval gives results to the first process only; run accuracy in one process")
    better, samples = found["higher_is_better"], found["samples"]
    return [
        result
        for name, measured in found["results"].items()
        for result in _results(name, measured, better.get(name, {}), samples.get(name, []))
    ]


def _results(
    task: str, measured: dict[str, Any], higher_is_better: dict[str, bool | None], samples: list[dict[str, Any]]
) -> Iterator[TaskResult]:
    """lm-eval's flat "metric,filter" and "metric_stderr,filter" as records; a filter is named unless it is none."""
    for key, value in measured.items():
        metric, comma, filtered = key.partition(",")
        number = _number(value)
        if not comma or metric.endswith("_stderr") or number is None:
            continue
        better = higher_is_better.get(metric)
        if better is None:
            log.warning("%s: %s is left out, lm-eval does not know whether higher is better", task, metric)
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
    """A metric's value of each item, in the order of the task; [] where items have no number of their own."""
    of = sorted((s for s in samples if s.get("filter", "none") == filtered), key=lambda s: s["doc_id"])
    values = [_number(s.get(metric)) for s in of]
    return [v for v in values if v is not None] if None not in values else []


def _number(value: object) -> float | None:
    """A finite number, which JSON can hold; None for 'N/A', text and NaN."""
    return float(value) if isinstance(value, numbers.Real) and math.isfinite(value) else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Send lm-eval's prints to stderr, its logging nowhere, and its bars nowhere unless stderr is a terminal."""
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
    """Seeds of python, numpy and torch, as simple_evaluate sets them, put back at the end."""
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
