"""Accuracy on the tasks of lm-eval, for checkpoints (lm-eval's model ``hf``) and servers (``local-completions``)."""

import contextlib
import hashlib
import io
import logging
import math
import numbers
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch import nn

from draftlab.console import heartbeat, note
from draftlab.dates import with_date
from draftlab.errors import UserError, one_line
from draftlab.model import checkpoint, hub
from draftlab.model.native_cpu import round_int8
from draftlab.results.score import TaskResult
from draftlab.servers.client import Server, proxy_of

if TYPE_CHECKING:  # takes seconds to import
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

# number of bootstrap samples for metrics whose standard error has no formula; lm-eval's 100,000 take minutes
BOOTSTRAP_SAMPLES = 1000
SERVED_CONTEXT = 2048  # lm-eval's default context, for servers that do not report a context
LOCAL_DATA = (
    "; lm-eval ls tasks lists the tasks, which download their data from the hub; for a local file, write a YAML task "
    "(docs/measuring.md)"
)
UNSUPPORTED = ("unsafe_code", "doc_to_image", "doc_to_audio")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """Tasks of lm-eval, and their settings.

    Args:
        index: Index of all tasks that lm-eval knows.
        limit: Largest number of items that are evaluated of each task.
        scored: Name of a task that needs log-probabilities of prompts, or None if no task does.
    """

    names: list[str]
    index: "TaskManager"
    limit: int
    batch_size: int
    num_fewshot: int | None
    apply_chat_template: bool
    seed: int
    scored: str | None

    def of_checkpoint(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        *,
        spread: bool = False,
        int8: bool = False,
    ) -> list[TaskResult]:
        """Evaluate a checkpoint, and return every metric of every task.

        A checkpoint with a trimmed lm_head is evaluated with the complete lm_head.

        Args:
            spread: Whether to spread the model over all devices.
            int8: Whether to round the model's matrices to 8 bits, as mode native does.

        Raises:
            UserError: lm-eval cannot evaluate the checkpoint.
        """
        with (
            _running(f"lm-eval on {hub.checkpoint_name(directory)}"),
            # for weights that fit neither into the devices nor into memory
            tempfile.TemporaryDirectory() as offload_folder,
        ):
            from lm_eval.models.huggingface import HFLM

            # lm-eval's decorator hides the constructor from type checkers
            hflm: Any = HFLM
            tokenizer = checkpoint.load_tokenizer(directory)
            if isinstance(tokenizer.chat_template, str):
                tokenizer.chat_template = with_date(tokenizer.chat_template)
            lm = hflm(
                pretrained=str(directory),
                tokenizer=tokenizer,
                dtype=dtype,
                device=str(device),
                batch_size=self.batch_size,
                parallelize=spread,
                offload_folder=offload_folder,
                trust_remote_code=checkpoint.trusts_remote_code(),
            )
            if int8:
                _round(lm.model)
            results = self._results(lm)
        _note_truncated(results, hub.checkpoint_name(directory), lm.max_length)
        return results

    def of_server(self, server: Server, tokenizer: Path) -> list[TaskResult]:
        """Evaluate the model of a server, and return every metric of every task.

        tokenizer: Directory of the model's tokenizer.

        Raises:
            UserError: The server does not answer.
        """
        url = str(server.http.client.base_url).rstrip("/")
        with (
            _same_proxies(url),
            _running(f"lm-eval on {server.http.url}", secret=url, shown=server.http.url),
        ):
            from lm_eval.models.openai_completions import LocalCompletionsAPI

            api: Any = LocalCompletionsAPI
            lm = api(
                model=server.model,
                base_url=f"{url}/v1/completions",
                tokenizer_backend="huggingface",
                tokenizer=str(tokenizer),
                add_bos_token=True,  # adds the tokenizer's special tokens, as lm-eval's model hf does
                max_length=server.max_length or SERVED_CONTEXT,
                batch_size=self.batch_size,
                seed=self.seed,
                header={"Authorization": server.http.client.headers.get("authorization", "")},
                trust_remote_code=checkpoint.trusts_remote_code(),
            )
            if isinstance(lm.tokenizer.chat_template, str):
                lm.tokenizer.chat_template = with_date(lm.tokenizer.chat_template)
            results = self._results(lm)
        _note_truncated(results, f"{server.model} on {server.http.url}", lm.max_length)
        return results

    def check_server(self, server: Server) -> None:
        """Check that the server returns log-probabilities of prompts if a task needs them.

        Raises:
            UserError: A task needs them, but the server does not return them.
        """
        if self.scored is not None and not server.adapter.has_prompt_logprobs:
            raise UserError(
                f"--tasks {self.scored}: {server.http.url} ({server.kind}) returns no log-probabilities of "
                "prompts, which this task needs; use vLLM or SGLang"
            )

    def _results(self, lm: "LM") -> list[TaskResult]:
        from lm_eval import evaluator

        # lm-eval records the commit of the current folder, and git complains on stderr outside of a clone
        evaluator.get_git_commit_hash = lambda: None
        found: Any = evaluator.simple_evaluate(
            lm,
            tasks=list(self.names),
            num_fewshot=self.num_fewshot,
            limit=self.limit,
            bootstrap_iters=BOOTSTRAP_SAMPLES,
            apply_chat_template=self.apply_chat_template,
            fewshot_as_multiturn=self.apply_chat_template,
            task_manager=self.index,
            random_seed=self.seed,
            numpy_random_seed=self.seed,
            torch_random_seed=self.seed,
        )
        better = found["higher_is_better"]
        samples = found["samples"]
        results: list[TaskResult] = []
        for name, measured in found["results"].items():
            items = sorted(samples.get(name, []), key=lambda item: item["doc_id"])
            cut = [_tokens_cut(lm, item["arguments"]) for item in items]
            results += _task_results(name, measured, better.get(name, {}), items, cut)
        return results


def _round(model: nn.Module) -> None:
    """Round the matrices of a model to int8. A tied lm_head is rounded, but the embedding stays as it is."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weights, scale = round_int8(module.weight.detach())
            rounded = (weights * scale.unsqueeze(1)).to(module.weight.dtype)
            module.weight = nn.Parameter(rounded, requires_grad=False)


def load_tasks(
    names: list[str],
    *,
    limit: int,
    batch_size: int,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    include_path: Path | None = None,
    seed: int = 0,
) -> Tasks:
    """Find the tasks, and load their data, so that errors appear before any model is loaded.

    Args:
        names: Names of tasks, groups or tags, or paths of YAML files.
        limit: Largest number of items that are evaluated of each task.
        include_path: Folder with YAML files of additional tasks.

    Raises:
        UserError: A task or its data is missing, a task is of a kind that is not supported, or a task does not take
            --num-fewshot.
    """
    with _running(f"--tasks {','.join(names)}", hint=LOCAL_DATA):
        from lm_eval.tasks import TaskManager

        index = TaskManager(include_path=include_path, include_defaults=False)
        if not all(Path(name).is_file() or name in index.task_index for name in names):
            index = TaskManager(include_path=include_path)  # this takes seven seconds
        scored = None
        for name, task in index.load(list(names))["tasks"].items():
            if any(task.get_config(key) for key in UNSUPPORTED):
                raise UserError(
                    f"--tasks {name} is not supported: the task runs generated code, or needs images or sound; leave "
                    "it out"
                )
            if num_fewshot and task.get_config("num_fewshot") == 0:
                raise UserError(
                    f"--num-fewshot {num_fewshot}: {name} is always evaluated without examples; leave --num-fewshot out"
                )
            if task.OUTPUT_TYPE != "generate_until":
                scored = scored or name
    return Tasks(
        names=names,
        index=index,
        limit=limit,
        batch_size=batch_size,
        num_fewshot=num_fewshot,
        apply_chat_template=apply_chat_template,
        seed=seed,
        scored=scored,
    )


def check_chat_template(directory: Path) -> None:
    """Check that the tokenizer in a directory has a chat template. Raises UserError: there is none."""
    if not checkpoint.load_tokenizer(directory).chat_template:
        raise UserError(
            f"--apply-chat-template: the tokenizer of {directory} has no chat template; leave --apply-chat-template out"
        )


def _task_results(
    task: str,
    measured: dict[str, Any],
    higher_is_better: dict[str, bool | None],
    samples: list[dict[str, Any]],
    cut: list[list[int]],
) -> Iterator[TaskResult]:
    """Yield a TaskResult for each metric of a task.

    Args:
        measured: lm-eval's values of the task, with keys "metric,filter" and "metric_stderr,filter".
        higher_is_better: Whether a higher value is better, by metric.
        samples: lm-eval's records of the items, one for each item and filter, in the order of the items.
        cut: Number of tokens that were cut from each request of each record.
    """
    digest = hashlib.sha256()
    for sample, tokens in zip(samples, cut, strict=True):
        digest.update((sample["doc_hash"] + sample["prompt_hash"] + sample["target_hash"]).encode())
        if any(tokens):  # the model read another prompt
            digest.update(str(tokens).encode())
    by_item = {sample["doc_id"]: tokens for sample, tokens in zip(samples, cut, strict=True)}
    for key, value in measured.items():
        metric, comma, filtered = key.partition(",")
        number = _number(value)
        if not comma or metric.endswith("_stderr") or number is None:
            continue
        better = higher_is_better.get(metric)
        if better is None:
            log.warning(
                "%s: metric %s is left out, because lm-eval does not say whether higher is better",
                task,
                metric,
            )
            continue
        yield TaskResult(
            task=task,
            metric=metric if filtered == "none" else key,
            value=number,
            stderr=_number(measured.get(f"{metric}_stderr,{filtered}")),
            n=measured["sample_len"],
            higher_is_better=better,
            items=_items(samples, metric, filtered),
            items_sha256=digest.hexdigest() if samples else None,
            requests=sum(map(len, by_item.values())),
            truncated=sum(n > 0 for tokens in by_item.values() for n in tokens),
        )


def _tokens_cut(lm: Any, requests: list[tuple[Any, ...]]) -> list[int]:
    """Return how many tokens lm-eval cuts from the start of each request, because the model's context is too short.

    A request is (context, continuation), (context, settings of generation), or (text,), whose windows are never cut.
    """
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs

    is_local = issubclass(type(lm), HFLM)
    cut: list[int] = []
    for context, *more in requests:
        tokens = 0
        most = lm.max_length
        if more and isinstance(more[0], str):
            # a local model reads all tokens except the last
            most += is_local
            # an empty context is read as one token
            pair = lm._encode_pair(context, more[0]) if context else ([0], lm.tok_encode(more[0]))
            tokens = sum(map(len, pair))
        elif more:
            default = lm.max_gen_toks if is_local else lm._max_gen_toks
            most -= normalize_gen_kwargs(more[0], default).get("max_gen_toks", default)
            ids = lm.tok_batch_encode([context])[0][0] if is_local else lm.tok_encode(context)
            tokens = len(ids)
        cut.append(max(0, tokens - most))
    return cut


def _note_truncated(results: list[TaskResult], model: str, context: int) -> None:
    for result in {result.task: result for result in results if result.truncated}.values():
        note(
            f"{result.task}: lm-eval cut the start of {result.truncated} of {result.requests} requests to the context "
            f"of {model}, {context:,} tokens"
        )


def _items(samples: list[dict[str, Any]], metric: str, filtered: str) -> list[float]:
    """Return the value of a metric for each item, or [] if an item has no value."""
    values: list[float] = []
    for sample in samples:
        if sample["filter"] == filtered:
            value = _number(sample.get(metric))
            if value is None:
                return []
            values.append(value)
    return values


def _number(value: object) -> float | None:
    """Return a value as a number, or None for text such as 'N/A', infinity and NaN."""
    return float(value) if isinstance(value, numbers.Real) and math.isfinite(value) else None


@contextlib.contextmanager
def _same_proxies(url: str) -> Iterator[None]:
    """Keep the requests of lm-eval to a server, which have the API key, from a proxy that draftlab does not use."""
    host = urlsplit(url).hostname
    before = os.environ.get("no_proxy")
    listed = before if before is not None else os.environ.get("NO_PROXY", "")
    if proxy_of(url) is None:
        os.environ["no_proxy"] = f"{listed},{host}".removeprefix(",")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("no_proxy", None)
        else:
            os.environ["no_proxy"] = before


@contextlib.contextmanager
def _running(label: str, *, secret: str = "", shown: str = "", hint: str = "") -> Iterator[None]:
    """Silence lm-eval inside the `with` statement, and turn any error there into a UserError.

    Args:
        label: Start of the error message.
        secret: Text that is replaced by `shown` in the error message, such as an address with a password.
        hint: End of the error message.
    """
    before = logging.root.manager.disable
    with heartbeat(label):
        logging.disable(logging.WARNING)
        try:
            with (
                contextlib.redirect_stderr(io.StringIO()),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                yield
        except UserError:
            raise
        except Exception as error:  # tasks, data sets and servers raise errors of all types
            reason = f"{type(error).__name__}: {error}"
            reason = one_line(reason.replace(secret, shown) if secret else reason)
            raise UserError(f"{label}: {reason}{hint}") from error
        finally:
            logging.disable(before)
