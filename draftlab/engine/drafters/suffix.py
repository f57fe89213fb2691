"""Suffix decoding: continue the text as its own repetitions and earlier answers continued.

K drafted. Oliaro et al. 2024 (arXiv 2411.04975). vLLM's method "suffix" takes Arctic Inference's trees; tests compare
the drafts with theirs.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from draftlab.engine.drafters.ngram import TextDrafter

END = -1  # stands after each text of a memory


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may follow. score: sum of the share of occurrences that went on so, over the tokens."""

    ids: list[int]
    score: float


class Memory:
    """Texts whose continuations are known: all of them by their tokens. N tokens, each text's END included."""

    def __init__(self, texts: Iterable[Sequence[int] | np.ndarray]) -> None:
        parts = [np.append(np.asarray(text, dtype=np.int64), END) for text in texts]
        self.ids = np.concatenate(parts) if parts else np.array([END])  # [N]
        self._order = np.argsort(self.ids, kind="stable")
        self._sorted = self.ids[self._order]

    def after(self, token: int) -> np.ndarray:
        """Return the positions that follow an occurrence of a token, in order."""
        first, last = np.searchsorted(self._sorted, [token, token + 1])
        return self._order[first:last] + 1


class SuffixDrafter(TextDrafter):
    """Draft the continuation with the highest score, of all suffixes of the text of at most depth tokens.

    A suffix of m tokens drafts at most factor * m tokens, as long as min_prob of its occurrences went on so.
    """

    def __init__(self, memory: Memory | None, depth: int, factor: float, min_prob: float) -> None:
        self.memory, self.depth, self.factor, self.min_prob = memory, depth, factor, min_prob

    def draft(self, text: list[int], count: int) -> list[int]:
        ids = np.array(text)
        ended = np.append(ids, END)  # the text's own end is an occurrence that nothing follows
        own = self._best(ended, np.flatnonzero(ids == ids[-1]) + 1, ids, count)
        if self.memory is None:
            return own.ids
        earlier = self._best(self.memory.ids, self.memory.after(text[-1]), ids, count)
        return max(own, earlier, key=lambda guess: guess.score).ids

    def _best(self, ids: np.ndarray, after: np.ndarray, text: np.ndarray, count: int) -> Guess:
        """Return the best guess from ids [N]. after: Positions that follow the text's last token in ids."""
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
        """Return the tokens that follow most often from the positions at, of equals the one seen first."""
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
