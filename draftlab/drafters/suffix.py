"""The drafter suffix: drafts the tokens that followed the same suffix earlier in the text or in earlier answers.

Suffix decoding, Oliaro et al. 2024 (arXiv 2411.04975). vLLM's method "suffix" uses the suffix trees of Arctic
Inference, and tests compare the drafts here with those of Arctic Inference. N tokens.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field

from draftlab.acceptance.token_logprobs import TokenLogprobs
from draftlab.config.outputs import check_store
from draftlab.drafters.base import DrafterSpec, Input, RunFacts, drafter
from draftlab.drafters.context import DrafterContext, DrafterRun, ReplayContext
from draftlab.drafters.lookup import TextDrafter, copies_by_k, suffix_matches
from draftlab.target_outputs.store import check_tokenizer, read_store

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
        self.memory = memory
        self.depth = depth
        self.factor = factor
        self.min_prob = min_prob

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
        score = 0.0
        prob = 1.0
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


class OutputsSpec(DrafterSpec):
    """Base class of drafters that can learn from text of the target.

    outputs: Directory of stored target outputs. Default: the drafter does not learn from the target.
    """

    outputs: str = ""

    def inputs(self) -> list[Input]:
        stored = [Input(self.outputs, lambda name, weights: check_store(Path(name)))] if self.outputs else []
        return [*super().inputs(), *stored]

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if self.outputs:
            check_tokenizer(Path(self.outputs), run.target)


@drafter("suffix", served_by=("vllm",))
class SuffixSpec(OutputsSpec):
    """Drafts with suffix decoding.

    outputs: Directory of stored outputs of the target, from which the drafter also copies. Default: it copies only from
    the text itself.

    The other options are vLLM's suffix_decoding_ options without this prefix, and have vLLM's defaults.
    """

    by_age = True
    max_tree_depth: int = Field(24, ge=2)
    max_spec_factor: float = Field(1.0, gt=0)
    min_token_prob: float = Field(0.1, ge=0, le=1)

    def speculative_config(self, k: int) -> dict[str, object]:
        """Return the value of vLLM's --speculative-config.

        vLLM copies from its own earlier answers instead of stored outputs, and needs the package arctic-inference.
        """
        names = ("max_tree_depth", "max_spec_factor", "min_token_prob")
        options = {f"suffix_decoding_{name}": getattr(self, name) for name in names}
        return {"method": "suffix", "num_speculative_tokens": k, **options}

    def build(self, context: DrafterContext) -> DrafterRun:
        return context.run(self._drafter())

    def acceptance(self, replay: ReplayContext) -> list[TokenLogprobs]:
        return copies_by_k(self._drafter(), replay)

    def _drafter(self) -> SuffixDrafter:
        memory = None
        if self.outputs:
            memory = Memory(output.ids for output in read_store(Path(self.outputs)).outputs)
        return SuffixDrafter(memory, self.max_tree_depth, self.max_spec_factor, self.min_token_prob)
