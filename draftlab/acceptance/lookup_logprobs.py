"""Log-probabilities of a text's tokens for lookups that copy, and for models that draft after a lookup.

n scored tokens of a text, K drafted tokens, V vocab.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from draftlab.acceptance.token_logprobs import Text, TokenLogprobs, counted
from draftlab.engine.drafters.ngram import TextDrafter
from draftlab.sampling import SamplingParams


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


def _copies(drafts: Sequence[list[int]], completion: np.ndarray, k: int, vocab: int) -> TokenLogprobs:
    """Return which tokens of a completion are drafted. drafts: Draft of the step that begins at each token, [n]."""
    n = len(completion)
    result = TokenLogprobs.unlikely(n, k, vocab)
    for at, draft in enumerate(drafts):
        for age, token in enumerate(draft[: n - at]):
            if token == completion[at + age]:
                result.logprobs[at + age, age] = result.ranks[at + age, age] = 0
    return replace(result, drafted=np.array([len(draft) for draft in drafts], dtype=np.int64))


def after_lookup(lookup: TokenLogprobs, second: TokenLogprobs, second_tokens: int | None) -> TokenLogprobs:
    """Return the result of a drafter that drafts with a lookup, and with a model where the lookup has no draft.

    Args:
        lookup: Result of score_copies, with arrays [n, K].
        second: The model's result, [n] or [n, K].
        second_tokens: Largest number of tokens that the model drafts. None: K.
    """
    assert lookup.drafted is not None
    n, k = lookup.logprobs.shape
    copied = lookup.drafted > 0  # [n]
    first = np.arange(n)[:, None] - np.arange(k)  # [n, K] token at which the step of each entry begins
    # no step begins before token 0, and the lookup's result says so
    copies = (first < 0) | copied[first.clip(0)] if n else np.zeros((0, k), dtype=bool)
    own = [array if array.ndim == 2 else array[:, None] for array in (second.logprobs, second.ranks)]
    return TokenLogprobs(
        np.where(copies, lookup.logprobs, own[0]),
        np.where(copies, lookup.ranks, own[1]),
        drafted=np.where(copied, lookup.drafted, min(k, second_tokens or k)),
        modelled=~copied,
    )
