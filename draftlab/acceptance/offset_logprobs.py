"""Log-probabilities of given tokens at every offset of a parallel draft, from packed passes (model/parallel.py).

n scored tokens of a text, K offsets, V vocab.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from draftlab.acceptance.token_logprobs import (
    Text,
    TokenLogprobs,
    check_fits,
    max_positions,
    token_logprobs,
)
from draftlab.model.decoder import Decoder
from draftlab.model.parallel import pack
from draftlab.sampling import SamplingParams


def score_offsets(
    model: Decoder,
    texts: Sequence[Text],
    vocab: int,
    sampling: SamplingParams,
    offsets: int,
    token: int,
    advance: Callable[[int], None] = lambda done: None,
    memory: float = 2.0,
) -> list[TokenLogprobs]:
    """Return the view of each token by offset, arrays of [n, K]: of token i, offset a + 1 from token i - a - 1.

    That is the token that a step of age a drafts at token i (acceptance/expected.py). Offsets that would begin before
    the prompt's last token have probability 0.

    Args:
        token: The mask token. The other arguments are those of score_tokens.

    Raises:
        UserError: A text is longer than the model's context.
    """
    check_fits(model, texts)
    step = max(1, max_positions(vocab, memory) // offsets)
    scored = []
    for done, text in enumerate(texts, 1):
        scored.append(_score(model, text, vocab, sampling, offsets, token, step))
        advance(done)
    return scored


@torch.inference_mode()
def _score(
    model: Decoder,
    text: Text,
    vocab: int,
    sampling: SamplingParams,
    offsets: int,
    token: int,
    step: int,
) -> TokenLogprobs:
    prompt, completion = text
    whole = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64)).to(model.device)
    first, result = len(prompt) - 1, TokenLogprobs.unlikely(len(completion), offsets, vocab)
    for at in range(first, len(whole) - 1, step):  # the positions that draft, in parts
        end = min(at + step, len(whole) - 1)
        depths = torch.zeros(1, len(whole) - 1, dtype=torch.long, device=model.device)
        depths[0, at:end] = (len(whole) - 1 - torch.arange(at, end)).clamp_max(offsets)
        packed = pack(whole[None, :-1], depths, token)
        logits = model.forward_uncached(packed.ids, packed.ids.shape[1] - at, packed.tree())[
            0, :, :vocab
        ]
        own = token_logprobs(
            logits[packed.predicting - at].float(), whole[packed.predicted + 1], sampling
        )
        result.put(
            ((packed.predicted - first).cpu().numpy(), (packed.offset - 1).cpu().numpy()), own
        )
    return result
