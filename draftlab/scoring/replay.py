"""Replay drafts over stored target outputs: one teacher-forced pass per text gives the acceptance of every K.

R texts, n tokens of a text, K drafted tokens.
"""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt

from draftlab.acceptance import expected
from draftlab.acceptance.expected import Counts, Texts
from draftlab.acceptance.token_logprobs import TokenLogprobs
from draftlab.config.server_rules import DecodingRule
from draftlab.console import progress
from draftlab.drafters.base import DRAFTERS, DrafterSpec, RunFacts
from draftlab.drafters.context import ReplayContext
from draftlab.errors import OtherArchitecture, Quantised, UserError
from draftlab.intervals import Interval, by_conversation, ratio_intervals
from draftlab.latency.workload import Workload
from draftlab.model import devices, hub, llama, modes
from draftlab.model.checkpoint import Checkpoint
from draftlab.model.decoder import Decoder
from draftlab.model.parallel import pard_token
from draftlab.output import Output
from draftlab.reading import FileModel, read_model
from draftlab.results.decoding import AcceptanceMetrics
from draftlab.runs import provenance
from draftlab.sampling import FinishReason, SamplingParams
from draftlab.target_outputs.outputs import TargetOutput
from draftlab.target_outputs.store import LOOP, StoredOutputs, distinct_4grams

FILE = "replay.json"
Chance = Annotated[float, Field(ge=0, le=1.001)]  # a probability, which rounding may lift above 1


class ReplayedText(FileModel):
    """Acceptance of a draft on one text.

    Args:
        number: Position of the prompt in its file.
        conversation: Number of the conversation of which the prompt is a turn, or None if the store has no such number.
        chances: Probability that each token of the text is accepted if it is drafted, [n], or [n, K] or [n, K, K]
            (see TokenLogprobs).
        drafted: Length of the draft of a step that begins at each token, [n], or [n, K] for each K. None: always K.
        modelled: Whether the draft model drafts in a step that begins at each token, [n]. None: it does so in every
            step, or the drafter has no draft model.
    """

    number: NonNegativeInt
    conversation: NonNegativeInt | None = None
    category: str
    prompt_tokens: NonNegativeInt
    finish_reason: FinishReason
    chances: list[Chance] | list[list[Chance]] | list[list[list[Chance]]]
    drafted: list[NonNegativeInt] | list[list[NonNegativeInt]] | None = None
    modelled: list[bool] | None = None
    distinct_4grams: float


class Replay(FileModel):
    """Replay of one draft on one store, the content of replay.json. All acceptance statistics are computed from it.

    Args:
        selection: Hash of the prompts (see Prompts.selection). None if the store has none, or lacks refused prompts.
        sampling: How the target sampled.
        draft_sampling: How the draft samples.
        rule: Rule that accepts drafted tokens. "rejection" accepts with probability min(1, q / p). "match" accepts a
            token that equals the target's own sample, which has probability q. A greedy draft has q = 0 or 1.
        kind: Kind of the drafter, as --drafter names it.
        offsets: Largest number K of tokens per draft, if the chances depend on the position in a draft. None for an
            ordinary draft.
        by_k: Whether chances and drafted also depend on K.
    """

    version: Literal[4] = 4
    draft: str
    draft_sha256: str
    dtype: str
    target: str
    target_sha256: str | None
    outputs_sha256: str
    selection: str | None = None
    tokenizer_sha256: str
    sampling: SamplingParams
    rule: str
    draft_sampling: SamplingParams
    kind: str = "model"
    offsets: int | None = None
    by_k: bool = False
    texts: list[ReplayedText]
    command: str
    versions: dict[str, str]
    created: str

    def chances(self) -> list[np.ndarray]:
        """Return the acceptance probabilities of the tokens of each text except the first token.

        The target's prefill emits the first token. A text of n tokens has [n - 1] probabilities, or [n - 1, K] for a
        drafter with `offsets` K, or [n - 1, K, K] if they also depend on K.
        """
        inner = () if self.offsets is None else (self.offsets,) * (1 + self.by_k)
        return [np.array(text.chances).reshape(-1, *inner)[1:] for text in self.texts]

    @property
    def conversations(self) -> list[int | None]:
        """Return the number of each text's conversation. Stores that were built before have none."""
        return [text.conversation for text in self.texts]

    def padded(self) -> Texts:
        """Return the texts and their length limits in the form that draftlab.acceptance.expected takes."""
        longest = self.sampling.max_tokens
        limits = [len(t.chances) if t.finish_reason == "length" else longest for t in self.texts]
        inner = (self.offsets,) if self.by_k else ()
        drafted = [np.array(text.drafted).reshape(-1, *inner)[1:] for text in self.texts if text.drafted is not None]
        modelled = [np.array(t.modelled[1:]) for t in self.texts if t.modelled is not None]
        return expected.texts_of(self.chances(), np.array(limits) - 1, drafted or None, modelled or None)

    def counts(self, k: int) -> Counts:
        """Return for each text the expected steps, drafted tokens and accepted tokens if each step drafts k tokens."""
        return expected.chain(self.padded(), k)

    @cached_property
    def degenerate(self) -> np.ndarray:
        """Return whether each text is mostly a repetition loop, as an array with one value per text."""
        return np.array([t.distinct_4grams < LOOP for t in self.texts])

    @cached_property
    def categories(self) -> np.ndarray:
        return np.array([t.category for t in self.texts])


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceRow:
    """Acceptance in a group of texts when each step drafts k tokens, with intervals over their conversations."""

    group: str
    texts: int
    k: int
    acceptance: AcceptanceMetrics
    tokens_per_pass: Interval  # over all passes after the first, including passes without a draft
    length: Interval  # mean_acceptance_length
    rate: Interval
    conditional: list[Interval]  # one interval per position in the draft

    def as_dict(self) -> dict[str, object]:
        return {
            "group": self.group,
            "texts": self.texts,
            "num_speculative_tokens": self.k,
            **self.acceptance.model_dump(),
            "tokens_per_pass": self.tokens_per_pass.model_dump(),
            "mean_acceptance_length_interval": self.length.model_dump(),
            "draft_acceptance_rate_interval": self.rate.model_dump(),
            "conditional_acceptance_intervals": [c.model_dump() for c in self.conditional],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Settings of a replay.

    Args:
        k: Largest number of tokens drafted per step.
        rule: How the draft samples, and how drafted tokens are verified.
        target: Checkpoint of the target, for drafters without a draft model.
        draft: Default draft, for drafters without draft=.
        device_map: Map by which accelerate spreads this target over devices.
    """

    k: int
    rule: DecodingRule
    dtype: torch.dtype
    device: torch.device
    target: Path | None = None
    draft: Path | None = None
    device_map: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedDraft:
    """The replay of a draft. rows: Acceptance for each group of texts and each K."""

    replay: Replay
    rows: list[AcceptanceRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaying:
    """The replay of drafters over a store.

    Attributes:
        name: Default name of the output directory.
        ks: Numbers of drafted tokens per step for which acceptance is computed.
    """

    name: str
    store: StoredOutputs
    drafters: Sequence[DrafterSpec]
    drafting: Drafting
    ks: Sequence[int]

    def run(self, output: Output) -> dict[str, ReplayedDraft]:
        """Replay the drafters, and write a replay.json for each. Return the replays by the drafter's name.

        Raises:
            UserError: A drafter or the rule does not fit the stored outputs.
        """
        read = itertools.chain.from_iterable(spec.paths(self.drafting.draft) for spec in self.drafters)
        output.inputs([self.store.directory, *dict.fromkeys(read)])
        replays = {
            spec.name: replay_draft(self.store, spec, self.drafting, output.command_line) for spec in self.drafters
        }
        with output.directory() as work:
            for name, each in replays.items():
                (work / name).mkdir()
                (work / name / FILE).write_text(each.model_dump_json())
            output.record(work)
        return {name: ReplayedDraft(replay=each, rows=rows_of(each, self.ks)) for name, each in replays.items()}


def drafter_of(draft: Path) -> DrafterSpec:
    """Return the drafter spec for a checkpoint: an EAGLE-3 head, a parallel draft or an ordinary draft model."""
    name = hub.checkpoint_name(draft)
    if head := hub.known_head(draft):
        return DRAFTERS.get(head, name).model_validate({"text": name, "heads": str(draft)})
    kind = "model" if pard_token(draft) is None else "parallel"
    return DRAFTERS.get(kind, name).model_validate({"text": name, "draft": str(draft)})


def check(store: StoredOutputs, spec: DrafterSpec, drafting: Drafting) -> int:
    """Check that a drafter and the rule fit the outputs, and return the number of ids. No model is loaded.

    Raises:
        UserError: The target did not write the texts, the tokenizers differ, a text has an id that the draft lacks, the
            rule cannot use the stored log-probabilities, or this kind of drafter cannot be replayed.
    """
    sampling = _target_sampling(store)
    if not spec.replays:
        raise UserError(f"--drafter {spec.text} cannot be replayed; measure the drafter with draftlab score")
    if spec.reads_data:
        raise UserError(f"--drafter {spec.text} has no corpus in a replay; add data=SOURCE or outputs=STORE")
    served = drafting.rule.target_sampling(sampling)
    if served.active != sampling.active or served.temperature != sampling.temperature:
        raise UserError(
            f"--server-rule: {store.directory} was sampled at {sampling.describe()}, but this server would sample at "
            f"{served.describe()}; leave --server-rule out, or use outputs that were sampled like this"
        )
    logprobs = store.manifest.logprobs
    fits = sampling.temperature == 0 or logprobs == "sampled"
    fits = fits or (logprobs == "raw" and sampling.unmodified)
    samples = drafting.rule.draft_sampling(sampling).temperature > 0
    if drafting.rule.verify == "rejection" and samples and not fits:
        raise UserError(
            f"{store.directory} was sampled at {sampling.describe()}, but has no log-probabilities of that "
            "distribution, which --rule rejection needs; use --rule match, or build the outputs again at "
            "--temperature 1, without top_k, top_p and min_p"
        )
    if drafts := spec.paths(drafting.draft, models_only=True):
        named = drafts[0]
        size = Checkpoint(drafts[0]).common_vocabulary(Checkpoint(store.vocabulary))
    else:
        named = drafting.target
        size = _target_vocabulary(store, spec, drafting)
    for text in store.outputs:
        largest = max(int(text.prompt.max()), int(text.ids.max(initial=0)))
        if largest >= size:
            raise UserError(
                f"text {text.number} of {store.directory} has the token id {largest}, but {named} has only {size} "
                "ids; use outputs with the same vocabulary"
            )
    return size


def replay_draft(store: StoredOutputs, spec: DrafterSpec, drafting: Drafting, command: str = "") -> Replay:
    """Replay a drafter, with one pass over each text of the store."""
    vocab = check(store, spec, drafting)
    manifest = store.manifest
    sampling = _target_sampling(store)
    draft_sampling = drafting.rule.draft_sampling(sampling)

    def load(directory: Path) -> Decoder:
        return modes.load(directory, drafting.dtype, drafting.device)

    def load_target() -> Decoder:
        # the caller locates the target for a drafter that reads it
        assert drafting.target is not None
        return modes.load(drafting.target, drafting.dtype, drafting.device, drafting.device_map)

    with progress(f"replaying {spec.name}", len(store.outputs)) as advance:
        scores = spec.acceptance(
            ReplayContext(
                texts=[(t.prompt, t.ids) for t in store.outputs],
                limits=[_limit(t, sampling) for t in store.outputs],
                target_path=drafting.target or Path(),
                sampling=draft_sampling,
                vocab=vocab,
                most=drafting.k,
                load=load,
                load_target=load_target,
                advance=lambda done: advance(done, "texts"),
                draft=drafting.draft,
            )
        )
    certain = drafting.rule.verify == "match" or sampling.temperature == 0
    read = spec.paths(drafting.draft)
    return Replay(
        draft=spec.name,
        draft_sha256=provenance.fingerprint(read[0]) if read else "",
        dtype=devices.dtype_name(drafting.dtype),
        target=manifest.target,
        target_sha256=manifest.target_sha256,
        outputs_sha256=provenance.fingerprint(store.directory),
        selection=manifest.stored_selection,
        tokenizer_sha256=manifest.tokenizer_sha256,
        sampling=sampling,
        rule=drafting.rule.verify,
        draft_sampling=draft_sampling,
        offsets=drafting.k if spec.by_age else None,
        by_k=any(score.logprobs.ndim == 3 for score in scores),
        kind=type(spec).kind,
        texts=[_replayed(*each, certain=certain) for each in zip(store.outputs, scores, strict=True)],
        command=command,
        versions=provenance.versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def read_replay(path: Path) -> Replay:
    """Read the replay.json in `path`. Errors are those of read_model."""
    return read_model(Replay, path, FILE, "; draftlab replay writes one")


def workload_of_replay(replay: Replay) -> Workload:
    """Return the texts of a replay, with the acceptance probabilities that the replay computed."""
    return Workload(
        texts=replay.padded(),
        prompt_tokens=np.array([text.prompt_tokens for text in replay.texts]),
        kind=replay.kind,
        model=(replay.draft, replay.draft_sha256),
        conversations=replay.conversations,
        selection=replay.selection,
    )


def rows_of(replayed: Replay, ks: Sequence[int]) -> list[AcceptanceRow]:
    """Return the acceptance over all texts for each K. For the last K, also return it for groups of texts.

    The groups are the categories, and, if only some texts are repetition loops, all other texts.
    """
    counted = [replayed.counts(k) for k in ks]
    everything = np.arange(len(replayed.texts))
    talks = replayed.conversations
    rows = [_row("all", counts, everything, talks, k) for counts, k in zip(counted, ks, strict=True)]
    names = sorted({name for name in replayed.categories if name})
    groups = {name: np.flatnonzero(replayed.categories == name) for name in names}
    if replayed.degenerate.any() and not replayed.degenerate.all():
        groups["without loops"] = np.flatnonzero(~replayed.degenerate)
    last = counted[-1]
    return rows + [_row(name, last, which, talks, ks[-1]) for name, which in groups.items()]


def _row(group: str, counts: Counts, which: np.ndarray, talks: Sequence[int | None], k: int) -> AcceptanceRow:
    c = counts.rows(which)
    accepted = c.accepted
    over = np.column_stack([c.tokens, c.steps + accepted, accepted, c.reached[:, 1:]])
    under = np.column_stack([c.passes, c.steps, c.drafted, c.examined])
    numbers = [talks[i] for i in which]
    most = np.array([np.inf, np.inf] + [1.0] * (over.shape[1] - 2))
    per_pass, length, rate, *conditional = ratio_intervals(
        by_conversation(over, numbers), by_conversation(under, numbers), most
    )
    return AcceptanceRow(
        group=group,
        texts=len(which),
        k=k,
        acceptance=c.acceptance(),
        tokens_per_pass=per_pass,
        length=length,
        rate=rate,
        conditional=conditional,
    )


def _limit(text: TargetOutput, sampling: SamplingParams) -> int:
    """Return the length at which decoding of a text must stop."""
    return len(text.ids) if text.finish_reason == "length" else sampling.max_tokens


def _replayed(text: TargetOutput, score: TokenLogprobs, *, certain: bool) -> ReplayedText:
    if np.isnan(score.logprobs).any():
        raise UserError(
            "the draft computes NaN or infinite logits: its weights are damaged, or overflow in this dtype; try "
            "--dtype float32"
        )
    log_p = np.zeros(len(text.ids)) if certain or text.logprobs is None else text.logprobs
    return ReplayedText(
        number=text.number,
        conversation=text.conversation,
        category=text.category,
        prompt_tokens=len(text.prompt),
        finish_reason=text.finish_reason,
        chances=np.round(score.chances(log_p), 8).tolist(),
        drafted=None if score.drafted is None else score.drafted.tolist(),
        modelled=None if score.modelled is None else score.modelled.tolist(),
        distinct_4grams=distinct_4grams([text.ids.tolist()]),
    )


def _target_vocabulary(store: StoredOutputs, spec: DrafterSpec, drafting: Drafting) -> int:
    """Return the target's number of logits, for a drafter without a draft model.

    Raises:
        UserError: The drafter does not fit the target, or another model wrote the texts.
    """
    target = drafting.target
    assert target is not None  # the caller locates the target for such a drafter
    vocab = Checkpoint(target).common_vocabulary(Checkpoint(store.vocabulary))
    layers = None
    with contextlib.suppress(OtherArchitecture, Quantised):  # transformers runs the model
        layers = llama.check_supported(target).layers
    spec.check(RunFacts(target=target, layers=layers, vocab=vocab, rule=drafting.rule.verify, draft=None))
    written_by = store.manifest.target_sha256
    if written_by is not None and written_by != provenance.fingerprint(target):
        raise UserError(
            f"{store.directory} was written by {store.manifest.target}, but {target} has other weights; name the "
            "same target by --target"
        )
    return vocab


def _target_sampling(store: StoredOutputs) -> SamplingParams:
    """Return how the target sampled. Raises UserError: the target did not write the texts, or this is unknown."""
    if store.manifest.text == "data":
        raise UserError(
            f"{store.directory} has text that the target did not write, but a replay needs text that the target wrote; "
            "build outputs with draftlab outputs build --use replay"
        )
    if store.manifest.sampling is None:
        raise UserError(
            f"{store.directory} was made from a server's log, which does not tell how the target sampled; build "
            "outputs with draftlab outputs build --use replay"
        )
    return store.manifest.sampling
