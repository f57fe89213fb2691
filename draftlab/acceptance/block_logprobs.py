"""Log-probabilities of a text's tokens as drafted by a DFlash or DSpark head, with many drafted blocks in one pass.

n scored tokens of a text, K drafted tokens, A anchors, S positions, V vocab. A block is the tokens that the head drafts
together. An anchor is a token of the text after which the head drafts a block. For this block the head reads the
target's states of the tokens before the anchor. In decoding, a drafted token matters only if all drafted tokens before
it equal the text. A DSpark head therefore reads the text's tokens here, not the tokens that it would draft.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftlab.acceptance.chain_logprobs import target_states
from draftlab.acceptance.token_logprobs import (
    Text,
    TokenLogprobs,
    check_fits,
    counted,
    token_logprobs,
    whole_text,
)
from draftlab.model.dflash import DFlash
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import Cache, Llama
from draftlab.sampling import SamplingParams

BLOCKS_IN_A_PASS = 32  # each block has its own copy of the context's keys and values


@torch.inference_mode()
def score_blocks(
    target: Llama | HFDecoder,
    head: DFlash,
    texts: Sequence[Text],
    vocab: int,
    sampling: SamplingParams,
    k: int,
    advance: Callable[[int], None] = lambda done: None,
) -> list[TokenLogprobs]:
    """Return log-probability and rank of each token as drafted by a head, as arrays [n, K] for each text.

    The head drafts K tokens at once, as a block. Entry [i, a] is for token i of the n tokens of the completion, as
    drafted token a + 1 of a block. That block continues the text after token i - a - 1. If this token is before the
    prompt's last token, the probability is 0. If the tokens of a block attend to later tokens of the block, the logits
    depend on the length of the block, and the arrays are [n, K, K] for blocks of 1 to K tokens.

    Args:
        vocab: Number of ids; further logits are padding.
        k: Largest number of drafted tokens of a block, K. At most the head's block size.
        advance: Function that is called with the number of scored texts.

    Raises:
        UserError: A text is longer than the context of the head or of the target.
    """
    check_fits(target, texts)
    head.check_fits(max((len(prompt) + len(ids) for prompt, ids in texts), default=0))
    scored = []
    for text in counted(texts, advance):
        whole, prompt = whole_text(text).to(target.device), len(text[0])
        context = head.new_cache(1, len(whole))
        if len(whole) > prompt:
            states = target_states(target, head.layer_ids, whole[:-1])
            places = torch.arange(len(whole) - 1, device=whole.device)
            head.read(states, places.unsqueeze(0), context)
        if all(head.config.causal):
            scored.append(_score_blocks(head, whole, prompt, context, vocab, sampling, k))
            continue
        by_length = [_score_blocks(head, whole, prompt, context, vocab, sampling, length) for length in range(1, k + 1)]
        scored.append(TokenLogprobs.by_k(by_length, vocab))
    return scored


def _score_blocks(
    head: DFlash,
    whole: Tensor,
    prompt: int,
    context: Cache,
    vocab: int,
    sampling: SamplingParams,
    k: int,
) -> TokenLogprobs:
    """Score the tokens of a text as drafted in blocks of k tokens, see score_blocks.

    whole: Token ids of the text, with a prompt of `prompt` tokens. context: The head's cache of the text.
    """
    result = TokenLogprobs.unlikely(len(whole) - prompt, k, vocab)
    for anchors in torch.arange(prompt - 1, len(whole) - 1).split(BLOCKS_IN_A_PASS):
        if not len(anchors):
            continue
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


def _copies(context: Cache, anchors: Tensor) -> Cache:
    """Return a cache with a copy of the context for each anchor. Only the positions before the anchor are read."""
    rows = (-1, len(anchors), -1, -1, -1)
    keys, values = context.keys.expand(rows).clone(), context.values.expand(rows).clone()
    return Cache(keys, values, anchors.tolist())
