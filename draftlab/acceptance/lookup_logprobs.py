"""Log-probabilities of a text's tokens for drafters without a neural network: lookups that copy, and n-gram models.

n scored tokens of a text, K drafted tokens, V vocab.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from draftlab.acceptance.token_logprobs import Text, TokenLogprobs, counted, token_logprobs
from draftlab.engine.drafters.ngram import NgramModel, TextDrafter
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
    then the beginnings of these drafts.
    """
    scored = []
    for prompt, completion in counted(texts, advance):
        whole, n = np.concatenate([prompt, completion]).tolist(), len(completion)
        drafts = [drafter.draft(whole[: len(prompt) + at], k) for at in range(n)]
        result = TokenLogprobs.unlikely(n, k, vocab)
        for at, draft in enumerate(drafts):
            for age, token in enumerate(draft[: n - at]):
                if token == completion[at + age]:
                    result.logprobs[at + age, age] = result.ranks[at + age, age] = 0
        scored.append(replace(result, drafted=np.array([len(draft) for draft in drafts])))
    return scored


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
