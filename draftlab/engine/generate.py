"""Plain and speculative generation with the same engine, and what each step cost.

B rows, K drafted tokens per step, T = K + 1 tokens judged, V vocab. Rows advance at their own pace. Invariant of every
cache: of each row it holds the tokens emitted so far but the last one, which is fed first in the next pass.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.rejection_rules import Rule, Tokens, Uniforms, recursive
from draftlab.engine.verify import Warp, draw, verify
from draftlab.model.cuda_graphs import CudaGraphLlama, draft_chain
from draftlab.model.decoder import Decoder, feed, model_vocab_size
from draftlab.model.llama import Tree

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Warp):
    """How target and draft are sampled alike, and for how long. seed makes it repeatable. eos_ids: any ends a text."""

    max_new_tokens: int = 128
    seed: int = 0
    eos_ids: tuple[int, ...] = ()

    def warp(self) -> Warp:
        """How, without how long."""
        return Warp(**{f.name: getattr(self, f.name) for f in fields(Warp)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One row's part of a target pass and the drafting before it.

    accepted: drafted tokens among tokens, which are fewer than accepted + 1 only at the end. Seconds are the pass's,
    divided by the rows that were still decoding: their sums over rows are the time that passed.
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
    """What a drafter proposes.

    ids: [B, K]. q: the distributions they were drawn from, [B, K, V]; None: each was certain, its q one-hot.
    counts: how many of each row's tokens count, [B]; 0 is no draft. parents: None is a chain; in a token tree, of each
    token the number of the one before it, counted from 1, or 0 for the text's last token, a parent before its children.
    """

    ids: Tensor
    q: Tensor | None
    counts: list[int]
    parents: tuple[int, ...] | None = None


class Drafter(Protocol):
    """Proposes tokens. A drafter keeps its own state; it is told the emitted tokens each time it is asked."""

    def reset(self, rows: int, capacity: int) -> None:
        """Forget everything; there will be so many texts of at most capacity tokens."""
        ...

    def propose(self, texts: Sequence[list[int]], count: int, sampling: Sampling, uniform: Tensor) -> Draft:
        """Up to count tokens to follow each text. uniform: draws in [0, 1), [B, count]; the only randomness to use.

        Texts that have ended are still there; what is drafted for them is not looked at.
        """
        ...


@runtime_checkable
class Watcher(Protocol):
    """A drafter that reads what the target thinks."""

    def watch(self, cache: Any) -> None:
        """The cache that the target's passes will fill, before the first of them."""
        ...


@dataclass(frozen=True, slots=True)
class Sampler:
    """How a draft model's logits become tokens. vocab: the target's, where the draft's head is padded to another."""

    warp: Warp
    vocab: int | None

    def __call__(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of logits [B, V], the tokens [B] and, if they are sampled, what they were drawn from, [B, target's V]."""
        logits = fit(logits, self.vocab)
        if self.warp.temperature == 0:
            return logits.argmax(-1), None
        q = self.warp(logits)
        return draw(q, uniform), q


def fit(logits: Tensor, vocab: int | None) -> Tensor:
    """Logits [..., V] over the target's ids: cut or padded with what is never drawn."""
    if vocab is None or logits.shape[-1] == vocab:
        return logits
    return F.pad(logits, (0, vocab - logits.shape[-1]), value=-torch.inf)


class ModelDrafter:
    """A draft model with a cache of its own, rolled back to what was emitted.

    vocab: the target's, where the draft's head is padded to another size.
    """

    def __init__(self, model: Decoder, vocab: int | None = None) -> None:
        self.model, self.vocab = model, vocab
        self.known = model_vocab_size(model)
        self.cache: Any = None

    def reset(self, rows: int, capacity: int) -> None:
        self.cache = None  # its memory may serve the next one
        self.cache = self.model.new_cache(rows, capacity)
        self.held: list[list[int]] = [[] for _ in range(rows)]  # what was fed, and self.drafted behind it
        self.drafted: Tensor | None = None

    def propose(self, texts: Sequence[list[int]], count: int, sampling: Sampling, uniform: Tensor) -> Draft:
        logits, choose = self.behind(texts)[:, -1], Sampler(sampling.warp(), self.vocab)
        if isinstance(self.model, CudaGraphLlama):
            self.drafted, q = self.model.draft_chain(logits, self.cache, uniform, choose)
        else:
            self.drafted, q = draft_chain(logits, uniform, choose, self.following)
        return Draft(ids=self.drafted, q=q, counts=[count] * len(texts))

    def following(self, token: Tensor) -> Tensor:
        """Logits behind one more token of each row, [B] -> [B, V]."""
        return self.model.forward(token.unsqueeze(1), self.cache, last=1)[:, -1]

    def behind(self, texts: Sequence[list[int]], last: int = 1) -> Tensor:
        """Logits behind the last tokens of each text, [B, last, V]; of what was drafted only what is in it stays."""
        drafted = [[]] * len(texts) if self.drafted is None else self.drafted.tolist()
        for row, text in enumerate(texts):
            held = self.held[row] + drafted[row]
            agreed = min(self.cache.used[row], len(text))
            while held[:agreed] != text[:agreed]:
                agreed -= 1
            self.cache.used[row] = agreed
        self.held, self.drafted = [list(text) for text in texts], None
        return feed(self.model, self.cache, texts, self.known, last)


def clock_for(device: torch.device) -> Clock:
    """Seconds, read after all work queued on device is done."""
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read


def plain(
    target: Decoder,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    clock: Clock = time.perf_counter,
    numbers: Sequence[int] | None = None,
) -> Iterator[Step]:
    """One token per row and target pass; otherwise as ``speculative``."""
    return speculative(target, None, prompts, 0, sampling, clock, numbers)


def speculative(
    target: Decoder,
    drafter: Drafter | None,
    prompts: Sequence[list[int]],
    k: int,
    sampling: Sampling,
    clock: Clock = time.perf_counter,
    numbers: Sequence[int] | None = None,
    rule: Rule | None = None,
) -> Iterator[Step]:
    """Draft k tokens, verify them in one target pass, emit what stands and one more; lossless.

    The first pass is the prefill: it emits one token of each row and drafts nothing, as in engines with a separate
    prefill. After each pass come the steps of the rows that took part; a row that has ended idles until all have.
    numbers: of each prompt; its random draws depend on the seed, its number and its own text, not on other rows.
    rule: None is Leviathan's, or of a token tree the recursive one. Greedily all rules are one.
    """
    rows = _Rows(prompts, sampling)
    capacity = max(rows.limits, default=1) + k
    cache = target.new_cache(len(prompts), capacity)
    if drafter is not None:
        drafter.reset(len(prompts), capacity)
    if isinstance(drafter, Watcher):
        drafter.watch(cache)
    draws = _draws(sampling, numbers or range(len(prompts)), 2 * k + 1).to(target.device)
    prefilled = False
    while rows.live:
        room, uniform = rows.room(), rows.of(draws)
        count = min(k, max(room)) if prefilled else 0
        if count and isinstance(target, CudaGraphLlama):
            count = k  # of one shape to the end: what lies beyond a text's limit does not count
        began = clock()
        draft = drafter.propose(rows.texts, count, sampling, uniform[:, :count]) if drafter and count else None
        proposed = clock()
        logits = _pass(target, cache, rows.texts, draft)
        verified = clock()
        drafted = [0] * len(room) if draft is None else [min(pair) for pair in zip(draft.counts, room, strict=True)]
        emitted = rows.take(judge(logits, draft, drafted, sampling, uniform[:, k:], rule), cache, draft)
        ended = clock()
        for row, accepted, tokens in emitted:
            yield Step(
                row=row,
                drafted=drafted[row],
                accepted=accepted,
                tokens=tokens,
                draft_seconds=(proposed - began) / len(emitted),
                verify_seconds=(verified - proposed) / len(emitted),
                host_seconds=(ended - verified) / len(emitted),
            )
        prefilled = True


def written(steps: Iterable[Step]) -> list[list[int]]:
    """The tokens of each row that took part, in the order of rows."""
    found: dict[int, list[int]] = {}
    for step in steps:
        found.setdefault(step.row, []).extend(step.tokens)
    return [found[row] for row in sorted(found)]


def judge(
    logits: Tensor,
    draft: Draft | None,
    counts: Sequence[int],
    sampling: Sampling,
    uniform: Tensor,
    rule: Rule | None = None,
) -> list[tuple[list[int], list[int]]]:
    """Of each row: which drafted tokens stand, and the tokens to emit, theirs and one more.

    Args:
        logits: the target's, behind the text's last token and each drafted one, [B, T, V].
        counts: how many of each row's drafted tokens are looked at, [B].
        uniform: draws in [0, 1): one for each drafted token, then one for the last token, [B, T].
        rule: as in speculative.
    """
    parents = range(logits.shape[1] - 1) if draft is None or draft.parents is None else draft.parents
    if sampling.temperature == 0:
        best = logits.argmax(-1)
        both = best if draft is None else torch.cat([best, draft.ids], 1)
        width = best.shape[1]
        return [
            _follow(row[:width], row[width:], parents, count)
            for row, count in zip(both.tolist(), counts, strict=True)  # the one wait for the device in a step
        ]
    p = sampling(logits)
    found = []
    for row, count in enumerate(counts):
        told = None if draft is None or draft.q is None else draft.q[row, :count]
        ids = torch.empty(0, dtype=torch.long, device=p.device) if draft is None else draft.ids[row, :count]
        if rule is None and isinstance(parents, range):
            q = F.one_hot(ids, p.shape[-1]).to(p) if told is None else told
            accepted, rest = verify(p[row, : count + 1], q, ids, uniform[row, :count])
            path = list(range(accepted))
        else:
            tokens = Tokens(ids=ids.tolist(), parents=parents[:count], q=told)
            path, rest = (rule or recursive)(p[row, : count + 1], tokens, Uniforms(uniform[row]))
        found.append((path, [*ids[path].tolist(), int(draw(rest, uniform[row, -1]))]))
    return found


def _follow(best: list[int], ids: list[int], parents: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """The greedy rule: the path of drafted tokens that are what the target says, and the token that it says behind."""
    at, path, tokens = 0, [], [best[0]]
    for i in range(count):
        if parents[i] == at and ids[i] == tokens[-1]:
            at = i + 1
            path.append(i)
            tokens.append(best[at])
    return path, tokens


def _pass(target: Decoder, cache: Any, texts: list[list[int]], draft: Draft | None) -> Tensor:
    """The target's logits behind each text, and behind each drafted token, [B, T, V]."""
    if draft is None:
        return feed(target, cache, texts)
    last = torch.tensor([text[-1:] for text in texts], device=draft.ids.device)
    ids = torch.cat([last, draft.ids], 1)
    if draft.parents is None:
        return target.forward(ids, cache)
    return target.forward(ids, cache, tree=Tree.from_parents(draft.parents, ids.device))


class _Rows:
    """The texts as they grow, and which of them still do."""

    def __init__(self, prompts: Sequence[list[int]], sampling: Sampling) -> None:
        self.texts = [list(prompt) for prompt in prompts]
        self.starts = [len(prompt) for prompt in prompts]
        self.limits = [len(prompt) + sampling.max_new_tokens for prompt in prompts]
        self.eos_ids = frozenset(sampling.eos_ids)
        self.live = list(range(len(prompts)))

    def room(self) -> list[int]:
        """Most that can be drafted for each; the target adds one itself."""
        live = set(self.live)
        return [limit - len(self.texts[row]) - 1 if row in live else 0 for row, limit in enumerate(self.limits)]

    def of(self, draws: Tensor) -> Tensor:
        """Of draws [B, max_new_tokens, W] those of the place that each text has come to, [B, W]."""
        at = [min(len(text) - start, draws.shape[1] - 1) for text, start in zip(self.texts, self.starts, strict=True)]
        return draws[torch.arange(len(at)), at]

    def take(
        self, judged: list[tuple[list[int], list[int]]], cache: Any, draft: Draft | None
    ) -> list[tuple[int, int, list[int]]]:
        """Add what stands to the texts and roll the cache back to it: row, accepted and tokens of each live one."""
        took = []
        for row in self.live:
            path, tokens = judged[row]
            end = next((i for i, token in enumerate(tokens) if token in self.eos_ids), len(tokens))
            tokens = tokens[: end + 1]
            if draft is not None and draft.parents is not None:
                cache.keep(row, len(self.texts[row]), path[: len(tokens)])
            self.texts[row] += tokens
            took.append((row, min(len(path), len(tokens)), tokens))
        cache.used = [len(text) - 1 for text in self.texts]
        self.live = [
            row
            for row in self.live
            if len(self.texts[row]) < self.limits[row] and self.texts[row][-1] not in self.eos_ids
        ]
        return took


def _draws(sampling: Sampling, numbers: Sequence[int], width: int) -> Tensor:
    """Of each prompt, draws of its own for each token at which a step may begin, [B, max_new_tokens, width].

    A step never looks at another's: a rule that rejects for what stands behind a token may not see the same draw again.
    """
    found = torch.empty(len(numbers), sampling.max_new_tokens, width)
    for row, number in zip(found, numbers, strict=True):
        row.uniform_(generator=torch.Generator().manual_seed(sampling.seed * 1_000_003 + number))
    return found
