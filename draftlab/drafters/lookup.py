"""The drafters prompt-lookup and latest-lookup, which copy from the text itself, and what all such drafters share.

n scored tokens of a text, N tokens, K drafted tokens, V vocab.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from draftlab.acceptance.token_logprobs import Text, TokenLogprobs, counted
from draftlab.drafters.base import DrafterSpec, drafter
from draftlab.drafters.context import DrafterContext, DrafterRun, ReplayContext
from draftlab.engine.generate import Draft, Drafter, TokenIds
from draftlab.sampling import SamplingParams
from draftlab.servers.kinds import PROMPT_LOOKUP_MAX
from draftlab.servers.vllm import speculative_config

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


def score_copies(
    drafter: TextDrafter,
    texts: Sequence[Text],
    vocab: int,
    k: int,
    advance: Callable[[int], None] = lambda done: None,
) -> list[TokenLogprobs]:
    """Return for each text which of its tokens a deterministic drafter drafts, and how long its drafts are.

    The arrays [n, K] have the entries of score_offsets. The log-probability is 0 if the drafter drafts the token, else
    -inf. The drafter drafts up to K tokens after every token. The results hold for a smaller K only if its drafts are
    then the beginnings of these drafts; for other drafters, see score_copies_by_k.
    """
    scored = []
    for prompt, completion in counted(texts, advance):
        whole = np.concatenate([prompt, completion]).tolist()
        n = len(completion)
        drafts = [drafter.draft(whole[: len(prompt) + at], k) for at in range(n)]
        scored.append(_copies(drafts, completion, k, vocab))
    return scored


def score_copies_by_k(
    drafter: TextDrafter,
    texts: Sequence[Text],
    limits: Sequence[int],
    vocab: int,
    k: int,
    advance: Callable[[int], None] = lambda done: None,
) -> list[TokenLogprobs]:
    """Return the results of score_copies for every number of drafted tokens up to K, see TokenLogprobs.by_k.

    As in live decoding, a step asks for K tokens, or for the tokens that fit before the length limit.

    limits: Length at which decoding of each text must stop.
    """
    scored = []
    uniform = torch.zeros(1, k)
    for (prompt, completion), limit in zip(counted(texts, advance), limits, strict=True):
        whole = np.concatenate([prompt, completion]).tolist()
        n = len(completion)
        by_k = []
        for most in range(1, k + 1):
            drafter.reset(1, len(prompt) + limit + most)
            drafts: list[list[int]] = [[]] * n
            for at in range(1, n):  # the prefill emits token 0, so no step begins there
                if (count := min(most, limit - at - 1)) > 0:
                    text = whole[: len(prompt) + at]
                    draft = drafter.propose([text], count, SamplingParams(), uniform)
                    drafts[at] = draft.ids[0].tolist()
            by_k.append(_copies(drafts, completion, most, vocab))
        scored.append(TokenLogprobs.by_k(by_k, vocab))
    return scored


def copies_by_k(drafter: TextDrafter, replay: ReplayContext) -> list[TokenLogprobs]:
    """Return which tokens of the texts of a replay a deterministic drafter drafts at each K, see score_copies_by_k."""
    return score_copies_by_k(drafter, replay.texts, replay.limits, replay.vocab, replay.most, replay.advance)


def _copies(drafts: Sequence[list[int]], completion: np.ndarray, k: int, vocab: int) -> TokenLogprobs:
    """Return which tokens of a completion are drafted. drafts: Draft of the step that begins at each token, [n]."""
    n = len(completion)
    result = TokenLogprobs.unlikely(n, k, vocab)
    for at, draft in enumerate(drafts):
        for age, token in enumerate(draft[: n - at]):
            if token == completion[at + age]:
                result.logprobs[at + age, age] = result.ranks[at + age, age] = 0
    return replace(result, drafted=np.array([len(draft) for draft in drafts], dtype=np.int64))


class LookupSpec(DrafterSpec):
    """Base class of the lookups in the text itself, whose drafts for a smaller K begin those for a larger K."""

    by_age = True
    prompt_lookup_max: int = Field(PROMPT_LOOKUP_MAX, ge=1)

    def lookup(self) -> TextDrafter:
        raise NotImplementedError

    def build(self, context: DrafterContext) -> DrafterRun:
        return context.run(self.lookup())

    def acceptance(self, replay: ReplayContext) -> list[TokenLogprobs]:
        return score_copies(self.lookup(), replay.texts, replay.vocab, replay.most, replay.advance)


class VLLMLookupSpec(LookupSpec):
    """Base class of the lookups that vLLM starts with method ngram."""

    def speculative_config(self, k: int) -> dict[str, object]:
        config = speculative_config("", k, "prompt lookup")
        return config | {"prompt_lookup_max": self.prompt_lookup_max}


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


@drafter("prompt-lookup", served_by=("vllm", "transformers"))
class PromptLookupSpec(VLLMLookupSpec):
    def lookup(self) -> TextDrafter:
        return PromptLookupDrafter(self.prompt_lookup_max)


class LatestLookupDrafter(TextDrafter):
    """Prompt lookup that copies the tokens after the latest match, see Match.

    A copy that reaches the end of the text goes on with the tokens that it copied, so a loop is drafted to any length.

    Args:
        longest: Largest length of a match, in tokens.
        min_match: Smallest length of a match of each kind, in the order of MATCH_KINDS. Shorter matches are not used.
    """

    def __init__(self, longest: int, min_match: Sequence[int] = (1, 1, 1)) -> None:
        self.longest = longest
        self.min_match = dict(zip(MATCH_KINDS, min_match, strict=True))

    def draft(self, text: list[int], count: int) -> list[int]:
        match = latest_match(np.array(text), self.longest)
        if match is None or match.length < self.min_match[match.kind]:
            return []
        return copy_from(text, match.start, count)


def copy_from(text: list[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from position `start` on. Past the end of the text, the copied tokens are copied again."""
    return (text[start:] * (count // (len(text) - start) + 1))[:count]


@drafter("latest-lookup")
class LatestLookupSpec(LookupSpec):
    def lookup(self) -> TextDrafter:
        return LatestLookupDrafter(self.prompt_lookup_max)
