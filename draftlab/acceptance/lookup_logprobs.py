"""Log-probabilities of a text's tokens for drafters without a neural network: lookups that copy, and n-gram models.

n scored tokens of a text, K drafted tokens, V vocab.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from draftlab.acceptance.token_logprobs import Text, TokenLogprobs, token_logprobs
from draftlab.engine.drafters.ngram import NgramModel, TextDrafter
from draftlab.sampling import SamplingParams


def score_copies(
    drafter: TextDrafter,
    texts: Sequence[Text],
    vocab: int,
    k: int,
    advance: Callable[[int], None] = lambda done: None,
) -> list[TokenLogprobs]:
    """Return for each text which of its tokens the drafter drafts, as log-probabilities 0 or -inf, and draft lengths.

    The arrays [n, K] are those of score_offsets. A draft of fewer than K tokens must be the beginning of the draft of K
    tokens.
    """
    scored = []
    for done, (prompt, completion) in enumerate(texts, 1):
        whole, n = np.concatenate([prompt, completion]).tolist(), len(completion)
        drafts = [drafter.draft(whole[: len(prompt) + at], k) for at in range(n)]
        result = TokenLogprobs.unlikely(n, k, vocab)
        for at, draft in enumerate(drafts):
            for age, token in enumerate(draft[: n - at]):
                if token == completion[at + age]:
                    result.logprobs[at + age, age] = result.ranks[at + age, age] = 0
        scored.append(replace(result, drafted=np.array([len(draft) for draft in drafts])))
        advance(done)
    return scored


def score_ngrams(
    model: NgramModel,
    texts: Sequence[Text],
    sampling: SamplingParams,
    advance: Callable[[int], None] = lambda done: None,
) -> list[TokenLogprobs]:
    """Return log-probability and rank of each token in an n-gram model, [n]."""
    scored = []
    for done, (prompt, completion) in enumerate(texts, 1):
        whole, parts = np.concatenate([prompt, completion]).tolist(), []
        for at in range(len(prompt), len(whole)):
            p = torch.from_numpy(model.probabilities(whole[max(0, at - len(model.orders)) : at]))
            parts.append(token_logprobs(p.log()[None], torch.tensor(whole[at : at + 1]), sampling))
        fields = ([part.logprobs for part in parts], [part.ranks for part in parts])
        scored.append(TokenLogprobs(*(np.concatenate([np.zeros(0), *each]) for each in fields)))
        advance(done)
    return scored
