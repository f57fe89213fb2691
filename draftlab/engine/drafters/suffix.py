"""Suffix decoding: draft the tokens that followed the same suffix earlier in the text or in earlier answers.

K drafted. Oliaro et al. 2024 (arXiv 2411.04975). vLLM's method "suffix" uses the suffix trees of Arctic Inference.
Tests compare the drafts with those of Arctic Inference.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from draftlab.engine.drafters.ngram import TextDrafter

END = -1  # marks the end of each text


@dataclass(frozen=True, slots=True)
class Guess:
    """Drafted tokens.

    score: Expected number of accepted tokens, the sum over tokens of the draft's probability up to there.
    """

    ids: list[int]
    score: float


class Memory:
    """Earlier texts, with an index of their tokens. N tokens, including an END for each text."""

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
    """A drafter that guesses from every suffix of fewer than `depth` tokens, and drafts the best guess.

    A suffix of m tokens drafts at most factor * m tokens. A draft ends when its estimated probability, the share of
    occurrences with the same continuation, falls below min_prob.
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
        """Return the best guess from ids [N]. after: Positions in ids after an occurrence of the text's last token."""
        best = Guess([], 0.0)
        for length in range(1, min(len(text), self.depth)):
            after = after[after >= length]
            after = after[ids[after - length] == text[-length]]
            if not len(after):
                break
            most = min(count, int(length * self.factor + 1e-6), self.depth - length)
            guess = self._follow(ids, after, most)
            if guess.score >= best.score:
                best = guess
        return best

    def _follow(self, ids: np.ndarray, at: np.ndarray, most: int) -> Guess:
        """Return the most frequent continuation from the positions `at`. Ties go to the token seen first."""
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
