"""Plain and speculative decoding with the same engine, and the time of each step.

B rows, K drafted tokens per step, T = K + 1 tokens verified, V vocab. Rows advance at their own pace. Invariant: a
cache holds all tokens of a row but the last token, which the next pass feeds first.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.clocks import StepClock
from draftlab.engine.verify import (
    Rule,
    Tokens,
    Uniforms,
    check_logits,
    distribution,
    draw,
    verify_rows,
)
from draftlab.model.decoder import Decoder, Parents, Tree, feed
from draftlab.model.devices import staged
from draftlab.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One row's share of a target pass and of the drafting before it.

    accepted: Number of drafted tokens in `tokens`. Only a row's last step may have fewer than accepted + 1 tokens. The
    seconds of a pass are divided by the number of rows still decoding, so their sum over rows is wall time.
    """

    row: int
    drafted: int
    accepted: int
    tokens: list[int]
    draft_seconds: float
    verify_seconds: float
    host_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Proposed tokens of each row.

    Args:
        ids: Token ids, [B, K].
        q: Distributions that the ids were drawn from, [B, K, V]. None is a deterministic draft, with one-hot q.
        counts: Number of valid tokens of each row, [B]. A row with 0 has no draft.
        parents: None is a chain. In a token tree, the number of each token's parent: tokens count from 1, and 0 is the
            last token of the text. Parents come before their children. A list has a tree for each row.
        rule: Rule that verifies this draft unless the run names a rule. Sampling with a token tree needs a rule.
    """

    ids: Tensor
    q: Tensor | None
    counts: list[int]
    parents: Parents | None = None
    rule: Rule | None = None

    def to(self, device: torch.device) -> "Draft":
        """Return the draft with its tensors on a device, as its target or a second drafter may be elsewhere."""
        q = None if self.q is None else self.q.to(device)
        return replace(self, ids=self.ids.to(device), q=q)

    def parents_of(self, row: int) -> Sequence[int]:
        """Return the parents in a row's tree; a range for a chain."""
        if self.parents is None:
            return range(self.ids.shape[1])
        trees = [tree for tree in self.parents if isinstance(tree, tuple)]
        return (
            trees[row] if trees else [parent for parent in self.parents if isinstance(parent, int)]
        )


class Drafter(Protocol):
    """Proposes tokens. A drafter keeps its own state and receives the whole texts at every call."""

    def reset(self, rows: int, capacity: int) -> None:
        """Drop all state and prepare for texts of at most capacity tokens."""
        ...

    def propose(
        self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor
    ) -> Draft:
        """Propose up to count tokens to follow each text.

        uniform: Draws in [0, 1), [B, count], the only randomness to use. Finished texts stay in the batch; their
        drafts are ignored.
        """
        ...

    def attach(self, cache: Any) -> None:
        """Receive the target's cache before its first pass. By default, do nothing."""

    def prefill(self, texts: Sequence[list[int]]) -> None:
        """Read each prompt and the token after it, before the first draft. By default, do nothing."""


@dataclass(unsafe_hash=True)
class Sampler:
    """Samples a draft model's tokens. vocab: The target's number of logits; None if the draft has the same number."""

    sampling: SamplingParams
    vocab: int | None
    ended = False

    def __call__(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sample tokens [B] from logits [B, V]. Return them and, unless greedy, their distributions [B, V]."""
        logits, uniform = fit_vocab(logits, self.vocab), uniform.to(logits.device)
        if self.sampling.temperature == 0:
            return logits.argmax(-1), None
        q = distribution(logits, self.sampling)
        return draw(q, uniform), q


def fit_vocab(logits: Tensor, vocab: int | None) -> Tensor:
    """Cut logits [..., V] to the target's vocabulary, or pad them with -inf."""
    if vocab is None or logits.shape[-1] == vocab:
        return logits
    return F.pad(logits, (0, vocab - logits.shape[-1]), value=-torch.inf)


class ModelDrafter(Drafter):
    """A draft model whose KV cache is rolled back to the emitted tokens. vocab: Same as in Sampler."""

    def __init__(self, model: Decoder, vocab: int | None = None) -> None:
        self.model, self.vocab = model, vocab
        self.own_vocab = model.vocab
        self.sampler: Callable[[SamplingParams, int | None], Sampler] = Sampler
        self.cache: Any = None

    def reset(self, rows: int, capacity: int) -> None:
        self.cache = None  # frees its memory before the next one is allocated
        self.cache = self.model.new_cache(rows, capacity)
        # tokens fed before self.drafted
        self.cached: list[list[int]] = [[] for _ in range(rows)]
        self.drafted: Tensor | None = None

    def propose(
        self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor
    ) -> Draft:
        first = self.drafted is None
        logits = self.last_logits(texts)[:, -1]
        if first:
            check_logits(logits, "the draft")
        sampler = self.sampler(sampling.unlimited(), self.vocab)
        self.drafted, q = self.model.draft(logits, self.cache, uniform, sampler)
        return Draft(ids=self.drafted, q=q, counts=[self.drafted.shape[1]] * len(texts))

    def prefill(self, texts: Sequence[list[int]]) -> None:
        """Read all tokens of each text but the last token, which the first draft reads."""
        self.last_logits([text[:-1] for text in texts])

    def last_logits(self, texts: Sequence[list[int]], last: int = 1) -> Tensor:
        """Roll the cache back to the texts, read new tokens, and return the logits of the last tokens, [B, last, V]."""
        self.roll_back(texts)
        return feed(self.model, self.cache, texts, self.own_vocab, last)

    def roll_back(self, texts: Sequence[list[int]]) -> None:
        """Keep only the cached tokens that are also in the texts. From now on the texts count as read."""
        drafted = [[]] * len(texts) if self.drafted is None else self.drafted.tolist()
        for row, text in enumerate(texts):
            cached = self.cached[row] + drafted[row]
            agreed = min(self.cache.used[row], len(text))
            while cached[:agreed] != text[:agreed]:
                agreed -= 1
            self.cache.used[row] = agreed
        self.cached, self.drafted = [list(text) for text in texts], None


def decode(
    target: Decoder,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    clock: StepClock = time.perf_counter,
    numbers: Sequence[int] | None = None,
) -> Iterator[Step]:
    """Decode one token per row in each target pass. Arguments are those of ``speculative_decode``."""
    return speculative_decode(target, None, prompts, 0, sampling, clock, numbers)


def speculative_decode(
    target: Decoder,
    drafter: Drafter | None,
    prompts: Sequence[list[int]],
    k: int,
    sampling: SamplingParams,
    clock: StepClock = time.perf_counter,
    numbers: Sequence[int] | None = None,
    rule: Rule | None = None,
    draft_temperature: float | None = None,
) -> Iterator[Step]:
    """Decode losslessly: draft k tokens, verify them in one target pass, and emit the accepted tokens and one more.

    The first pass is the prefill, which emits one token per row and drafts nothing, as in engines with a separate
    prefill. Its draft_seconds are the time of the drafter's own prefill. Each pass yields a step for every row still
    decoding. A finished row waits until all rows are finished.

    Args:
        numbers: A number per prompt. Seed and number decide a prompt's random draws, whatever the other rows are.
        rule: None takes the rule of each draft, or the rejection rule of Leviathan et al. for a draft without a rule.
            With greedy decoding all rules agree.
        draft_temperature: Temperature of the drafter; 0 is greedy. None takes the target's.
    """
    rows = _Rows(prompts, sampling)
    capacity = max(rows.limits, default=1) + k
    cache = target.new_cache(len(prompts), capacity)
    if drafter is not None:
        drafter.reset(len(prompts), capacity)
        drafter.attach(cache)
    draws = _draws(sampling, numbers or range(len(prompts)), 2 * k + 1).to(target.device)
    prefilled = False
    own = (
        sampling if draft_temperature is None else replace(sampling, temperature=draft_temperature)
    )
    while rows.live:
        room, uniform = rows.room(), rows.current(draws)
        count = min(k, max(room)) if prefilled else 0
        if count and target.replays_passes:
            count = k  # every pass has the same shape; tokens beyond a text's limit do not count
        start = clock()
        draft = (
            drafter.propose(rows.texts, count, own, uniform[:, :count]).to(target.device)
            if drafter and count
            else None
        )
        drafted_at = clock()
        logits = _target_logits(target, cache, rows.texts, draft)
        if not prefilled:
            check_logits(logits, "the target")
        verified_at = clock()
        drafted = (
            [0] * len(room)
            if draft is None
            else [min(pair) for pair in zip(draft.counts, room, strict=True)]
        )
        emitted = rows.append(
            verify_batch(logits, draft, drafted, sampling, uniform[:, k:], rule), cache, draft
        )
        end = read_at = clock()
        if drafter is not None and not prefilled and k and rows.live:
            drafter.prefill(rows.texts)
            read_at = clock()
        for row, accepted, tokens in emitted:
            yield Step(
                row=row,
                drafted=drafted[row],
                accepted=accepted,
                tokens=tokens,
                draft_seconds=((drafted_at - start) + (read_at - end)) / len(emitted),
                verify_seconds=(verified_at - drafted_at) / len(emitted),
                host_seconds=(end - verified_at) / len(emitted),
            )
        prefilled = True


def output_tokens(steps: Iterable[Step]) -> list[list[int]]:
    """Return the tokens of each row, in the order of rows."""
    tokens: dict[int, list[int]] = {}
    for step in steps:
        tokens.setdefault(step.row, []).extend(step.tokens)
    return [tokens[row] for row in sorted(tokens)]


def verify_batch(
    logits: Tensor,
    draft: Draft | None,
    counts: Sequence[int],
    sampling: SamplingParams,
    uniform: Tensor,
    rule: Rule | None = None,
) -> list[tuple[list[int], list[int]]]:
    """Return each row's indices of accepted drafted tokens, and the tokens to emit: the accepted and one more.

    Args:
        logits: Logits of the target after the text's last token and after each drafted token, [B, T, V].
        counts: Number of each row's drafted tokens to verify, [B].
        uniform: Draws in [0, 1): one for each drafted token, then one for the token after them, [B, T].
        rule: Same as in speculative_decode.
    """
    parents = [
        range(logits.shape[1] - 1) if draft is None else draft.parents_of(row)
        for row in range(len(counts))
    ]
    if sampling.temperature == 0:
        best = logits.argmax(-1)
        both = best if draft is None else torch.cat([best, draft.ids], 1)
        width = best.shape[1]
        return [
            _verify_greedy(row[:width], row[width:], tree, count)
            # the only wait for the device
            for row, tree, count in zip(both.tolist(), parents, counts, strict=True)
        ]
    p = distribution(logits, sampling)
    rule = rule if rule is not None or draft is None else draft.rule
    if rule is None:
        return _verify_sampled_chains(p, draft, counts, uniform)
    return [
        _verify_sampled(p[row, : count + 1], draft, row, parents[row][:count], uniform[row], rule)
        for row, count in enumerate(counts)
    ]


def _verify_greedy(
    best: list[int], ids: list[int], parents: Sequence[int], count: int
) -> tuple[list[int], list[int]]:
    """Follow the path of drafted tokens that equal the target's most probable tokens."""
    node, path, tokens = 0, [], [best[0]]
    for i in range(count):
        if parents[i] == node and ids[i] == tokens[-1]:
            node = i + 1
            path.append(i)
            tokens.append(best[node])
    return path, tokens


def _verify_sampled_chains(
    p: Tensor, draft: Draft | None, counts: Sequence[int], uniform: Tensor
) -> list[tuple[list[int], list[int]]]:
    """Verify chains with target probabilities p [B, T, V]. Raises ValueError: the draft is a token tree."""
    if draft is not None and draft.parents is not None:
        raise ValueError("the draft is a token tree, and no rule that verifies trees was given")
    ids = uniform.new_empty((len(p), 0), dtype=torch.long) if draft is None else draft.ids
    q = F.one_hot(ids, p.shape[-1]).to(p) if draft is None or draft.q is None else draft.q
    width = ids.shape[1]
    accepted, following = verify_rows(p, q, ids, uniform[:, :width], staged(counts, p.device))
    last = draw(following, uniform[:, -1])
    # the only wait for the device
    verified = torch.cat([accepted.unsqueeze(1), last.unsqueeze(1), ids], 1).tolist()
    return [([*range(count)], [*row[:count], token]) for count, token, *row in verified]


def _verify_sampled(
    p: Tensor, draft: Draft | None, row: int, parents: Sequence[int], uniform: Tensor, rule: Rule
) -> tuple[list[int], list[int]]:
    """Verify one row of a draft by `rule`, with target probabilities p [count + 1, V]."""
    count = len(parents)
    ids = (
        torch.empty(0, dtype=torch.long, device=p.device)
        if draft is None
        else draft.ids[row, :count]
    )
    q = None if draft is None or draft.q is None else draft.q[row, :count]
    tokens = Tokens(ids=ids.tolist(), parents=parents, q=q)
    path, residual = rule(p, tokens, Uniforms(uniform))
    return path, [*ids[path].tolist(), int(draw(residual, uniform[-1]))]


def _target_logits(
    target: Decoder, cache: Any, texts: list[list[int]], draft: Draft | None
) -> Tensor:
    """Return the target's logits after each text and after each drafted token, [B, T, V]."""
    if draft is None:
        return feed(target, cache, texts)
    last = staged([text[-1:] for text in texts], draft.ids.device)
    ids = torch.cat([last, draft.ids], 1)
    if draft.parents is None:
        return target.forward(ids, cache)
    return target.forward(ids, cache, tree=Tree.from_parents(draft.parents, ids.device))


class _Rows:
    """The texts of a batch, and the rows that are still decoding."""

    def __init__(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> None:
        self.texts = [list(prompt) for prompt in prompts]
        self.starts = [len(prompt) for prompt in prompts]
        self.limits = [len(prompt) + sampling.max_tokens for prompt in prompts]
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        self.live = list(range(len(prompts)))

    def room(self) -> list[int]:
        """Return how many tokens may be drafted for each row. The target adds one token."""
        live = set(self.live)
        return [
            limit - len(self.texts[row]) - 1 if row in live else 0
            for row, limit in enumerate(self.limits)
        ]

    def current(self, draws: Tensor) -> Tensor:
        """Return the draws [B, W] of each row's current position, from draws [B, max_tokens, W]."""
        at = [
            min(len(text) - start, draws.shape[1] - 1)
            for text, start in zip(self.texts, self.starts, strict=True)
        ]
        # indexing by a tensor would copy the indices to the device
        return torch.stack([draws[row, i] for row, i in enumerate(at)])

    def append(
        self, verified: list[tuple[list[int], list[int]]], cache: Any, draft: Draft | None
    ) -> list[tuple[int, int, list[int]]]:
        """Append verified tokens, roll the cache back; return (row, accepted, tokens) of the rows still decoding."""
        emitted = []
        for row in self.live:
            path, tokens = verified[row]
            end = next(
                (i for i, token in enumerate(tokens) if token in self.stop_token_ids), len(tokens)
            )
            tokens = tokens[: end + 1]
            if draft is not None and draft.parents is not None:
                cache.keep(row, len(self.texts[row]), path[: len(tokens)])
            self.texts[row] += tokens
            emitted.append((row, min(len(path), len(tokens)), tokens))
        cache.used = [len(text) - 1 for text in self.texts]
        self.live = [
            row
            for row in self.live
            if len(self.texts[row]) < self.limits[row]
            and self.texts[row][-1] not in self.stop_token_ids
        ]
        return emitted


def _draws(sampling: SamplingParams, numbers: Sequence[int], width: int) -> Tensor:
    """Return uniform draws of each prompt for every position where a step may begin, [B, max_tokens, width].

    Steps never share draws: a rule that rejects because of a later token must not see the same draw twice.
    """
    draws = torch.empty(len(numbers), sampling.max_tokens, width)
    for row, number in zip(draws, numbers, strict=True):
        row.uniform_(generator=torch.Generator().manual_seed(sampling.seed * 1_000_003 + number))
    return draws
