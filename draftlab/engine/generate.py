"""Plain and speculative decoding with the same engine, and the time of each step.

B rows (texts of a batch), K drafted tokens per step, T = K + 1 tokens verified, V vocab. Rows advance at their own
pace. Invariant: the cache has all tokens of a text except the last token, which the next pass feeds first.
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
    most_probable,
    verify_rows,
)
from draftlab.model.decoder import Decoder, KVCache, Parents, Tree, feed
from draftlab.model.devices import staged
from draftlab.sampling import SamplingParams

TokenIds = Sequence[list[int]]  # the token ids of each text of a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The result of one target pass, and of the drafting before it, for one text of the batch.

    Seconds are the time of the whole batch divided by the number of unfinished texts. Their sum over all steps is wall
    time.

    Args:
        row: Index of the text in the batch.
        drafted: Number of drafted tokens that the target verified.
        accepted: Number of drafted tokens among `tokens`.
        tokens: Tokens that the text gains: the accepted tokens, then a token of the target. The last step of a text may
            lack this token.
        host_seconds: Time to accept or reject tokens, and to roll back the cache.
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
    """Drafted tokens of each text of a batch.

    Args:
        ids: Token ids, [B, K].
        q: Distributions that the ids were drawn from, [B, K, V]. None: the draft is deterministic, and q is one-hot.
        counts: Number of valid tokens of each text, [B]. A text with 0 has no draft.
        parents: Parent of each drafted token in a token tree. None: the draft is a chain. If parents[i] is 0, the
            parent of drafted token i is the last token of the text. Otherwise it is drafted token parents[i] - 1, which
            comes before token i. A list of tuples has a tree for each text.
        rule: Rule that verifies this draft. A rule that the caller of speculative_decode sets has precedence. A sampled
            token tree needs a rule.
    """

    ids: Tensor
    q: Tensor | None
    counts: list[int]
    parents: Parents | None = None
    rule: Rule | None = None

    @classmethod
    def chain(cls, ids: Tensor, q: Tensor | None) -> "Draft":
        """Return a draft in which all texts have K valid tokens. ids, q: See Draft."""
        return cls(ids=ids, q=q, counts=[ids.shape[1]] * len(ids))

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> "Draft":
        """Return a draft without tokens for each of `rows` texts."""
        return cls.chain(torch.empty(rows, 0, dtype=torch.long, device=device), None)

    def to(self, device: torch.device) -> "Draft":
        """Return the draft with its tensors on a device. Target and drafters may be on different devices."""
        if self.ids.device == device:
            return self
        q = None if self.q is None else self.q.to(device)
        return replace(self, ids=self.ids.to(device), q=q)

    def parents_of(self, row: int) -> Sequence[int]:
        """Return the parents of the drafted tokens of text `row`, see `parents`. For a chain this is a range."""
        if self.parents is None:
            return range(self.ids.shape[1])
        trees = [tree for tree in self.parents if isinstance(tree, tuple)]
        return trees[row] if trees else [parent for parent in self.parents if isinstance(parent, int)]


class Drafter(Protocol):
    """Drafts tokens. A drafter keeps its own state, such as a KV cache, and receives the whole texts at every call."""

    def reset(self, rows: int, capacity: int) -> None:
        """Drop all state, and prepare for `rows` texts of at most `capacity` tokens each. By default, do nothing."""

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        """Draft up to `count` tokens after each text.

        Finished texts stay in the batch, and their drafts are ignored.

        uniform: Draws in [0, 1), [B, count]. A drafter must use no other source of randomness.
        """
        ...

    def attach(self, cache: Any) -> None:
        """Receive the target's KVCache before the target's first pass. By default, do nothing."""

    def prefill(self, texts: TokenIds) -> None:
        """Read each prompt and the first token after it, before the first draft. By default, do nothing."""


@dataclass(unsafe_hash=True)
class Sampler:
    """A function that samples drafted tokens from the logits of a draft.

    vocab: Width of the target's logits; None if the draft's logits have the same width.
    """

    sampling: SamplingParams
    vocab: int | None
    ended = False

    def __call__(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sample tokens [...] from logits [..., V]. Return the tokens and the distributions that they are drawn from.

        At temperature 0, return None instead of distributions.

        uniform: Draws in [0, 1), [...].
        """
        logits, uniform = fit_vocab(logits, self.vocab), uniform.to(logits.device)
        if self.sampling.temperature == 0:
            return most_probable(logits), None
        q = distribution(logits, self.sampling)
        return draw(q, uniform), q


def draw_each(logits: Tensor, uniform: Tensor, sampling: SamplingParams, vocab: int | None) -> Draft:
    """Draft K tokens, each from its own logits, so that no token depends on another drafted token.

    Args:
        logits: Logits of each drafted token, [B, K, V].
        uniform: Draws in [0, 1), [B, K] or wider.
        vocab: Same as in Sampler.
    """
    sampler = Sampler(sampling.unlimited(), vocab)
    return Draft.chain(*sampler(logits, uniform[:, : logits.shape[1]]))


def fit_vocab(logits: Tensor, vocab: int | None) -> Tensor:
    """Return logits [..., V], cut or padded with -inf to the width `vocab`. None leaves the width unchanged."""
    if vocab is None or logits.shape[-1] == vocab:
        return logits
    return F.pad(logits, (0, vocab - logits.shape[-1]), value=-torch.inf)


class ModelDrafter(Drafter):
    """Drafts a chain with a draft model, whose KV cache is rolled back to the emitted tokens before each draft."""

    def __init__(self, model: Decoder, vocab: int | None = None) -> None:
        """Make a drafter. vocab: Same as in Sampler."""
        self.model = model
        self.vocab = vocab
        self.own_vocab = model.vocab
        self.sampler: Callable[[SamplingParams, int | None], Sampler] = Sampler
        self.cache: Any = None

    def reset(self, rows: int, capacity: int) -> None:
        self.cache = None  # frees the memory before a new cache is allocated
        self.cache = self.model.new_cache(rows, capacity)
        # for each text, the tokens that were fed before the tokens in self.drafted
        self.cached: list[list[int]] = [[] for _ in range(rows)]
        self.drafted: Tensor | None = None

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        first = self.drafted is None
        logits = self.last_logits(texts)[:, -1]
        if first:
            check_logits(logits, "the draft")
        sampler = self.sampler(sampling.unlimited(), self.vocab)
        self.drafted, q = self.model.draft(logits, self.cache, uniform, sampler)
        return Draft.chain(self.drafted, q)

    def prefill(self, texts: TokenIds) -> None:
        """Read all tokens of each text except the last token, which propose() reads."""
        self.last_logits([text[:-1] for text in texts])

    def last_logits(self, texts: TokenIds, last: int = 1) -> Tensor:
        """Roll the cache back to the texts, and read their new tokens.

        Return the logits after the last `last` tokens of each text, [B, last, V].
        """
        self.roll_back(texts)
        return feed(self.model, self.cache, texts, self.own_vocab, last)

    def roll_back(self, texts: TokenIds) -> None:
        """Drop the cached tokens that differ from the texts. The caller must then read the texts to their ends."""
        drafted = [[]] * len(texts) if self.drafted is None else self.drafted.tolist()
        for row, text in enumerate(texts):
            cached = self.cached[row] + drafted[row]
            agreed = min(self.cache.used[row], len(text))
            while cached[:agreed] != text[:agreed]:
                agreed -= 1
            self.cache.used[row] = agreed
        self.cached = [list(text) for text in texts]
        self.drafted = None


def decode(
    target: Decoder,
    prompts: TokenIds,
    sampling: SamplingParams,
    clock: StepClock = time.perf_counter,
    numbers: Sequence[int] | None = None,
) -> Iterator[Step]:
    """Decode without drafts: each target pass emits one token per text. Arguments: Same as in speculative_decode."""
    return speculative_decode(target, None, prompts, 0, sampling, clock, numbers)


def speculative_decode(
    target: Decoder,
    drafter: Drafter | None,
    prompts: TokenIds,
    k: int,
    sampling: SamplingParams,
    clock: StepClock = time.perf_counter,
    numbers: Sequence[int] | None = None,
    rule: Rule | None = None,
    draft_sampling: SamplingParams | None = None,
) -> Iterator[Step]:
    """Decode losslessly: draft k tokens, verify them in one target pass, and emit the accepted tokens and one more.

    Each target pass yields a Step for every unfinished text. A finished text waits until all texts are finished. The
    first pass is the prefill, which emits one token per text without a draft. In its Steps, draft_seconds is the time
    of the drafter's prefill.

    Args:
        drafter: None: decode without drafts.
        clock: Clock for the phases of a step, see step_clock_for.
        numbers: A number for each prompt. This number and the seed of `sampling` determine the prompt's random draws.
            Default: the index of the prompt.
        rule: Rule that verifies all drafts. Default: the rule of each draft. A draft without a rule is verified by the
            rejection rule of Leviathan et al. With greedy decoding all rules agree.
        draft_sampling: Sampling parameters of the drafter. Default: the target's.
    """
    rows = _Rows(prompts, sampling)
    capacity = max(rows.limits, default=1) + k
    cache = target.new_cache(len(prompts), capacity)
    if drafter is not None:
        drafter.reset(len(prompts), capacity)
        drafter.attach(cache)
    draws = _draws(sampling, numbers or range(len(prompts)), 2 * k + 1).to(target.device)
    prefilled = False
    nothing = Draft.empty(len(prompts), target.device)
    while rows.live:
        room = rows.room()
        uniform = rows.current(draws)
        count = min(k, max(room)) if prefilled else 0
        if count and target.replays_passes:
            count = k  # then every pass has the same shape; tokens beyond a text's limit are not verified
        start = clock()
        draft = nothing
        if drafter and count:
            draft = drafter.propose(rows.texts, count, draft_sampling or sampling, uniform[:, :count]).to(target.device)
        drafted_at = clock()
        logits = _target_logits(target, cache, rows.texts, draft)
        if not prefilled:
            check_logits(logits, "the target")
        verified_at = clock()
        drafted = [min(pair) for pair in zip(draft.counts, room, strict=True)]
        emitted = rows.append(verify_batch(logits, draft, drafted, sampling, uniform[:, k:], rule), cache, draft)
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
    """Return the tokens that steps emitted for each text, in the order of the texts in the batch."""
    tokens: dict[int, list[int]] = {}
    for step in steps:
        tokens.setdefault(step.row, []).extend(step.tokens)
    return [tokens[row] for row in sorted(tokens)]


def verify_batch(
    logits: Tensor,
    draft: Draft,
    counts: Sequence[int],
    sampling: SamplingParams,
    uniform: Tensor,
    rule: Rule | None = None,
) -> list[tuple[list[int], list[int]]]:
    """Verify the drafts of a batch. Return, for each text, the indices of accepted drafted tokens and the new tokens.

    The new tokens are the accepted tokens and one more token from the target.

    Args:
        logits: Logits of the target after the text's last token and after each drafted token, [B, T, V].
        counts: Number of drafted tokens of each text to verify, [B].
        uniform: Draws in [0, 1), [B, T] or wider. The first are for the drafted tokens, the last is for the token after
            them.
        rule: Same as in speculative_decode.
    """
    parents = [draft.parents_of(row)[:count] for row, count in enumerate(counts)]
    if sampling.temperature == 0:
        best = most_probable(logits)
        width = best.shape[1]
        both = torch.cat([best, draft.ids], 1).tolist()  # the only wait for the device
        return [_verify_greedy(row[:width], row[width:], tree) for row, tree in zip(both, parents, strict=True)]
    p = distribution(logits, sampling)
    rule = rule or draft.rule
    if rule is None:
        return _verify_sampled_chains(p, draft, counts, uniform)
    return [
        _verify_sampled(p[row, : len(tree) + 1], draft, row, tree, uniform[row], rule)
        for row, tree in enumerate(parents)
    ]


def _verify_greedy(best: list[int], ids: list[int], parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Verify the first drafted tokens of one text greedily. Return the accepted tokens' indices, and the new tokens.

    best: The most probable token of the target after the text's last token and after each drafted token, [T].
    """
    node = 0
    path = []
    tokens = [best[0]]
    for i, parent in enumerate(parents):
        if parent == node and ids[i] == tokens[-1]:
            node = i + 1
            path.append(i)
            tokens.append(best[node])
    return path, tokens


def _verify_sampled_chains(
    p: Tensor, draft: Draft, counts: Sequence[int], uniform: Tensor
) -> list[tuple[list[int], list[int]]]:
    """Verify sampled chains by the rejection rule, see verify_batch. p: Probabilities of the target, [B, T, V].

    Raises:
        ValueError: the draft is a token tree.
    """
    if draft.parents is not None:
        raise ValueError("--rule rejection verifies only chains, but this draft is a token tree; use --rule match")
    ids = draft.ids
    q = F.one_hot(ids, p.shape[-1]).to(p) if draft.q is None else draft.q
    width = ids.shape[1]
    accepted, following = verify_rows(p, q, ids, uniform[:, :width], staged(counts, p.device))
    last = draw(following, uniform[:, -1])
    # the only wait for the device
    verified = torch.cat([accepted.unsqueeze(1), last.unsqueeze(1), ids], 1).tolist()
    return [([*range(count)], [*row[:count], token]) for count, token, *row in verified]


def _verify_sampled(
    p: Tensor, draft: Draft, row: int, parents: Sequence[int], uniform: Tensor, rule: Rule
) -> tuple[list[int], list[int]]:
    """Verify the drafted tokens of one text by `rule`. Return the accepted tokens' indices, and the new tokens.

    p: Probabilities of the target, [count + 1, V].
    """
    count = len(parents)
    ids = draft.ids[row, :count]
    q = None if draft.q is None else draft.q[row, :count]
    tokens = Tokens(ids=ids.tolist(), parents=parents, q=q)
    path, residual = rule(p, tokens, Uniforms(uniform))
    return path, [*ids[path].tolist(), int(draw(residual, uniform[-1]))]


def _target_logits(target: Decoder, cache: KVCache, texts: list[list[int]], draft: Draft) -> Tensor:
    """Run the target's pass; return its logits after each text's last token and each drafted token, [B, T, V]."""
    if not draft.ids.shape[1]:
        return feed(target, cache, texts)
    last = staged([text[-1:] for text in texts], draft.ids.device)
    ids = torch.cat([last, draft.ids], 1)
    if draft.parents is None:
        return target.forward(ids, cache)
    return target.forward(ids, cache, tree=Tree.from_parents(draft.parents, ids.device))


class _Rows:
    """The texts of a batch. live: Indices of the unfinished texts."""

    def __init__(self, prompts: TokenIds, sampling: SamplingParams) -> None:
        self.texts = [list(prompt) for prompt in prompts]
        self.starts = [len(prompt) for prompt in prompts]
        self.limits = [len(prompt) + sampling.max_tokens for prompt in prompts]
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        self.live = list(range(len(prompts)))

    def room(self) -> list[int]:
        """Return the number of tokens that may be drafted for each text. One token is left for the target."""
        live = set(self.live)
        return [limit - len(self.texts[row]) - 1 if row in live else 0 for row, limit in enumerate(self.limits)]

    def current(self, draws: Tensor) -> Tensor:
        """Return the W draws of each text's next step, [B, W]. draws: Draws for all lengths, [B, max_tokens, W]."""
        at = [min(len(text) - start, draws.shape[1] - 1) for text, start in zip(self.texts, self.starts, strict=True)]
        # indexing by a tensor would copy the indices to the device
        return torch.stack([draws[row, i] for row, i in enumerate(at)])

    def append(
        self, verified: list[tuple[list[int], list[int]]], cache: KVCache, draft: Draft
    ) -> list[tuple[int, int, list[int]]]:
        """Append new tokens to the texts, and roll the cache back to the texts. Texts end at stop tokens and limits.

        verified: Result of verify_batch.

        Returns: For each text that was unfinished: its index, the number of its accepted tokens, and its new tokens.
        """
        emitted = []
        for row in self.live:
            path, tokens = verified[row]
            end = next((i for i, token in enumerate(tokens) if token in self.stop_token_ids), len(tokens))
            tokens = tokens[: end + 1]
            if draft.parents is not None:
                cache.keep(row, len(self.texts[row]), path[: len(tokens)])
            self.texts[row] += tokens
            emitted.append((row, min(len(path), len(tokens)), tokens))
        cache.used = [len(text) - 1 for text in self.texts]
        self.live = [
            row
            for row in self.live
            if len(self.texts[row]) < self.limits[row] and self.texts[row][-1] not in self.stop_token_ids
        ]
        return emitted


def _draws(sampling: SamplingParams, numbers: Sequence[int], width: int) -> Tensor:
    """Return uniform draws in [0, 1) for each prompt and for each length at which a step may begin.

    Steps never share draws: a rule that rejects because of a later token must not see the same draw twice.

    width: Number of draws of a step. Returns: [B, max_tokens, width].
    """
    draws = torch.empty(len(numbers), sampling.max_tokens, width)
    for row, number in zip(draws, numbers, strict=True):
        row.uniform_(generator=torch.Generator().manual_seed(sampling.seed * 1_000_003 + number))
    return draws
