"""The drafts, the target and the requests of a score, and all checks that need no loaded model."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from draftlab.config.server_rules import DecodingRule
from draftlab.console import note
from draftlab.data import turns
from draftlab.data.prompts import Prompts
from draftlab.drafters.base import DrafterSpec, RunFacts
from draftlab.errors import UserError, about
from draftlab.exporting.hf import as_quantized, parse_quantized_name
from draftlab.model import Mode, checkpoint, devices, hub, llama, parallel
from draftlab.model.checkpoint import max_model_len
from draftlab.model.modes import engine_runs
from draftlab.model.size import read_size
from draftlab.quantities import format_bytes, format_number
from draftlab.results.decoding import share_of_equal_texts
from draftlab.results.score import SAMPLING, PromptRecord
from draftlab.runs import provenance
from draftlab.runs.provenance import Stage, lineage
from draftlab.sampling import SamplingParams
from draftlab.scoring.lm_eval import Tasks, check_chat_template
from draftlab.target_outputs.store import MANIFEST, distinct_4grams, read_texts

# numbers of devices for which a dry run shows the memory of a target with a device map
DEVICES = (2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The requests of a score: prompts, sampling parameters, and how many times each prompt is decoded."""

    prompts: Prompts
    sampling: SamplingParams
    repeats: int

    def conditions(self) -> dict[str, Any]:
        """Return the fields of Conditions that depend only on the requests."""
        prompts = self.prompts
        return {name: getattr(self.sampling, name) for name in SAMPLING} | {
            "data": prompts.source,
            "selection": prompts.selection,
            "prompts": len(prompts.rows),
            "prompt_tokens": prompts.tokens,
            "chat": prompts.chat,
            "repeats": self.repeats,
        }

    def score_facts(self, plain: Mapping[int, list[int]], texts: Sequence[Mapping[int, list[int]]]) -> dict[str, Any]:
        """Return the fields of a Score that depend on the prompts and the decoded texts.

        plain: Token ids of each prompt's text by plain decoding. texts: Those with a draft, for each K; some prompts
            may be missing.
        """
        pairs = [(plain[i], text) for each in texts for i, text in each.items()]
        alone, drafted = zip(*pairs, strict=True) if pairs else ([], [])
        return {
            "prompts": [
                PromptRecord(tokens=len(p.ids), category=p.category, conversation=number)
                for p, number in zip(self.prompts.rows, self.prompts.conversations, strict=True)
            ],
            "equal_texts": share_of_equal_texts(list(alone), [list(drafted)])
            if pairs and self.sampling.temperature == 0
            else None,
            "distinct_4grams": distinct_4grams([*plain.values()]),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The settings of forward passes.

    Args:
        device: Device of drafts and heads, and of a target without device_map.
        dtype_reason: Why --dtype auto stands for this dtype, or "".
        task_dtype: Dtype in which transformers runs the models for lm-eval.
        mode: Mode of passes in models that draftlab's engine runs.
        device_map: Device map with which accelerate spreads the target, as --device-map.
        target_int8, draft_int8: Whether to round the weights to 8 bits.
        threads: Number of CPU threads. None: the number is not changed.
    """

    device: torch.device
    dtype: torch.dtype
    dtype_reason: str
    task_dtype: torch.dtype
    mode: Mode
    device_map: str | None = None
    target_int8: bool = False
    draft_int8: bool = False
    threads: int | None = None

    @property
    def int8(self) -> bool:
        """Return whether the target or the drafts have int8 weights."""
        return self.target_int8 or self.draft_int8


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much of a score is timed.

    Args:
        exhaustive: Whether to time every draft at every K. If not, replays and the time of passes choose what to time.
        every: Whether to time every draft, each at the K that is fastest by prediction.
        precision: Half of the width of the interval of the fastest draft's log speed-up at which timing ends.
        minutes: Minutes after which timing ends.
    """

    exhaustive: bool = False
    every: bool = False
    precision: float = 0.05
    minutes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Drafts and drafters to measure with a target, in one process.

    Args:
        drafts: Directories of draft models, by name. If a name ends in @TYPE, the weights are rounded to this GGUF
            type.
        drafters: Other drafters.
        default_draft: Draft model for drafters without draft=.
        ks: Numbers of drafted tokens per step.
        batches: Batch sizes. Each batch size gets its own scores.
        rule: How drafts sample, and how drafted tokens are verified.
        data: Text source from which some drafters learn.
    """

    target: Path
    drafts: dict[str, Path]
    drafters: list[DrafterSpec]
    default_draft: Path | None
    requests: Requests
    engine: Engine
    ks: list[int]
    batches: list[int]
    rule: DecodingRule
    data: str
    tasks: Tasks | None = None
    effort: Effort = Effort()

    @property
    def name(self) -> str:
        drafts = [name.split("-", 1)[-1] for name in self.drafts]
        return "-".join(["score", *drafts, *(spec.kind for spec in self.drafters)])

    @property
    def results(self) -> list[str]:
        """Return the names of all drafts and drafters. Each of them gets a score for every batch size."""
        return [*self.drafts, *(spec.name for spec in self.drafters)]

    @property
    def draft_paths(self) -> list[Path]:
        """Return the directories of all draft models, including those of drafters."""
        paths = [*self.drafts.values()]
        for spec in self.drafters:
            paths += spec.paths(self.default_draft, models_only=True)
        return list(dict.fromkeys(paths))

    @property
    def inputs(self) -> list[Path]:
        """Return the files and directories on which the scores depend. The record of the scores lists them."""
        read = [self.target, *self.drafts.values()]
        for spec in self.drafters:
            read += spec.paths(self.default_draft)
        return list(dict.fromkeys(read))

    @property
    def earlier_turns(self) -> list[Path]:
        """Return the file with the target's answers to earlier turns, which exists after the measurement."""
        target = provenance.fingerprint(self.target)
        file = turns.place(self.requests.prompts, target, self.requests.sampling)
        return [] if file is None else [file]

    @property
    def context(self) -> int:
        """Return the number of cached tokens at which the latency of single passes is measured.

        This number is reached halfway through the longest answer to a prompt of median length.
        """
        requests = self.requests
        return int(median(len(p.ids) for p in requests.prompts.rows)) + requests.sampling.max_tokens // 2

    @property
    def hosted(self) -> bool:
        """Return whether transformers runs the target."""
        return self.engine.device_map is not None or not engine_runs(self.target)

    @property
    def two_precisions(self) -> bool:
        """Return whether plain decoding is timed both with int8 weights and with full weights."""
        return self.engine.int8 and not self.hosted

    def made(self, name: str) -> list[Stage] | None:
        """Return the commands that made a draft, or that made the draft models and heads of a drafter.

        The training of the source and of the target does not count. If an input has no record of its commands, return
        None. A drafter without inputs gives [].
        """
        stages: dict[Path, Stage] = {}
        for path in self._paths(name):
            made = lineage(path, self.target, own=True)
            if not made:
                return None
            stages |= made
        return list(stages.values())

    def learnt_prompts(self, name: str) -> int:
        """Return how many prompts of the score were in the training data of a draft or drafter."""
        learnt: set[tuple[int, ...]] = set()
        for path in self._paths(name):
            for directory in lineage(path, self.target):
                if (directory / MANIFEST).exists():
                    learnt |= {tuple(output.prompt.tolist()) for output in read_texts(directory)}
        return sum(tuple(prompt.ids) in learnt for prompt in self.requests.prompts.rows)

    def _paths(self, name: str) -> list[Path]:
        """Return the directory of the draft with this name, or the inputs of the drafter with this name."""
        spec = next((spec for spec in self.drafters if spec.name == name), None)
        return [self.drafts[name]] if spec is None else spec.paths(self.default_draft)

    def facts(self) -> Mapping[str, object]:
        """Return the facts that a dry run shows."""
        ways = 1 + self.two_precisions + len(self.results) * len(self.ks)
        texts = self.requests.prompts.requests * self.requests.repeats * ways * len(self.batches)
        reads: dict[str, str] = {}
        for spec in self.drafters:
            paths = ", ".join(map(str, spec.paths(self.default_draft)))
            reads[spec.name] = f"reads {paths or 'no files'}"
        return {
            "target": _described(self.target),
            **{name: _described(path) for name, path in self.drafts.items()},
            **reads,
            "work": f"up to {texts} generations of {self.requests.sampling.max_tokens} tokens",
            **self._cost(texts),
            "memory": self._memory(),
        }

    def _cost(self, texts: int) -> dict[str, object]:
        """Return the FLOPs of all prefills and the bytes that decoding reads. A dry run estimates the time from them.

        Every token is counted as one pass of the target. texts: Number of generations.
        """
        target = read_size(self.target)
        requests = self.requests
        prompt = int(median(len(p.ids) for p in requests.prompts.rows))
        passes = texts * requests.sampling.max_tokens // max(self.batches)
        return {
            "flops": texts * prompt * target.flops_per_token(prompt // 2),
            "bytes": passes * target.weight_bytes(self.engine.dtype.itemsize),
        }

    def _memory(self) -> str:
        """Return text about the memory of models, caches and logits, and of the first device of a device map."""
        needs = self.needs(spread=True)
        total = sum(needs.values())
        own = sum(self.needs().values())
        text = f"{format_bytes(total)}: {devices.listed(needs)}"
        if self.engine.device_map is None:
            return text
        first = [f"{format_number((own + (total - own) / count) / 1e9)}" for count in DEVICES]
        counts = ", ".join(map(str, DEVICES))
        return f"{text}; split evenly, the first of {counts} devices takes {', '.join(first)} GB"

    def check(self) -> None:
        """Check that drafts, drafters, requests and engine fit each other. No model is loaded.

        Raises:
            UserError: The prompts do not fill the batches, two results have the same name, a drafter or the mode does
                not fit, a text does not fit into a model's context, or a tokenizer lacks a chat template.
        """
        for batch in self.batches:
            if (count := self.requests.prompts.requests) % batch:
                raise UserError(
                    f"--batch {batch}: {count} requests do not fill batches of {batch}; choose a --batch that divides "
                    f"{count}, or another number of prompts"
                )
        if twice := [name for name in self.results if self.results.count(name) > 1]:
            raise UserError(
                f"two drafts or drafters have the name {twice[0]}; leave one of them out, or rename the directory of "
                "a draft"
            )
        self._check_drafters()
        for path in self.draft_paths:
            self._check_parallel(path)
        engine = self.engine
        if engine.int8 and engine.mode != "native":
            raise UserError(f"--int8 needs --mode native, but this run has mode {engine.mode}")
        if engine.target_int8 and self.hosted:
            raise UserError("--int8: the target cannot be in int8, because transformers runs it; use --int8 draft")
        models = {"the target": self.target, **self.drafts}
        with about("--max-new-tokens"):
            self.check_context({name: max_model_len(path) for name, path in models.items()}, max(self.ks))
        if self.tasks is not None and self.tasks.apply_chat_template:
            for path in models.values():
                check_chat_template(path)

    def check_context(self, contexts: Mapping[str, int], drafted: int) -> None:
        """Check that the longest text with its drafted tokens fits into the context of every model.

        Args:
            contexts: Largest number of tokens that each model can read, by the name of the model.
            drafted: Largest number of drafted tokens in a step.

        Raises:
            UserError: The text is longer than a context.
        """
        longest = self.requests.prompts.longest
        max_tokens = self.requests.sampling.max_tokens
        for name, context in contexts.items():
            if longest + max_tokens + drafted > context:
                raise UserError(
                    f"a prompt has {longest} tokens; with {max_tokens} new and {drafted} drafted tokens, it exceeds "
                    f"the context of {name}, {context} tokens; shorten prompts or lower --max-new-tokens"
                )

    def check_memory(self) -> None:
        """Check that weights, caches and logits fit into the free memory. A target with a device map is not counted.

        Raises:
            UserError: The memory is too small.
        """
        devices.check_fits(
            self.needs(),
            self.engine.device,
            devices.less_memory(self.engine.dtype, "--device-map auto, or a smaller --batch"),
        )

    def needs(self, *, spread: bool = False) -> Mapping[str, float]:
        """Return the bytes that drafts and target need, by purpose.

        spread: Whether to also count the weights of a target with a device map.
        """
        spread = spread or self.engine.device_map is None
        models = dict.fromkeys([self.target, *self.draft_paths])
        sizes = {path: read_size(path) for path in models if spread or path != self.target}
        longest = self.requests.prompts.longest
        rows = max(self.batches)
        k = max(self.ks)
        width = self.engine.dtype.itemsize
        tokens = rows * (longest + self.requests.sampling.max_tokens + k)
        needs = {f"weights of {hub.checkpoint_name(path)}": size.weight_bytes(width) for path, size in sizes.items()}
        if self.engine.int8:
            needs["int8 copies"] = sum(size.weight_bytes(1) for size in sizes.values())
        needs["caches"] = sum(tokens * size.kv_bytes_per_token(width) for size in sizes.values())
        needs["logits"] = 2 * 4 * max(rows * (k + 1), longest) * checkpoint.vocab_size(self.target)
        return needs

    def _check_drafters(self) -> None:
        if not self.drafters:
            return
        run = RunFacts(
            target=self.target,
            layers=None if self.hosted else llama.check_supported(self.target).layers,
            vocab=checkpoint.vocab_size(self.target),
            rule=self.rule.verify,
            draft=self.default_draft,
        )
        for spec in self.drafters:
            spec.check(run)

    def _check_parallel(self, draft: Path) -> None:
        """Print notes about how a parallel draft is used, and for how many tokens it was trained.

        Raises:
            UserError: The draft's mask token is not in the vocabulary.
        """
        if parallel.pard_token(draft) is None:
            return
        name = hub.checkpoint_name(draft)
        trained = parallel.trained_offsets(draft)
        note(f"{name} drafts all tokens in one pass; for one pass per token, use --drafter model:draft={draft}")
        if trained is not None and max(self.ks) > trained:
            beyond = f"the draft is untrained for the tokens after these, up to K = {max(self.ks)}"
            note(f"{name} was trained to draft {trained} tokens; {beyond}")


@contextlib.contextmanager
def with_rounded_drafts(comparison: Comparison) -> Iterator[Comparison]:
    """Yield a copy of the comparison with rounded weights in all drafts whose names end in @TYPE, such as NAME@q8_0.

    The rounded copies of the drafts are removed at the end of the `with` statement.
    """
    drafts = dict(comparison.drafts)
    with contextlib.ExitStack() as stack:
        for name, path in comparison.drafts.items():
            _, kind = parse_quantized_name(name)
            if kind is not None:
                note(
                    f"{name}: the weights are rounded to {kind}, but the draft runs at the speed of draftlab's engine, "
                    "not at that of llama.cpp"
                )
                drafts[name] = stack.enter_context(as_quantized(path, kind))
        yield replace(comparison, drafts=drafts)


def _described(directory: Path) -> str:
    text = read_size(directory).describe()
    return text if engine_runs(directory) else f"{text}; transformers runs it"
