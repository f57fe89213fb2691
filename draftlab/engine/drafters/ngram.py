"""Prompt lookup: drafting without a model, by copying from the text itself. K drafted tokens."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from draftlab.engine.generate import Draft, Drafter, TokenIds
from draftlab.sampling import SamplingParams

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


def suffix_matches(ids: np.ndarray, after: np.ndarray, text: np.ndarray, longest: int) -> Iterator[np.ndarray]:
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

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
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

    def propose(self, texts: TokenIds, count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
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
