"""Replay of a draft over stored target outputs: one teacher-forced pass per text gives acceptance for every K.

R texts, n tokens of a text, K drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, model_validator

from draftlab import provenance
from draftlab.acceptance import expected
from draftlab.acceptance.context import ReplayContext
from draftlab.acceptance.expected import Counts, Texts
from draftlab.acceptance.token_logprobs import TokenLogprobs
from draftlab.config.drafters import DRAFTERS, DrafterSpec, RunFacts, parse_drafter
from draftlab.config.outputs import ReplayConfig
from draftlab.console import progress
from draftlab.engine.batch_generate import FinishReason
from draftlab.errors import UserError
from draftlab.intervals import Interval, ratio_intervals
from draftlab.model import checkpoint, hub, llama
from draftlab.model.parallel import pard_token
from draftlab.model.tokenizer import common_vocabulary
from draftlab.output import Output
from draftlab.reading import FileModel, read_model
from draftlab.results.decoding import Acceptance
from draftlab.sampling import SamplingParams
from draftlab.target_outputs.outputs import TargetOutput
from draftlab.target_outputs.repeats import DEGENERATE, Repeats, repeats
from draftlab.target_outputs.store import StoredOutputs, read_store

FILE = "replay.json"
Rule = Literal["rejection", "match"]
First = Literal["prefill", "prompt"]


Chance = Annotated[float, Field(ge=0, le=1.001)]  # rounding may put it above 1


class ReplayedText(FileModel):
    """The draft on one text: lists of one entry for each token that the target wrote, [n].

    Of a parallel draft or an EAGLE-3 head an entry is a list itself, by the age of the step, [n, K] (score_offsets and
    score_chains in acceptance).
    """

    number: NonNegativeInt  # of the prompt in its file
    category: str
    prompt_tokens: NonNegativeInt
    finish_reason: FinishReason
    chances: list[Chance] | list[list[Chance]]  # that the token came from the draft
    ranks: list[NonNegativeInt] | list[list[NonNegativeInt]]  # of the token in the draft's, 0 the most probable
    top: list[Chance] | list[list[Chance]]  # the draft's largest probability in its place, at temperature 1
    distinct_4grams: float
    longest_repeat: int

    @model_validator(mode="after")
    def _equally_long(self) -> "ReplayedText":
        if not len(self.chances) == len(self.ranks) == len(self.top):
            raise ValueError("chances, ranks and top must have one entry for each token")
        return self


class Replay(FileModel):
    """One draft on one store, replay.json; every statistic is derived from it.

    rule: which chances these are; rejection: min(1, q / p); match: q, for the draft's token is accepted where it is the
    target's own sample. A greedy draft has q = 0 or 1. offsets: most tokens that a parallel draft drafts, None of an
    ordinary one; of an EAGLE-3 head, too. eagle: it is a head.
    """

    version: Literal[1] = 1
    draft: str
    draft_sha256: str
    dtype: str
    target: str
    target_sha256: str | None
    outputs_sha256: str
    tokenizer_sha256: str
    sampling: SamplingParams  # of the target
    rule: Rule
    draft_temperature: float
    offsets: int | None = None
    eagle: bool = False
    texts: list[ReplayedText]
    command: str
    versions: dict[str, str]
    created: str

    def chances(self, first: First = "prefill") -> list[np.ndarray]:
        """Return the chances of each text, [n]; with prefill, the target's prefill gives the first token: [n - 1]."""
        return [self._array(t.chances[_skipped(first) :]) for t in self.texts]

    def _array(self, entries: Sequence[object]) -> np.ndarray:
        """Return entries of tokens as [n], of a parallel draft as [n, K]."""
        return np.array(entries) if self.offsets is None else np.array(entries).reshape(-1, self.offsets)

    def contexts(self, first: First = "prefill") -> list[np.ndarray]:
        """Return the number of tokens before each chance: those in the KV caches, and the one that is fed."""
        skipped = _skipped(first)
        return [t.prompt_tokens + np.arange(skipped, len(t.chances)) for t in self.texts]

    def padded(self, first: First = "prefill") -> Texts:
        """Return the texts for draftlab.acceptance.expected, with the length limits."""
        skipped, longest = _skipped(first), self.sampling.max_tokens
        limits = [len(t.chances) if t.finish_reason == "length" else longest for t in self.texts]
        return expected.texts_of(self.chances(first), np.array(limits) - skipped)

    def counts(self, drafting: "Drafting", first: First = "prefill") -> Counts:
        """Return the expected counts of every text under one way to draft."""
        texts, skipped = self.padded(first), _skipped(first)
        if drafting.widths:
            ranks = expected.padded([self._array(t.ranks[skipped:]) for t in self.texts])
            return expected.tree(texts, ranks, list(drafting.widths))
        if drafting.confidence is None:
            return expected.chain(texts, drafting.k)
        top = expected.padded([np.array(t.top[skipped:]) for t in self.texts])
        return expected.chain(texts, expected.confident(top, drafting.confidence, drafting.k, drafting.keep_unsure))

    @cached_property
    def degenerate(self) -> np.ndarray:
        """Return which texts are mostly a loop, [R]."""
        return np.array([t.distinct_4grams < DEGENERATE for t in self.texts])

    @cached_property
    def categories(self) -> np.ndarray:
        return np.array([t.category for t in self.texts])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """A way to draft: k tokens, or up to k while the draft is confident, or a tree with widths by depth."""

    k: int
    confidence: float | None = None
    keep_unsure: bool = True
    widths: tuple[int, ...] = ()

    def describe(self) -> str:
        if self.widths:
            return "tree " + "x".join(map(str, self.widths))
        return str(self.k) if self.confidence is None else f"up to {self.k}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Acceptance over some texts under one way to draft, with intervals over texts."""

    group: str
    texts: int
    drafting: Drafting
    acceptance: Acceptance
    tokens_per_pass: Interval  # all passes after the first, those without a draft too
    length: Interval  # mean_acceptance_length
    rate: Interval
    conditional: list[Interval]  # by position

    def as_dict(self) -> dict[str, object]:
        return {
            "group": self.group,
            "texts": self.texts,
            "num_speculative_tokens": self.drafting.k,
            "drafting": self.drafting.describe(),
            **self.acceptance.model_dump(),
            "tokens_per_pass": self.tokens_per_pass.model_dump(),
            "mean_acceptance_length_interval": self.length.model_dump(),
            "draft_acceptance_rate_interval": self.rate.model_dump(),
            "conditional_acceptance_intervals": [c.model_dump() for c in self.conditional],
        }


def replay(config: ReplayConfig, output: Output) -> dict[str, Replay]:
    """Replay drafts over a store and write one replay.json for each; return them by the drafts' names.

    Raises:
        UserError: drafts of one name, or a draft or rule that does not fit the stored outputs.
    """
    store = read_store(config.directory)
    if config.category is not None:
        store = store.of_category(config.category)
    drafters = {spec.name: spec for spec in drafters_of(config)}
    if len(drafters) < len(config.draft) + len(config.drafter):
        raise UserError(f"two drafts have the same name; rename one: {', '.join([*config.draft, *config.drafter])}")
    for spec in drafters.values():
        check(store, spec, config)
    replays = {name: replay_draft(store, spec, config, output.command_line) for name, spec in drafters.items()}
    with output.directory() as work:
        for name, each in replays.items():
            (work / name).mkdir()
            (work / name / FILE).write_text(each.model_dump_json())
        read = [path for spec in drafters.values() for path in spec.paths(None)]
        output.record(work, [config.directory, *dict.fromkeys(read)])
    return replays


def drafters_of(config: ReplayConfig) -> list[DrafterSpec]:
    """Return the drafts of a config as drafters, and then its other drafters. Raises UserError: one names no draft."""
    drafters = list(map(parse_drafter, config.drafter))
    if unnamed := [spec.text for spec in drafters if "" in spec.drafts]:
        raise UserError(f"--drafter {unnamed[0]}: add draft=DIR")
    return [*(drafter_of(hub.locate(name), parallel=config.parallel) for name in config.draft), *drafters]


def drafter_of(draft: Path, *, parallel: bool = True) -> DrafterSpec:
    """Return the drafter of a checkpoint or head. parallel: a parallel draft drafts in one pass.

    Raises:
        UserError: parallel is False, and it is no parallel draft.
    """
    if not parallel and pard_token(draft) is None:
        raise UserError(f"--no-parallel: {draft} is no parallel draft")
    name = hub.checkpoint_name(draft)
    if hub.is_eagle_head(draft):
        return DRAFTERS.get("eagle", name).model_validate({"text": name, "heads": str(draft)})
    kind = "parallel" if parallel and pard_token(draft) is not None else "model"
    return DRAFTERS.get(kind, name).model_validate({"text": name, "draft": str(draft)})


def check(store: StoredOutputs, spec: DrafterSpec, config: ReplayConfig) -> int:
    """Return how many logits count, after checking that a drafter and the rule fit the outputs; no model is loaded.

    Raises:
        UserError: text that the target did not write, another tokenizer, ids that the draft does not have, or
            log-probabilities that the rule cannot use; or the drafter has no acceptance to replay.
    """
    sampling = _target_sampling(store)
    if not spec.replays:
        raise UserError(f"--drafter {spec.text} is not replayed; draftlab score measures it")
    if spec.by_age and config.confidence is not None:
        raise UserError(f"--confidence does not end the drafts of {spec.text}; leave it out, or add --no-parallel")
    fits = sampling.temperature == 0 or store.manifest.logprobs == "sampled"
    fits = fits or (store.manifest.logprobs == "raw" and sampling.unmodified)
    if config.acceptance.rule == "rejection" and _draft_sampling(sampling, config).temperature > 0 and not fits:
        raise UserError(
            f"{store.directory} was sampled at {sampling.describe()} and has {store.manifest.logprobs} "
            "log-probabilities; --rule rejection needs those of the distribution that was sampled from: take "
            "--rule match, or build it at temperature 1"
        )
    drafts = spec.paths(None, models_only=True)
    size = common_vocabulary(drafts[0], store.vocabulary) if drafts else _target_vocabulary(store, spec, config)
    for text in store.outputs:
        largest = max(int(text.prompt.max()), int(text.ids.max(initial=0)))
        if largest >= size:
            named = drafts[0] if drafts else config.target
            raise UserError(f"text {text.number} of {store.directory} has the id {largest}; {named} has only {size}")
    return size


def replay_draft(store: StoredOutputs, spec: DrafterSpec, config: ReplayConfig, command: str = "") -> Replay:
    """Run one pass of the draft over every text of the store."""
    vocab, sampling, manifest = check(store, spec, config), _target_sampling(store), store.manifest
    device = checkpoint.resolve_device(config.device)
    dtype = checkpoint.resolve_dtype(config.dtype, device)
    draft_sampling = _draft_sampling(sampling, config)
    most = max(way.k for way in draftings(config))
    target = Path() if spec.drafts else hub.locate(config.target)
    with progress(f"replay {spec.name}", len(store.outputs)) as advance:
        scores = spec.acceptance(
            ReplayContext(
                texts=[(t.prompt, t.ids) for t in store.outputs], target_path=target, sampling=draft_sampling,
                vocab=vocab, most=most, dtype=dtype, device=device, advance=lambda done: advance(done, "texts"),
            )
        )  # fmt: skip
    certain = config.acceptance.rule == "match" or sampling.temperature == 0
    loops = repeats([t.ids for t in store.outputs])
    texts = [_replayed(*each, certain=certain) for each in zip(store.outputs, scores, loops, strict=True)]
    return Replay(
        draft=spec.name,
        draft_sha256=provenance.fingerprint((spec.paths(None) or [target])[0]),
        dtype=checkpoint.dtype_name(dtype),
        target=manifest.target,
        target_sha256=manifest.target_sha256,
        outputs_sha256=provenance.fingerprint(store.directory),
        tokenizer_sha256=manifest.tokenizer_sha256,
        sampling=sampling,
        rule=config.acceptance.rule,
        draft_temperature=draft_sampling.temperature,
        offsets=most if spec.by_age else None,
        eagle=spec.eagle_head is not None,
        texts=texts,
        command=command,
        versions=provenance.versions(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def read_replay(path: Path) -> Replay:
    """Read replay.json; raises as read_model."""
    return read_model(Replay, path, FILE, "; draftlab replay writes one")


def draftings(config: ReplayConfig) -> list[Drafting]:
    """Return the ways to draft that the settings name."""
    if config.tree is not None:
        return [Drafting(k=len(config.tree), widths=tuple(config.tree))]
    keep = config.unsure == "keep"
    return [Drafting(k=k, confidence=config.confidence, keep_unsure=keep) for k in config.k]


def rows_of(replayed: Replay, ways: Sequence[Drafting], first: First) -> list[Row]:
    """Return all texts under each way to draft; then, under the last, each category, and all texts without loops."""
    counted = [replayed.counts(way, first) for way in ways]
    everything = np.arange(len(replayed.texts))
    rows = [_row("all", counts, everything, way) for counts, way in zip(counted, ways, strict=True)]
    names = sorted({name for name in replayed.categories if name})
    groups = {name: np.flatnonzero(replayed.categories == name) for name in names}
    if replayed.degenerate.any() and not replayed.degenerate.all():
        groups["without loops"] = np.flatnonzero(~replayed.degenerate)
    return rows + [_row(name, counted[-1], which, ways[-1]) for name, which in groups.items()]


def _row(group: str, counts: Counts, which: np.ndarray, way: Drafting) -> Row:
    c = counts.rows(which)
    accepted = c.accepted
    over = np.column_stack([c.tokens, c.steps + accepted, accepted, c.reached[:, 1:]])
    under = np.column_stack([c.passes, c.steps, c.drafted, c.examined])
    per_pass, length, rate, *conditional = ratio_intervals(over, under)
    return Row(
        group=group, texts=len(which), drafting=way, acceptance=c.acceptance(), tokens_per_pass=per_pass,
        length=length, rate=rate, conditional=conditional,
    )  # fmt: skip


def _replayed(text: TargetOutput, score: TokenLogprobs, loop: Repeats, *, certain: bool) -> ReplayedText:
    if np.isnan(score.logprobs).any():
        raise UserError("the draft computes logits that are NaN: its weights are damaged, or overflow in this dtype")
    log_p = np.zeros(len(text.ids)) if certain or text.logprobs is None else text.logprobs
    log_p = log_p if score.logprobs.ndim == 1 else log_p[:, None]
    return ReplayedText(
        number=text.number,
        category=text.category,
        prompt_tokens=len(text.prompt),
        finish_reason=text.finish_reason,
        chances=np.round(expected.chances(score.logprobs, log_p), 8).tolist(),
        ranks=score.ranks.tolist(),
        top=np.round(score.max_probs.astype(np.float64), 8).tolist(),
        distinct_4grams=loop.distinct_4grams,
        longest_repeat=loop.longest_repeat,
    )


def _target_vocabulary(store: StoredOutputs, spec: DrafterSpec, config: ReplayConfig) -> int:
    """Return the logits of the target of a drafter without a draft model.

    Raises:
        UserError: the drafter does not fit the target, or the target did not write the text.
    """
    target, vocab = hub.locate(config.target), common_vocabulary(hub.locate(config.target), store.vocabulary)
    layers = llama.check_supported(target).layers
    spec.check(RunFacts(target=target, layers=layers, vocab=vocab, mode="eager", rule=config.rule, draft=None))
    written_by = store.manifest.target_sha256
    if written_by is not None and written_by != provenance.fingerprint(target):
        raise UserError(f"{store.directory} was written by {store.manifest.target}, whose weights are not {target}'s")
    return vocab


def _target_sampling(store: StoredOutputs) -> SamplingParams:
    """Raises UserError: the target did not write the text, or nobody knows how it sampled."""
    if store.manifest.text == "data":
        raise UserError(f"{store.directory} is of data that the target only read; build it with --use replay")
    if store.manifest.sampling is None:
        raise UserError(f"{store.directory} is a server's log, which does not say how the target sampled")
    return store.manifest.sampling


def _draft_sampling(sampling: SamplingParams, config: ReplayConfig) -> SamplingParams:
    """Return how the draft samples: as the target, but for its own temperature."""
    own = sampling.temperature if config.acceptance.draft_temperature is None else config.acceptance.draft_temperature
    return replace(sampling, temperature=own)


def _skipped(first: First) -> int:
    return 1 if first == "prefill" else 0
