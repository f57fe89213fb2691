"""Log-probabilities of a text's tokens in the blocks that a DFlash or DSpark head drafts, many blocks in one pass.

n scored tokens of a text, K drafted tokens, A anchors, S positions, V vocab. An anchor is a token of the text after
which a block begins. The block reads the target's states of the tokens before the anchor. In decoding, a drafted token
matters only if all drafted tokens before it equal the text. A DSpark head therefore reads the text's tokens here, not
the tokens that it would draft.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from draftlab.acceptance.chain_logprobs import target_states
from draftlab.acceptance.token_logprobs import Text, TokenLogprobs, check_fits, token_logprobs
from draftlab.model.dflash import BlockCache, DFlash
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import Llama
from draftlab.sampling import SamplingParams

BLOCKS_IN_A_PASS = 32  # each block has its own copy of the context's keys and values


def score_blocks(
    target: Llama | HFDecoder,
    head: DFlash,
    texts: Sequence[Text],
    vocab: int,
    sampling: SamplingParams,
    k: int,
    advance: Callable[[int], None] = lambda done: None,
) -> list[TokenLogprobs]:
    """Return for each text how probable the head's blocks make its n tokens: log-probabilities and ranks, [n, K].

    A head drafts K tokens at once, as a block. Entry [i, a] is of token i of the completion if the block begins so
    that this token is its drafted token a + 1. If that block would begin before the prompt's last token, the
    probability is 0.

    Args:
        vocab: Number of ids; further logits are padding.
        k: Number of drafted tokens of a block that are scored, K. At most the head's block size.
        advance: Function that is called with the number of scored texts.

    Raises:
        UserError: A text is longer than the context of the head or of the target.
    """
    check_fits(target, texts)
    head.check_fits(max((len(prompt) + len(ids) for prompt, ids in texts), default=0))
    scored = []
    for done, (prompt, completion) in enumerate(texts, 1):
        whole = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))
        scored.append(
            _score(target, head, whole.to(target.device), len(prompt), vocab, sampling, k)
        )
        advance(done)
    return scored


@torch.inference_mode()
def _score(
    target: Llama | HFDecoder,
    head: DFlash,
    whole: Tensor,
    prompt: int,
    vocab: int,
    sampling: SamplingParams,
    k: int,
) -> TokenLogprobs:
    result = TokenLogprobs.unlikely(len(whole) - prompt, k, vocab)
    if len(whole) <= prompt:
        return result
    context = head.new_cache(1, len(whole))
    states = target_states(target, head.layer_ids, whole[:-1])
    head.read(states, torch.arange(len(whole) - 1, device=whole.device).unsqueeze(0), context)
    for anchors in torch.arange(prompt - 1, len(whole) - 1).split(BLOCKS_IN_A_PASS):
        # the index is clamped, because no scored token reads tokens after the end of the text
        given = (anchors.unsqueeze(1) + torch.arange(k)).clamp_max(len(whole) - 1)
        logits = head.text_logits(whole[given], _copies(context, anchors))  # [A, K, V]
        for age in range(k):
            drafted = anchors + age + 1  # index in the text of token age + 1 of each block
            drafted = drafted[drafted < len(whole)]
            if len(drafted):
                rows = logits[: len(drafted), age, :vocab].float()
                own = token_logprobs(rows, whole[drafted], sampling)
                result.put(((drafted - prompt).numpy(), age), own)
    return result


def _copies(context: BlockCache, anchors: Tensor) -> BlockCache:
    """Return a cache with a copy of the context for each anchor's block, which reads positions before the anchor."""
    rows = (-1, len(anchors), -1, -1, -1)
    keys, values = context.keys.expand(rows).clone(), context.values.expand(rows).clone()
    return BlockCache(keys, values, anchors.tolist())
