"""Everything that a score needs besides the models: found and checked before anything is loaded."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from draftlab import provenance, turns
from draftlab.benchmark.lm_eval import Tasks, check_chat_template, load_tasks
from draftlab.config import shared
from draftlab.config.drafters import DrafterSpec, RunFacts
from draftlab.config.score import ScoreConfig, ScoreServersConfig
from draftlab.console import note, note_if_slow
from draftlab.errors import OtherArchitecture, Quantised, UserError
from draftlab.exporting.hf import parse_quantized_name, write_fake_quantized
from draftlab.model import Mode, checkpoint, hub, llama, memory, parallel
from draftlab.model.checkpoint import max_model_len
from draftlab.model.decoder import resolve_mode
from draftlab.model.size import read_size
from draftlab.model.tokenizer import common_vocabulary
from draftlab.prompts import Prompts, load_prompts
from draftlab.provenance import Stage, lineage
from draftlab.results.score import SAMPLING
from draftlab.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A run with all names resolved. drafts: directories by name. default_draft: of drafters that name none."""

    config: ScoreConfig
    target: Path
    drafts: dict[str, Path]
    default_draft: Path | None
    drafters: list[DrafterSpec]
    prompts: Prompts
    sampling: SamplingParams
    device: torch.device
    dtype: torch.dtype
    mode: Mode

    def device_map(self, model: Path) -> str | None:
        """Return how accelerate spreads a model."""
        return self.config.device_map if model == self.target else None

    @property
    def draft_paths(self) -> list[Path]:
        """Return the draft models of drafters."""
        return [path for spec in self.drafters for path in spec.paths(self.default_draft, models_only=True)]

    def made(self, name: str) -> list[Stage] | None:
        """Return the commands that made a draft, or what a drafter reads; [] if it reads nothing, None if not known."""
        spec = next((spec for spec in self.drafters if spec.name == name), None)
        paths = [self.drafts[name]] if spec is None else spec.paths(self.default_draft)
        known = [lineage(path, self.target) for path in paths]
        stages = [stage for chain in known for stage in chain or []]
        return None if None in known else [s for i, s in enumerate(stages) if s not in stages[:i]]

    @property
    def turns(self) -> Path | None:
        """Return the file of the target's answers to the earlier turns of the prompts, if they have some."""
        return turns.place(self.prompts, provenance.fingerprint(self.target), self.sampling)

    @property
    def inputs(self) -> list[Path]:
        """Return the inputs for the record."""
        turns = [] if self.turns is None else [self.turns]
        read = [path for spec in self.drafters for path in spec.paths(self.default_draft)]
        return list(dict.fromkeys([self.target, *self.drafts.values(), *read, *turns]))

    @property
    def context(self) -> int:
        """Return the cached tokens in the middle of what is decoded."""
        return int(median(len(p.ids) for p in self.prompts.rows)) + self.config.max_tokens // 2

    @property
    def other_plain(self) -> bool:
        """Return whether the target is decoded alone with both int8 weights and those of its dtype."""
        return self.config.draft_int8 or self.config.target_int8

    def generations(self) -> int:
        """Return the largest number of texts that are decoded."""
        ways = 1 + self.other_plain + (len(self.drafts) + len(self.drafters)) * len(self.config.k)
        return self.prompts.requests * self.config.repeats * ways * len(self.config.batch)


def set_up(config: ScoreConfig, *, weights: bool = True) -> Setup:
    """Resolve names, read the prompts and check that everything fits together.

    weights: False fetches configurations and tokenizers only, for a plan.

    Raises:
        UserError: a model, prompts or data that cannot be had, or settings that do not fit the models.
    """
    target = hub.locate(config.target, weights)
    source = hub.check_data(config.data) if config.reads_data else config.data
    drafts = _drafts_by_name(config.draft, weights)
    default = next(iter(drafts.values()), None)
    if default is None and config.needs_default_draft:
        default = shared.newest_draft()
        note(f"draft of the drafters: {default}")
    device = checkpoint.resolve_device(config.device)
    dtype = checkpoint.resolve_dtype(config.dtype, device)
    named = [path for spec in config.drafters for path in spec.paths(None, weights=weights, models_only=True)]
    models: list[Path] = [*drafts.values(), *([default] if default else []), *named]
    for directory in models:
        common_vocabulary(directory, target)
    with note_if_slow(f"reading prompts of {config.prompt_file or source}"):
        prompts = load_prompts(
            config.prompt_file, source, checkpoint.load_tokenizer(target), count=config.num_prompts,
            tokens=config.prompt_tokens, seed=config.seed, chat=config.chat, system_prompt=config.system_prompt,
        )  # fmt: skip
    setup = Setup(
        config=config, target=target, drafts=drafts, default_draft=default, drafters=config.drafters, prompts=prompts,
        sampling=replace(config.sampling, stop_token_ids=checkpoint.eos_token_ids(target)), device=device, dtype=dtype,
        mode=_mode(config, device, dtype, [target, *models] if weights else []),
    )  # fmt: skip
    _check(setup)
    if weights:
        for directory in (target, *models):
            checkpoint.check(directory)
    return setup


def shared_conditions(config: ScoreConfig | ScoreServersConfig, prompts: Prompts) -> dict[str, Any]:
    """Return the conditions that scores in one process and on servers have alike."""
    return {name: getattr(config, name) for name in SAMPLING} | {
        "data": prompts.source, "prompts_sha256": prompts.sha256, "prompts": len(prompts.rows),
        "prompt_tokens": prompts.tokens, "chat": prompts.chat, "repeats": config.repeats,
    }  # fmt: skip


def tasks_of(config: ScoreConfig | ScoreServersConfig) -> Tasks:
    """Load the tasks of a score. Raises UserError: see load_tasks."""
    return load_tasks(
        config.task_names,
        limit=config.task_limit,
        batch_size=config.task_batch_size,
        num_fewshot=config.num_fewshot,
        apply_chat_template=config.apply_chat_template,
        include_path=config.include_path,
        seed=config.seed,
    )


@contextlib.contextmanager
def quantized_drafts(setup: Setup) -> Iterator[Setup]:
    """Yield the setup with copies in place of drafts that are to be rounded, as NAME@q8_0."""
    drafts = dict(setup.drafts)
    with contextlib.ExitStack() as stack:
        for name, path in setup.drafts.items():
            _, kind = parse_quantized_name(name)
            if kind is not None:
                drafts[name] = Path(stack.enter_context(tempfile.TemporaryDirectory())) / name
                drafts[name].mkdir()
                note(f"{name}: weights rounded to {kind}; its speed here is not llama.cpp's")
                write_fake_quantized(path, drafts[name], kind)
        yield replace(setup, drafts=drafts)


def check_context(contexts: dict[str, int], setup: Setup, drafted: int) -> None:
    """Raises UserError: the longest text with its drafted tokens does not fit one of these contexts, by model."""
    longest, max_tokens = setup.prompts.longest, setup.config.max_tokens
    for name, context in contexts.items():
        if longest + max_tokens + drafted > context:
            raise UserError(
                f"a prompt has {longest} tokens; with {max_tokens} more and {drafted} drafted it does not fit the "
                f"context of {name or 'the target'}, {context}"
            )


def check_memory(setup: Setup) -> None:
    """Raises UserError: weights, caches and logits do not fit what is free; what accelerate spreads is not counted."""
    config, width = setup.config, setup.dtype.itemsize
    paths = dict.fromkeys([setup.target, *setup.drafts.values(), *setup.draft_paths])
    sizes = [(path, read_size(path)) for path in paths if setup.device_map(path) is None]
    tokens = max(config.batch) * (setup.prompts.longest + config.max_tokens + max(config.k))
    pass_tokens = max(max(config.batch) * (max(config.k) + 1), setup.prompts.longest)
    needs = {f"weights of {path}": size.weight_bytes(width) for path, size in sizes}
    needs |= {"int8 copies": sum(size.weight_bytes(1) for _, size in sizes)} if setup.other_plain else {}
    needs["caches"] = sum(tokens * size.kv_bytes_per_token(width) for _, size in sizes)
    needs["logits"] = 2 * 4 * pass_tokens * checkpoint.vocab_size(setup.target)
    memory.check_fits(needs, setup.device, "--dtype bfloat16, --device-map auto, or a smaller --batch")


def _drafts_by_name(names: list[str], weights: bool) -> dict[str, Path]:
    """Return directories by their names, which end in @TYPE where a rounded copy was asked for."""
    parts = [parse_quantized_name(name) for name in names]
    paths = [(hub.locate(base, weights), kind) for base, kind in parts]
    named = {hub.checkpoint_name(path) + (f"@{kind}" if kind else ""): path for path, kind in paths}
    if len(named) < len(names):
        raise UserError("two drafts have the same directory name; rename one: " + ", ".join(names))
    return named


def _mode(config: ScoreConfig, device: torch.device, dtype: torch.dtype, models: list[Path]) -> Mode:
    if config.mode != "auto":
        return config.mode
    wanted: list[Mode] = [spec.mode for spec in config.drafters if spec.mode is not None]
    if config.device_map or wanted:
        return "eager" if config.device_map else wanted[0]
    return resolve_mode(config.mode, device, dtype, models)


def _check(setup: Setup) -> None:
    config = setup.config
    requests = setup.prompts.requests
    for batch in config.batch:
        if requests % batch:
            raise UserError(f"{requests} prompts do not fill batches of {batch}; want a multiple of it")
    names = [*setup.drafts, *(spec.name for spec in setup.drafters)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two results would both be called {twice[0]}; ask for one of them, or rename the draft")
    _check_drafters(setup)
    for path in dict.fromkeys([*setup.drafts.values(), *setup.draft_paths]):
        _check_parallel(path, config)
    if config.device_map is not None and (setup.mode != "eager" or config.batch != [1]):
        raise UserError("--device-map has transformers run the target: use --mode eager --batch 1")
    for option in ("draft_int8", "target_int8"):
        if getattr(config, option) and setup.mode != "native":
            raise UserError(f"{config.flag(option)} needs mode native, and this runs in mode {setup.mode}")
    contexts = {name: max_model_len(path) for name, path in {"": setup.target, **setup.drafts}.items()}
    check_context(contexts, setup, max(config.k))
    if config.apply_chat_template:
        for path in (setup.target, *setup.drafts.values()):
            check_chat_template(path)


def _check_parallel(draft: Path, config: ScoreConfig) -> None:
    """Check a parallel draft, and say how it drafts.

    Raises:
        UserError: its mask token is no id of its vocabulary.
    """
    if parallel.pard_token(draft) is None:
        return
    name, trained = hub.checkpoint_name(draft), parallel.trained_offsets(draft)
    note(f"{name} drafts all tokens in one pass; --drafter model:draft={draft} drafts in one pass for each")
    if trained is not None and max(config.k) > trained:
        note(f"{name} was trained to draft {trained} tokens; those beyond, up to K = {max(config.k)}, are untrained")


def _check_drafters(setup: Setup) -> None:
    if not setup.drafters:
        return
    facts = RunFacts(
        target=setup.target, layers=None if setup.config.device_map else _layers(setup.target),
        vocab=checkpoint.vocab_size(setup.target), mode=setup.mode, rule=setup.config.acceptance.rule,
        draft=setup.default_draft,
    )  # fmt: skip
    for spec in setup.drafters:
        spec.check(facts)


def _layers(target: Path) -> int | None:
    """Return the target's layers, or None if transformers has to run it."""
    try:
        return llama.check_supported(target).layers
    except (OtherArchitecture, Quantised):
        return None
