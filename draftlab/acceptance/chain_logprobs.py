"""Log-probabilities of a text's tokens as drafted by an EAGLE-3 or P-EAGLE head, in a chain from every position.

All chains advance together: each pass of the head drafts the next token of every chain.

n scored tokens of a text, K drafted tokens, T positions of the head, D hidden, V vocab. At position i the head reads
the target's states of token i and the embedding of token i + 1 (engine/drafters/eagle.py). The chain that begins at
position i drafts tokens i + 2, i + 3, ... It attends to the target's states up to i and to its own states.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftlab.acceptance.token_logprobs import (
    Text,
    TokenLogprobs,
    check_fits,
    counted,
    token_logprobs,
    whole_text,
)
from draftlab.model.decoder import AttentionMetadata
from draftlab.model.eagle_llama import EagleLlama
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import Cache, Llama
from draftlab.sampling import SamplingParams


@torch.inference_mode()
def score_chains(
    target: Llama | HFDecoder,
    head: EagleLlama,
    texts: Sequence[Text],
    vocab: int,
    sampling: SamplingParams,
    k: int,
    advance: Callable[[int], None] = lambda done: None,
) -> list[TokenLogprobs]:
    """Return log-probability and rank of each token in the chains that a head drafts, as arrays [n, K] for each text.

    Entry [i, a] is for token i of the n tokens of the completion, as drafted token a + 1 of a chain of K tokens. That
    chain continues the text after token i - a - 1. If this token is before the prompt's last token, the probability is
    0.

    Args:
        vocab: Number of ids; further logits are padding.
        k: Number of tokens of a chain, K.
        advance: Function that is called with the number of scored texts.

    Raises:
        UserError: A text is longer than the context of the head or of the target.
    """
    for model in (target, head):
        check_fits(model, texts)
    scored = []
    for text in counted(texts, advance):
        whole, prompt = whole_text(text).to(target.device), len(text[0])
        result = TokenLogprobs.unlikely(len(whole) - prompt, k, vocab)
        scored.append(result)
        # number of positions, and the first position at which a chain begins
        places, first = len(whole) - 2, max(0, prompt - 2)
        if places <= first:
            continue
        states = head.combine(target_states(target, head.layer_ids, whole[:places]))
        # the cache may be longer than the head's context
        size = (head.shape.layers, 1, head.shape.kv_heads, places * k, head.shape.head_dim)
        cache = Cache(head.embed.new_zeros(size), head.embed.new_zeros(size))
        for age, metadata in enumerate(_passes(head, places, min(k, places - first))):
            # roll moves the first tokens to the end; only chains that run past the end of the text read them
            following = whole.roll(-1 - age)[:places]
            if age and head.mask is not None:  # a P-EAGLE head does not read what it drafts
                following = torch.full_like(following, head.mask[0])
                states = head.mask[1].expand_as(states)
            logits, states = head.decode_states(following[None], states, cache, metadata, places - first)
            drafted = whole[first + 2 + age :]
            own = token_logprobs(logits[0, : len(drafted), :vocab].float(), drafted, sampling)
            result.put((slice(first + 2 + age - prompt, None), age), own)
    return scored


def target_states(target: Llama | HFDecoder, layer_ids: tuple[int, ...], ids: Tensor) -> Tensor:
    """Return the target's states after each of the layers `layer_ids`, concatenated, [1, T, A E].

    T: number of `ids`. A: number of layers. E: hidden size of the target.
    """
    cache: Any = target.new_cache(1, len(ids))
    states = cache.layer_states = target.new_layer_states(cache, layer_ids)
    target.forward(ids[None], cache, last=1)
    return states.states


def _passes(head: EagleLlama, places: int, k: int) -> list[AttentionMetadata]:
    """Return the attention metadata of k passes, each of which drafts the next token of all chains.

    places: Number of positions at which chains begin.
    """
    own = torch.eye(places, dtype=torch.bool, device=head.device)
    head.rope.reach(min(places + k, head.context))
    passes, causal = [], torch.ones_like(own).tril()
    for age in range(k):
        read = causal if head.window is None else causal.triu(age - head.window + 1)
        mask = torch.cat([read, *[own] * age], 1)
        at = (torch.arange(places, device=head.device) + age).clamp_max(head.context - 1)
        new, end = slice(age * places, (age + 1) * places), (age + 1) * places
        passes.append(
            AttentionMetadata(head.rope.cos[at], head.rope.sin[at], mask, (slice(None), slice(None), new), end)
        )
    return passes
