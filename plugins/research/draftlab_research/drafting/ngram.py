"""Drafting with an n-gram model of a corpus, and the log-probabilities that the model gives to a text.

V vocab, K drafted tokens. An n-gram is a context of n - 1 tokens and the token that follows it, its follower.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftlab.acceptance.token_logprobs import Text, TokenLogprobs, counted, token_logprobs
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
            raise ValueError(f"contexts of {order - 1} tokens do not fit into 64 bits with a vocabulary of {vocab} ids")
        self.vocab = vocab
        grams = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), order)
        self.orders: list[Order] = []
        counts = np.ones(len(grams))
        for _ in range(order - 1):
            ngrams, first = _order(_numbers(grams[:, :-1], vocab), grams[:, -1].astype(np.int64), counts)
            self.orders.append(ngrams)
            # each distinct longer n-gram counts once
            grams, counts = (grams[first][:, 1:], np.ones(len(first)))
        unigrams = np.bincount(grams[:, 0].astype(np.int64), minlength=vocab).astype(np.float64) + 1e-3
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

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        rows = [self._row(text, count, sampling, u) for text, u in zip(texts, uniform.cpu(), strict=True)]
        q = None if sampling.temperature == 0 else torch.stack([q for _, q in rows]).to(uniform.device)
        return Draft.chain(torch.tensor([ids for ids, _ in rows], device=uniform.device), q)

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


def score_ngrams(
    model: NgramModel,
    texts: Sequence[Text],
    sampling: SamplingParams,
    advance: Callable[[int], None] = lambda done: None,
) -> list[TokenLogprobs]:
    """Return log-probability and rank of each token of a completion by an n-gram model, as arrays [n] for each text."""
    scored = []
    for prompt, completion in counted(texts, advance):
        whole, parts = np.concatenate([prompt, completion]).tolist(), []
        for at in range(len(prompt), len(whole)):
            p = torch.from_numpy(model.probabilities(whole[max(0, at - len(model.orders)) : at]))
            parts.append(token_logprobs(p.log()[None], torch.tensor(whole[at : at + 1]), sampling))
        fields = ([part.logprobs for part in parts], [part.ranks for part in parts])
        scored.append(TokenLogprobs(*(np.concatenate([np.zeros(0), *each]) for each in fields)))
    return scored


def _order(contexts: np.ndarray, followers: np.ndarray, counts: np.ndarray) -> tuple[Order, np.ndarray]:
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
