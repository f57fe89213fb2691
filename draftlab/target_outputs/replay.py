"""A draft replayed over a trace: one teacher-forced pass over each text, and what it says of every way to draft.

R texts, n tokens of a text, K drafted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, model_validator

from draftlab import provenance
from draftlab.acceptance import expected
from draftlab.acceptance.expected import Counts, Texts
from draftlab.acceptance.token_logprobs import TokenLogprobs, score_tokens
from draftlab.errors import UserError
from draftlab.files import read_model
from draftlab.intervals import Interval, ratio_intervals
from draftlab.model import checkpoint, decoder
from draftlab.model.tokenizer import common_vocabulary
from draftlab.results.decoding import Acceptance
from draftlab.sampling import SamplingParams
from draftlab.target_outputs.repeats import DEGENERATE, Repeats, repeats
from draftlab.target_outputs.traces import Decoding, Stop, Text, Trace

FILE = "replay.json"
Rule = Literal["rejection", "match"]
First = Literal["prefill", "prompt"]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ReplayedText(_Frozen):
    """What the draft makes of one text: lists of one entry for each token that the target wrote, [n]."""

    number: int  # of the prompt in its file
    category: str
    prompt_tokens: int
    stop: Stop
    chances: list[float]  # that the token came from the draft
    ranks: list[int]  # of the token in the draft's distribution, 0 the most probable
    top: list[float]  # the draft's largest probability in its place, at temperature 1
    distinct_4grams: float
    longest_repeat: int

    @model_validator(mode="after")
    def _one_each(self) -> "ReplayedText":
        if not len(self.chances) == len(self.ranks) == len(self.top):
            raise ValueError("chances, ranks and top have one entry for each token")
        return self


class Replay(_Frozen):
    """One draft on one trace. replay.json; every statistic is derived from it.

    rule: what the chances are of; rejection: min(1, q / p); match: the draft's token stands where it is the target's
    own sample, q. A greedy draft has q = 0 or 1.
    """

    version: Literal[1] = 1
    draft: str
    draft_sha256: str
    dtype: str
    target: str
    target_sha256: str | None
    trace_sha256: str
    tokenizer_sha256: str
    decoding: Decoding  # of the target
    rule: Rule
    draft_temperature: float
    texts: list[ReplayedText]
    command: str
    versions: dict[str, str]
    created: str

    def chances(self, first: First = "prefill") -> list[np.ndarray]:
        """Of each text, [n]. With prefill the first token comes from the target's pass over the prompt: [n - 1]."""
        return [np.array(t.chances[_skipped(first) :]) for t in self.texts]

    def contexts(self, first: First = "prefill") -> list[np.ndarray]:
        """Tokens before each that chances speaks of: what caches hold, and the one that is fed."""
        skipped = _skipped(first)
        return [t.prompt_tokens + np.arange(skipped, len(t.chances)) for t in self.texts]

    def padded(self, first: First = "prefill") -> Texts:
        """For the functions of draftlab.engine.replay, with where the length limit stood."""
        skipped, longest = _skipped(first), self.decoding.max_new_tokens
        limits = [len(t.chances) if t.stop == "length" else longest for t in self.texts]
        return expected.texts_of(self.chances(first), np.array(limits) - skipped)

    def counts(self, drafting: "Drafting", first: First = "prefill") -> Counts:
        """Expected counts of every text under one way to draft."""
        texts, skipped = self.padded(first), _skipped(first)
        if drafting.widths:
            ranks = expected.padded([np.array(t.ranks[skipped:]) for t in self.texts])
            return expected.tree(texts, ranks, list(drafting.widths))
        if drafting.confidence is None:
            return expected.chain(texts, drafting.k)
        top = expected.padded([np.array(t.top[skipped:]) for t in self.texts])
        return expected.chain(texts, expected.confident(top, drafting.confidence, drafting.k, drafting.keep_unsure))

    @cached_property
    def degenerate(self) -> np.ndarray:
        """Which texts are mostly a loop, [R]."""
        return np.array([t.distinct_4grams < DEGENERATE for t in self.texts])

    @cached_property
    def categories(self) -> np.ndarray:
        return np.array([t.category for t in self.texts])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """A way to draft: k tokens, or up to k as long as the draft is sure, or a tree with widths by depth."""

    k: int
    confidence: float | None = None
    keep_unsure: bool = True
    widths: tuple[int, ...] = ()

    @property
    def words(self) -> str:
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
            "drafting": self.drafting.words,
            **self.acceptance.model_dump(),
            "tokens_per_pass": self.tokens_per_pass.model_dump(),
            "mean_acceptance_length_interval": self.length.model_dump(),
            "draft_acceptance_rate_interval": self.rate.model_dump(),
            "conditional_acceptance_intervals": [c.model_dump() for c in self.conditional],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to replay. draft_temperature None: as the target; the target's top-k and top-p go for the draft, too."""

    rule: Rule
    draft_temperature: float | None
    dtype: torch.dtype
    device: torch.device
    command: str


def check(trace: Trace, draft: Path, plan: Plan) -> int:
    """Whether the draft and the rule fit the trace, before any model is loaded; the logits that count.

    Raises:
        UserError: another tokenizer, ids that the draft does not have, or log-probabilities that the rule cannot use.
    """
    how, manifest = trace.manifest.decoding, trace.manifest
    fits = how.temperature == 0 or manifest.logprobs == "sampled" or (manifest.logprobs == "raw" and how.plain)
    if plan.rule == "rejection" and _draft_warp(how, plan).temperature > 0 and not fits:
        raise UserError(
            f"{trace.directory} was {how.words()} and holds {manifest.logprobs} log-probabilities; --rule rejection "
            "needs those of the distribution that was sampled from: take --rule match, or record at temperature 1"
        )
    size = common_vocabulary(draft, trace.vocabulary)
    for text in trace.texts:
        largest = max(int(text.prompt.max()), int(text.ids.max(initial=0)))
        if largest >= size:
            raise UserError(f"text {text.number} of {trace.directory} has the id {largest}, {draft} only {size}")
    return size


def replay_draft(trace: Trace, draft: Path, plan: Plan, advance: Callable[[int, str], None]) -> Replay:
    """One pass of the draft over every text of the trace."""
    vocab = check(trace, draft, plan)
    model = decoder.load(draft, plan.dtype, plan.device)
    warp = _draft_warp(trace.manifest.decoding, plan)
    pairs = [(t.prompt, t.ids) for t in trace.texts]
    found = score_tokens(model, pairs, vocab, warp, lambda done: advance(done, "texts"))
    certain = plan.rule == "match" or trace.manifest.decoding.temperature == 0
    loops = repeats([t.ids for t in trace.texts])
    texts = [
        _replayed(text, expected.chances(one.logprobs, np.zeros(len(text.ids)) if certain else text.log_p), one, loop)
        for text, one, loop in zip(trace.texts, found, loops, strict=True)
    ]
    manifest = trace.manifest
    return Replay(
        draft=draft.name,
        draft_sha256=provenance.fingerprint(draft),
        dtype=checkpoint.dtype_name(plan.dtype),
        target=manifest.target,
        target_sha256=manifest.target_sha256,
        trace_sha256=provenance.fingerprint(trace.directory),
        tokenizer_sha256=manifest.tokenizer_sha256,
        decoding=manifest.decoding,
        rule=plan.rule,
        draft_temperature=warp.temperature,
        texts=texts,
        command=plan.command,
        versions=provenance.versions(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def read_replay(path: Path) -> Replay:
    """replay.json; raises as read_model."""
    return read_model(Replay, path, FILE, "; draftlab trace replay writes one")


def rows_of(found: Replay, ways: list[Drafting], first: First) -> list[Row]:
    """All texts under each way to draft; then under the last one those of each category, and without the loops."""
    counted = [found.counts(way, first) for way in ways]
    everything = np.arange(len(found.texts))
    rows = [_row("all", counts, everything, way) for counts, way in zip(counted, ways, strict=True)]
    groups = {name: np.flatnonzero(found.categories == name) for name in sorted(set(found.categories)) if name}
    if found.degenerate.any() and not found.degenerate.all():
        groups["without loops"] = np.flatnonzero(~found.degenerate)
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


def _replayed(text: Text, chances: np.ndarray, one: TokenLogprobs, loop: Repeats) -> ReplayedText:
    return ReplayedText(
        number=text.number,
        category=text.category,
        prompt_tokens=len(text.prompt),
        stop=text.stop,
        chances=np.round(chances, 8).tolist(),
        ranks=one.ranks.tolist(),
        top=np.round(one.max_probs.astype(np.float64), 8).tolist(),
        distinct_4grams=loop.distinct_4grams,
        longest_repeat=loop.longest_repeat,
    )


def _draft_warp(how: Decoding, plan: Plan) -> SamplingParams:
    own = how.temperature if plan.draft_temperature is None else plan.draft_temperature
    return SamplingParams(temperature=own, top_k=how.top_k, top_p=how.top_p)


def _skipped(first: First) -> int:
    return 1 if first == "prefill" else 0
