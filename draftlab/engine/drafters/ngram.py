"""Drafting without a model: an n-gram model of a corpus, and copying from the text itself.

V vocab, K drafted tokens. An n-gram is a context of n - 1 tokens and the token that follows it, its follower.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from draftlab.engine.generate import Draft, Drafter, TokenIds
from draftlab.engine.verify import distribution, draw
from draftlab.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Order:
    """All n-grams of one length. C contexts, P distinct n-grams.

    Args:
        contexts: Each context as one number, uint64 [C], ascending.
        offsets: Start of the followers of each context in `followers`, and the end of the last context's, [C + 1].
        followers: Token ids that follow the contexts, [P].
        counts: Count of each n-gram, [P]. For the longest n-grams this is the number of occurrences. For shorter
            n-grams it is the number of distinct tokens that occur before the n-gram.
        discount: The discount D of Kneser-Ney smoothing.
    """

    contexts: np.ndarray
    offsets: np.ndarray
    followers: np.ndarray
    counts: np.ndarray
    discount: float

    def after(self, context: np.uint64) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the followers of a context, and their counts, or None if the context is not in the corpus."""
        at = int(np.searchsorted(self.contexts, context))
        if at == len(self.contexts) or self.contexts[at] != context:
            return None
        part = slice(self.offsets[at], self.offsets[at + 1])
        return self.followers[part], self.counts[part]


def contexts_fit(vocab: int, order: int) -> bool:
    """Return whether every context of order - 1 tokens can be written as one number of 64 bits."""
    return vocab ** (order - 1) < 1 << 64


class NgramModel:
    """An interpolated Kneser-Ney model (Ney, Essen, Kneser 1994), which gives every token some probability.

    p(w | h) = max(c(h w) - D, 0) / c(h) + D N(h) / c(h) p(w | h'). Here h' is the context h without its first token,
    and N(h) is the number of distinct followers of h. For the longest n-grams, c counts their occurrences; for shorter
    n-grams, c counts the distinct tokens before them. Each order has its own D = n1 / (n1 + 2 n2), where n1 and n2 are
    the numbers of n-grams with the counts 1 and 2.
    """

    def __init__(self, ids: np.ndarray, vocab: int, order: int) -> None:
        """Count the n-grams of a corpus, ids [N] with N >= order. Raises ValueError: contexts_fit() is False."""
        if not contexts_fit(vocab, order):
            raise ValueError(
                f"contexts of {order - 1} tokens do not fit into 64 bits with a vocabulary of {vocab} ids"
            )
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
        """Return the distribution of the token after a text, [V]."""
        p = self.unigrams
        for length, order in zip(range(1, len(text) + 1), reversed(self.orders), strict=False):
            after = order.after(_number(text[-length:], self.vocab))
            if after is None:
                break  # then no longer context is in the corpus
            followers, counts = after
            total = counts.sum()
            p = p * (order.discount * len(followers) / total)
            p[followers] += np.maximum(counts - order.discount, 0) / total
        return p


class NgramDrafter(Drafter):
    """Drafts a chain with an n-gram model, one token after the other."""

    def __init__(self, model: NgramModel) -> None:
        self.model = model

    def propose(
        self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor
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
        return Draft.chain(torch.tensor([ids for ids, _ in rows], device=uniform.device), q)

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

    Args:
        length: Number of tokens of the n-gram.
        start: Position after the latest earlier occurrence.
        kind: "once" for one earlier occurrence; "agree" for several that are all followed by the same token; "differ"
            for several that are followed by different tokens.
    """

    length: int
    start: int
    kind: MatchKind


def suffix_matches(
    ids: np.ndarray, after: np.ndarray, text: np.ndarray, longest: int
) -> Iterator[np.ndarray]:
    """Yield the positions in ids [N] after the occurrences of a text's last 1, 2, ... tokens, while there are any.

    Args:
        after: Positions after the occurrences of the last token.
        longest: Largest number of tokens of the text that are looked for.
    """
    for length in range(1, longest + 1):
        after = after[after >= length]
        after = after[ids[after - length] == text[-length]]
        if not len(after):
            return
        yield after


def own_matches(ids: np.ndarray, longest: int) -> list[np.ndarray]:
    """Return the positions in a text, ids [N], after the earlier occurrences of its last 1, 2, ... tokens."""
    # positions after earlier occurrences of the last token
    after = np.flatnonzero(ids[:-1] == ids[-1]) + 1
    return list(suffix_matches(ids, after, ids, longest))


def latest_match(ids: np.ndarray, longest: int) -> Match | None:
    """Find the longest n-gram that ends a text and also occurs earlier in it, at most `longest` tokens long.

    Return None if there is none. ids: The text, [N].
    """
    matches = own_matches(ids, longest)
    if not matches:
        return None
    ends = matches[-1]
    following = ids[ends]
    kind = "once" if len(ends) == 1 else "agree" if (following == following[0]).all() else "differ"
    return Match(len(matches), int(ends[-1]), kind)


class TextDrafter(Drafter):
    """Base class of deterministic drafters that read only the tokens of each text. Drafts may be short or empty."""

    @abstractmethod
    def draft(self, text: list[int], count: int) -> list[int]:
        """Return at most `count` tokens to follow a text."""

    def propose(
        self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor
    ) -> Draft:
        drafts = [self.draft(text, count) for text in texts]
        width = max(map(len, drafts))
        ids = [draft + [0] * (width - len(draft)) for draft in drafts]
        ids = torch.tensor(ids, dtype=torch.long, device=uniform.device)
        return Draft(ids=ids, q=None, counts=[len(draft) for draft in drafts])


class PromptLookupDrafter(TextDrafter):
    """Prompt lookup as in vLLM and transformers (Saxena 2023).

    It copies the tokens after the earliest occurrence of the longest n-gram that ends the text and also occurs earlier
    in it. The draft ends where the text ends.

    longest: Largest length of the n-gram, in tokens.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def draft(self, text: list[int], count: int) -> list[int]:
        matches = own_matches(np.array(text), self.longest)
        return text[matches[-1][0] :][:count] if matches else []


class NgramGpuDrafter(TextDrafter):
    """The n-gram speculator of vLLM on GPUs (v1/worker/gpu/spec_decode/ngram/speculator.py in vLLM 0.32).

    It copies the tokens after the latest match, see Match. Where the text ends, and if there is no match, it drafts the
    text's last token.

    longest: Largest length of a match, in tokens.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def draft(self, text: list[int], count: int) -> list[int]:
        match = latest_match(np.array(text), self.longest)
        copied = [] if match is None else text[match.start :][:count]
        return copied + text[-1:] * (count - len(copied))


class NgramSimpleDrafter(TextDrafter):
    """llama.cpp's ngram-simple: copies the tokens after the latest occurrence of the last n tokens, if there is one.

    The occurrence must not begin at the first token of the text. The text's last token is neither part of the
    occurrence nor copied. There is no draft if fewer than n tokens can be copied, or if the text has at most n + K + 2
    tokens (common/ngram-map.cpp in llama-cpp-python 0.3.36).

    size: Number of tokens to look for, n. A smaller K is used in its place, because no draft would be long enough.
    """

    def __init__(self, size: int) -> None:
        self.size, self.most = size, 0

    def reset(self, rows: int, capacity: int) -> None:
        self.most = 0

    def propose(
        self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor
    ) -> Draft:
        self.most = max(self.most, count)  # K: only near the end of a text, `count` is smaller
        return super().propose(texts, count, sampling, uniform)

    def draft(self, text: list[int], count: int) -> list[int]:
        most = max(self.most, count)
        n, known = min(self.size, most), np.array(text[:-1])
        if len(known) <= n + most + 1:
            return []
        # the occurrences begin at 1 or later, and end before the last token but one
        windows = np.lib.stride_tricks.sliding_window_view(known[1:-1], n)
        found = np.flatnonzero((windows == text[-n:]).all(1))
        if not len(found):
            return []
        start = int(found[-1]) + 1 + n
        copied = text[start:-1][:most]
        return copied[:count] if len(copied) >= n else []


class LatestLookupDrafter(TextDrafter):
    """Prompt lookup that copies the tokens after the latest match, see Match.

    A copy that reaches the end of the text goes on with the tokens that it copied, so a loop is drafted to any length.

    Args:
        longest: Largest length of a match, in tokens.
        min_match: Smallest length of a match of each kind, in the order of MATCH_KINDS. Shorter matches are not used.
    """

    def __init__(self, longest: int, min_match: Sequence[int] = (1, 1, 1)) -> None:
        self.longest, self.min_match = longest, dict(zip(MATCH_KINDS, min_match, strict=True))

    def draft(self, text: list[int], count: int) -> list[int]:
        match = latest_match(np.array(text), self.longest)
        if match is None or match.length < self.min_match[match.kind]:
            return []
        return copy_from(text, match.start, count)


def copy_from(text: list[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from position `start` on. Past the end of the text, the copied tokens are copied again."""
    return (text[start:] * (count // (len(text) - start) + 1))[:count]


def _order(
    contexts: np.ndarray, followers: np.ndarray, counts: np.ndarray
) -> tuple[Order, np.ndarray]:
    """Return the n-grams of one length as an Order, and the index of the first occurrence of each distinct n-gram.

    Args:
        contexts: The context of each n-gram as one number, see _numbers, [N].
        followers: Last token of each n-gram, [N].
        counts: Weight of each n-gram, [N]. The count of a distinct n-gram is the sum of its weights.
    """
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
    """Return each context of n - 1 token ids as one number. The contexts are [N, n - 1], and the result is [N]."""
    number = np.zeros(len(contexts), dtype=np.uint64)
    for column in contexts.T:
        number = number * np.uint64(vocab) + column
    return number


def _number(context: Sequence[int], vocab: int) -> np.uint64:
    number = 0
    for token in context:
        number = number * vocab + token
    return np.uint64(number)
