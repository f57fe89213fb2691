"""Log-probabilities of given tokens in the blocks that a DFlash or DSpark head drafts, many blocks in one pass.

n scored tokens of a text, K drafted tokens, A anchors, S positions, V vocab. The block after an anchor, a token of the
text, reads the target's states of the tokens before the anchor. A step reaches a token of its block only if all
drafted tokens before it are those of the text. A DSpark head is therefore given the text's tokens.
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

BLOCKS_IN_A_PASS = 32  # each has its own copy of the context's keys and values


def score_blocks(
    target: Llama | HFDecoder,
    head: DFlash,
    texts: Sequence[Text],
    vocab: int,
    sampling: SamplingParams,
    k: int,
    advance: Callable[[int], None] = lambda done: None,
) -> list[TokenLogprobs]:
    """Return the head's view of each token by the age of the step, arrays of [n, K] as score_offsets returns.

    Args:
        vocab: Number of logits that count.
        k: At most the tokens of a block.

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
        # what follows the text is read by no token that counts
        given = (anchors.unsqueeze(1) + torch.arange(k)).clamp_max(len(whole) - 1)
        logits = head.text_logits(whole[given], _copies(context, anchors))  # [A, K, V]
        for age in range(k):
            drafted = anchors + age + 1  # the token of each block that has this age
            drafted = drafted[drafted < len(whole)]
            if len(drafted):
                rows = logits[: len(drafted), age, :vocab].float()
                own = token_logprobs(rows, whole[drafted], sampling)
                result.put(((drafted - prompt).numpy(), age), own)
    return result


def _copies(context: BlockCache, anchors: Tensor) -> BlockCache:
    """Return a copy of the context for the block of each anchor, with the positions before the anchor in use."""
    rows = (-1, len(anchors), -1, -1, -1)
    keys, values = context.keys.expand(rows).clone(), context.values.expand(rows).clone()
    return BlockCache(keys, values, anchors.tolist())
