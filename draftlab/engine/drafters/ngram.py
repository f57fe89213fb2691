"""Drafting without a model: an n-gram model of a corpus, and copying from the text itself.

V vocab, K drafted. An n-gram is a context of n - 1 tokens and the token that follows it.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from draftlab.engine.generate import Draft, Drafter
from draftlab.engine.verify import distribution, draw
from draftlab.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Order:
    """All n-grams of one length: contexts as sorted numbers, and the followers of each context with their counts."""

    contexts: np.ndarray  # [C] uint64
    offsets: np.ndarray  # [C + 1] into followers
    followers: np.ndarray  # [P]
    # [P]; counts of all but the longest n-grams are numbers of distinct tokens before them
    counts: np.ndarray
    discount: float

    def after(self, context: np.uint64) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the followers of a context and their counts, or None for a context that is not in the corpus."""
        at = int(np.searchsorted(self.contexts, context))
        if at == len(self.contexts) or self.contexts[at] != context:
            return None
        part = slice(self.offsets[at], self.offsets[at + 1])
        return self.followers[part], self.counts[part]


def contexts_fit(vocab: int, order: int) -> bool:
    """Return whether contexts of order - 1 tokens can be numbered in 64 bits."""
    return vocab ** (order - 1) < 1 << 64


class NgramModel:
    """An interpolated Kneser-Ney model (Ney, Essen, Kneser 1994): every token has some probability.

    p(w | h) = max(c(h w) - D, 0) / c(h) + D N(h) / c(h) p(w | h'), where h' is the context h without its first token
    and N(h) the number of its distinct followers. c counts the longest n-grams by occurrences, and shorter n-grams by
    distinct tokens before them. Each order has its D = n1 / (n1 + 2 n2), from the n-grams with counts 1 and 2.
    """

    def __init__(self, ids: np.ndarray, vocab: int, order: int) -> None:
        """Count the n-grams of a stream of at least `order` ids [N]. Raises ValueError: contexts do not fit 64 bits."""
        if not contexts_fit(vocab, order):
            raise ValueError(f"contexts of {order - 1} tokens of {vocab} do not fit 64 bits")
        self.vocab = vocab
        grams = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), order)
        self.orders: list[Order] = []
        counts = np.ones(len(grams))
        for _ in range(order - 1):
            ngrams, first = _order(
                _numbers(grams[:, :-1], vocab), grams[:, -1].astype(np.int64), counts
            )
            self.orders.append(ngrams)
            grams, counts = (
                grams[first][:, 1:],
                np.ones(len(first)),
            )  # each distinct longer n-gram counts once
        unigrams = (
            np.bincount(grams[:, 0].astype(np.int64), minlength=vocab).astype(np.float64) + 1e-3
        )
        self.unigrams = unigrams / unigrams.sum()

    def probabilities(self, text: Sequence[int]) -> np.ndarray:
        """Return the distribution of the token after text, [V]."""
        p = self.unigrams
        for length, order in enumerate(reversed(self.orders), 1):
            after = (
                order.after(_number(text[-length:], self.vocab)) if len(text) >= length else None
            )
            if after is None:
                break  # a longer context is not in the corpus either
            followers, counts = after
            total = counts.sum()
            p = p * (order.discount * len(followers) / total)
            p[followers] += np.maximum(counts - order.discount, 0) / total
        return p


class NgramDrafter(Drafter):
    """Drafts from an n-gram model, token by token."""

    def __init__(self, model: NgramModel) -> None:
        self.model = model

    def reset(self, rows: int, capacity: int) -> None:
        pass

    def propose(
        self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor
    ) -> Draft:
        rows = [
            self._row(text, count, sampling, u)
            for text, u in zip(texts, uniform.cpu(), strict=True)
        ]
        q = (
            None
            if sampling.temperature == 0
            else torch.stack([q for _, q in rows]).to(uniform.device)
        )
        return Draft(
            ids=torch.tensor([ids for ids, _ in rows], device=uniform.device),
            q=q,
            counts=[count] * len(texts),
        )

    def _row(
        self, text: list[int], count: int, sampling: SamplingParams, uniform: Tensor
    ) -> tuple[list[int], Tensor]:
        context, q = text[-len(self.model.orders) :], []
        for i in range(count):
            p = self.model.probabilities(context)
            if sampling.temperature == 0:
                context.append(int(p.argmax()))
            else:
                q.append(distribution(torch.from_numpy(p).log(), sampling))
                context.append(int(draw(q[-1], uniform[i])))
        return context[len(context) - count :], torch.stack(q) if q else torch.empty(0)


MatchKind = Literal["once", "agree", "differ"]
MATCH_KINDS: tuple[MatchKind, ...] = ("once", "agree", "differ")


@dataclass(frozen=True, slots=True)
class Match:
    """The longest n-gram at the end of a text that also occurs earlier in the text.

    start: Position after its latest earlier occurrence. kind: "once" if it occurs once before; "agree" if it occurs
    several times, always followed by the same token; else "differ".
    """

    length: int
    start: int
    kind: MatchKind


def latest_match(ids: np.ndarray, longest: int) -> Match | None:
    """Return the match at the end of a text [N], at most `longest` tokens long, or None."""
    ends = np.flatnonzero(ids[:-1] == ids[-1]) + 1  # ends of matches
    if len(ends) == 0:
        return None
    length = 1
    for n in range(2, longest + 1):
        longer = ends[ends >= n]
        longer = longer[ids[longer - n] == ids[-n]]
        if len(longer) == 0:
            break
        ends, length = longer, n
    following = ids[ends]
    kind = "once" if len(ends) == 1 else "agree" if (following == following[0]).all() else "differ"
    return Match(length, int(ends[-1]), kind)


class TextDrafter(Drafter):
    """A deterministic drafter that drafts from each text alone, perhaps fewer tokens than asked for."""

    @abstractmethod
    def draft(self, text: list[int], count: int) -> list[int]:
        """Return at most count tokens to follow the text."""

    def reset(self, rows: int, capacity: int) -> None:
        pass

    def propose(
        self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor
    ) -> Draft:
        drafts = [self.draft(text, count) for text in texts]
        width = max(map(len, drafts))
        ids = [draft + [0] * (width - len(draft)) for draft in drafts]
        ids = torch.tensor(ids, dtype=torch.long, device=uniform.device)
        return Draft(ids=ids, q=None, counts=[len(draft) for draft in drafts])


class PromptLookupDrafter(TextDrafter):
    """Prompt lookup: copies the tokens after the most recent match of the text's last n-gram, longest n-gram first.

    The copy continues into itself, so a loop is drafted to any length. There is no draft without a match, or if the
    match has fewer tokens than min_match has for its kind (MATCH_KINDS).
    """

    def __init__(self, longest: int, min_match: Sequence[int] = (1, 1, 1)) -> None:
        self.longest, self.min_match = longest, dict(zip(MATCH_KINDS, min_match, strict=True))

    def draft(self, text: list[int], count: int) -> list[int]:
        match = latest_match(np.array(text), self.longest)
        if match is None or match.length < self.min_match[match.kind]:
            return []
        return copy_from(text, match.start, count)


def copy_from(text: list[int], start: int, count: int) -> list[int]:
    """Return the `count` tokens from position `start` on; past the end of the text, the copy continues into itself."""
    return (text[start:] * (count // (len(text) - start) + 1))[:count]


def _order(
    contexts: np.ndarray, followers: np.ndarray, counts: np.ndarray
) -> tuple[Order, np.ndarray]:
    """Return the n-grams of one length, and the index of the first occurrence of each distinct n-gram."""
    sorted_by = np.lexsort((followers, contexts))
    c, f = contexts[sorted_by], followers[sorted_by]
    # start of each distinct n-gram
    first = np.flatnonzero(np.concatenate([[True], (c[1:] != c[:-1]) | (f[1:] != f[:-1])]))
    total = np.add.reduceat(counts[sorted_by], first)
    c, f = c[first], f[first]
    starts = np.flatnonzero(np.concatenate([[True], c[1:] != c[:-1]]))
    once, twice = (total == 1).sum(), (total == 2).sum()
    discount = float(once / (once + 2 * twice)) if once else 0.5
    return Order(c[starts], np.append(starts, len(c)), f, total, discount), sorted_by[first]


def _numbers(contexts: np.ndarray, vocab: int) -> np.ndarray:
    """Return each context [n - 1] as one number."""
    number = np.zeros(len(contexts), dtype=np.uint64)
    for column in contexts.T:
        number = number * np.uint64(vocab) + column
    return number


def _number(context: Sequence[int], vocab: int) -> np.uint64:
    number = 0
    for token in context:
        number = number * vocab + token
    return np.uint64(number)
