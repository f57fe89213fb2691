"""Attention of llama.py over a static cache: with a mask only where it is needed, by kernels that are trusted.

B rows, T new tokens, S cached + new, H query heads in K groups of G, C head_dim.
"""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

NARROW = 64  # tokens of a pass up to which heads are folded; wider masks, repeated for every head, take memory
# cuDNN plans anew for every S, and on some devices is wrong for fewer than 8 kv heads (pytorch #193893)
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Rotary tables, attention mask and cache slots of one pass; rows have one length in common or each its own.

    folded: the heads of a kv head are rows of one product, G T of them. mask: then added to the scores, None where all
    is attended; else bool or a causal bias, None where attention is causal from the first position on.
    """

    cos: Tensor  # [T, C] or [B, 1, T, C]
    sin: Tensor
    mask: Tensor | None  # folded: [B, 1, G T, S]; else [T, S] or [B, 1, T, S]
    slots: tuple[slice | Tensor, ...]  # slots of the new keys and values in [B, K, capacity, C]
    end: int  # S
    folded: bool = False


def attend(q: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Return the attention of q [B, H, T, C] to keys and values [B, K, S, C], [B, H, T, C].

    Folded heads need neither a repetition of keys, as kernels with masks do, nor a kernel for grouped heads.
    """
    group = q.shape[1] // keys.shape[1]
    if metadata.folded:
        folded = q.unflatten(1, (-1, group)).flatten(2, 3)  # [B, K, G T, C]
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=metadata.mask)
        return out.unflatten(2, (group, -1)).flatten(1, 2)
    causal = metadata.mask is None
    return F.scaled_dot_product_attention(
        q, keys, values, metadata.mask, is_causal=causal, enable_gqa=group > 1
    )


def pinned_backends(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Let attention choose among BACKENDS only; there is one on a CPU."""
    return sdpa_kernel(BACKENDS) if device.type == "cuda" else contextlib.nullcontext()
