"""Suffix decoding: draft the tokens that followed the same suffix earlier in the text or in earlier answers.

Oliaro et al. 2024 (arXiv 2411.04975). vLLM's method "suffix" uses the suffix trees of Arctic Inference, and tests
compare the drafts here with those of Arctic Inference.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from draftlab.engine.drafters.ngram import TextDrafter, suffix_matches

END = -1  # marks the end of each text


@dataclass(frozen=True, slots=True)
class Guess:
    """A possible draft.

    score: Expected number of accepted tokens: for each token, the estimated probability that the draft is right up to
    this token, summed over the tokens.
    """

    ids: list[int]
    score: float


class Memory:
    """Earlier texts, as N tokens with an END after each text, and an index from each token to its occurrences."""

    def __init__(self, texts: Iterable[Sequence[int] | np.ndarray]) -> None:
        parts = [np.append(np.asarray(text, dtype=np.int64), END) for text in texts]
        self.ids = np.concatenate(parts) if parts else np.array([END])  # [N]
        self._order = np.argsort(self.ids, kind="stable")
        self._sorted = self.ids[self._order]

    def after(self, token: int) -> np.ndarray:
        """Return the positions after each occurrence of a token, ascending."""
        first, last = np.searchsorted(self._sorted, [token, token + 1])
        return self._order[first:last] + 1


class SuffixDrafter(TextDrafter):
    """Drafts the most frequent continuation of a suffix of the text. The suffix with the best Guess is used.

    The estimated probability of a continuation is the fraction of the suffix's occurrences that continue in this way.

    Args:
        memory: Earlier texts to copy from. None: copy only from the text itself.
        depth: Largest number of tokens of suffix and draft together.
        factor: A suffix of m tokens gives a draft of at most factor * m tokens.
        min_prob: A draft ends before its estimated probability falls below this.
    """

    def __init__(self, memory: Memory | None, depth: int, factor: float, min_prob: float) -> None:
        self.memory, self.depth, self.factor, self.min_prob = memory, depth, factor, min_prob

    def draft(self, text: list[int], count: int) -> list[int]:
        ids = np.array(text)
        ended = np.append(ids, END)  # the end of the text is an occurrence without a next token
        own = self._best(ended, np.flatnonzero(ids == ids[-1]) + 1, ids, count)
        if self.memory is None:
            return own.ids
        earlier = self._best(self.memory.ids, self.memory.after(text[-1]), ids, count)
        return max(own, earlier, key=lambda guess: guess.score).ids

    def _best(self, ids: np.ndarray, after: np.ndarray, text: np.ndarray, count: int) -> Guess:
        """Return the best Guess for a text by copying from ids [N].

        after: Positions in ids after the occurrences of the text's last token.
        """
        best = Guess([], 0.0)
        longest = min(len(text), self.depth) - 1
        for length, positions in enumerate(suffix_matches(ids, after, text, longest), 1):
            most = min(count, int(length * self.factor + 1e-6), self.depth - length)
            guess = self._follow(ids, positions, most)
            if guess.score >= best.score:
                best = guess
        return best

    def _follow(self, ids: np.ndarray, at: np.ndarray, most: int) -> Guess:
        """Return a Guess of at most `most` tokens, which takes the most frequent next token in ids [N] at each step.

        Of equally frequent tokens, the token that occurs first is taken. at: Positions in ids where continuations
        begin.
        """
        drafted: list[int] = []
        score, prob = 0.0, 1.0
        while len(drafted) < most:
            following = ids[at]
            counts = Counter(following[following != END].tolist())
            if not counts:
                break
            token = max(counts, key=counts.__getitem__)
            prob *= counts[token] / len(at)
            if prob < self.min_prob:
                break
            drafted.append(token)
            score += prob
            at = at[following == token] + 1
        return Guess(drafted, score)
