"""Drafting without a model: an n-gram model of a corpus, and copying from the text itself.

V vocab, K drafted. An n-gram is a context of n - 1 tokens and the one that follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftlab.engine.generate import Draft
from draftlab.engine.verify import distribution, draw
from draftlab.sampling import SamplingParams

LONGEST_MATCH = 3  # tokens that are looked for in the text (Saxena 2023, prompt lookup decoding)


@dataclass(frozen=True, slots=True)
class Order:
    """The n-grams of one length: contexts as sorted numbers, and of each its followers with what they count."""

    contexts: np.ndarray  # [C] uint64
    offsets: np.ndarray  # [C + 1] into followers
    followers: np.ndarray  # [P]
    counts: np.ndarray  # [P]; of all but the longest n-grams: how many tokens they come behind
    discount: float

    def after(self, context: np.uint64) -> tuple[np.ndarray, np.ndarray] | None:
        """Followers and their counts; None for a context that the corpus does not have."""
        at = int(np.searchsorted(self.contexts, context))
        if at == len(self.contexts) or self.contexts[at] != context:
            return None
        part = slice(self.offsets[at], self.offsets[at + 1])
        return self.followers[part], self.counts[part]


def fits(vocab: int, order: int) -> bool:
    """A context of order - 1 tokens can be numbered in 64 bits."""
    return vocab ** (order - 1) < 1 << 64


class Ngrams:
    """An interpolated Kneser-Ney model (Ney, Essen, Kneser 1994): every token keeps some probability.

    p(w | h) = max(c(h w) - D, 0) / c(h) + D N(h) / c(h) p(w | h'), with h' the context without its first token and N(h)
    its number of followers. Shorter n-grams are counted by what they come behind. D = n1 / (n1 + 2 n2) of each order.
    """

    def __init__(self, ids: np.ndarray, vocab: int, order: int) -> None:
        """ids: the corpus as one stream [N], at least order tokens. Contexts must fit."""
        if not fits(vocab, order):
            raise ValueError(f"contexts of {order - 1} tokens of {vocab} do not fit 64 bits")
        self.vocab = vocab
        grams = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), order)
        self.orders: list[Order] = []
        counts = np.ones(len(grams))
        for _ in range(order - 1):
            found = _order(_numbers(grams[:, :-1], vocab), grams[:, -1].astype(np.int64), counts)
            self.orders.append(found[0])
            grams, counts = grams[found[1]][:, 1:], np.ones(len(found[1]))  # each kind of longer n-gram counts once
        alone = np.bincount(grams[:, 0].astype(np.int64), minlength=vocab).astype(np.float64) + 1e-3
        self.alone = alone / alone.sum()

    def probabilities(self, text: Sequence[int]) -> np.ndarray:
        """Of what follows text, [V]."""
        p = self.alone
        for length, order in enumerate(reversed(self.orders), 1):
            found = order.after(_number(text[-length:], self.vocab)) if len(text) >= length else None
            if found is None:
                break  # a longer context is not in the corpus either
            followers, counts = found
            total = counts.sum()
            p = p * (order.discount * len(followers) / total)
            p[followers] += np.maximum(counts - order.discount, 0) / total
        return p


class NgramDrafter:
    """Drafts from an n-gram model, one token after the other."""

    def __init__(self, model: Ngrams) -> None:
        self.model = model

    def reset(self, rows: int, capacity: int) -> None:
        pass

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        rows = [self._row(text, count, sampling, u) for text, u in zip(texts, uniform.cpu(), strict=True)]
        q = None if sampling.temperature == 0 else torch.stack([q for _, q in rows]).to(uniform.device)
        return Draft(
            ids=torch.tensor([ids for ids, _ in rows], device=uniform.device), q=q, counts=[count] * len(texts)
        )

    def _row(self, text: list[int], count: int, sampling: SamplingParams, uniform: Tensor) -> tuple[list[int], Tensor]:
        context, q = text[-len(self.model.orders) :], []
        for i in range(count):
            p = self.model.probabilities(context)
            if sampling.temperature == 0:
                context.append(int(p.argmax()))
            else:
                q.append(distribution(torch.from_numpy(p).log(), sampling))
                context.append(int(draw(q[-1], uniform[i])))
        return context[len(context) - count :], torch.stack(q) if q else torch.empty(0)


class LookupDrafter:
    """Prompt lookup: copies what came after the last place where the text's last tokens stand, the longest match first.

    What is copied goes on into itself, so that a loop is drafted to any length. No match is no draft.
    """

    def __init__(self, longest: int = LONGEST_MATCH) -> None:
        self.longest = longest

    def reset(self, rows: int, capacity: int) -> None:
        pass

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        copies = [self._copy(text, count) for text in texts]
        width = max(map(len, copies))
        ids = [copy + [0] * (width - len(copy)) for copy in copies]
        ids = torch.tensor(ids, dtype=torch.long, device=uniform.device)
        return Draft(ids=ids, q=None, counts=[len(copy) for copy in copies])

    def _copy(self, text: list[int], count: int) -> list[int]:
        ids = np.array(text)
        behind = np.flatnonzero(ids[:-1] == ids[-1]) + 1  # places behind a match
        if len(behind) == 0:
            return []
        for n in range(2, self.longest + 1):
            longer = behind[behind >= n]
            longer = longer[ids[longer - n] == ids[-n]]
            if len(longer) == 0:
                break
            behind = longer
        start = int(behind[-1])
        return (text[start:] * (count // (len(text) - start) + 1))[:count]


def _order(contexts: np.ndarray, followers: np.ndarray, counts: np.ndarray) -> tuple[Order, np.ndarray]:
    """And of each kind of n-gram one place where it stands."""
    sorted_by = np.lexsort((followers, contexts))
    c, f = contexts[sorted_by], followers[sorted_by]
    first = np.flatnonzero(np.concatenate([[True], (c[1:] != c[:-1]) | (f[1:] != f[:-1])]))  # of each kind
    total = np.add.reduceat(counts[sorted_by], first)
    c, f = c[first], f[first]
    starts = np.flatnonzero(np.concatenate([[True], c[1:] != c[:-1]]))
    once, twice = (total == 1).sum(), (total == 2).sum()
    discount = float(once / (once + 2 * twice)) if once else 0.5
    return Order(c[starts], np.append(starts, len(c)), f, total, discount), sorted_by[first]


def _numbers(contexts: np.ndarray, vocab: int) -> np.ndarray:
    """Each context [n - 1] as one number."""
    number = np.zeros(len(contexts), dtype=np.uint64)
    for column in contexts.T:
        number = number * np.uint64(vocab) + column
    return number


def _number(context: Sequence[int], vocab: int) -> np.uint64:
    number = 0
    for token in context:
        number = number * vocab + token
    return np.uint64(number)
