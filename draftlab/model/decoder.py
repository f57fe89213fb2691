"""Decoders, the interface of models for decoding, provided by llama.py where possible, else by transformers.

B rows, T new tokens, S cached + new, K drafted tokens, V vocab. The attention of llama.py over a static cache, with H
query heads in groups of G and C head_dim, has a mask only where it is needed, and runs in kernels that are trusted.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from draftlab.errors import UserError
from draftlab.model.devices import staged
from draftlab.model.shape import Shape

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


CPU = torch.device("cpu")

Drafted = tuple[Tensor, Tensor | None]  # tokens, and their q
# logits [B, V] and draws [B] -> tokens [B], and their q [B, V]
Sampler = Callable[[Tensor, Tensor], Drafted]
# parent of each token of a tree, or of the tree of each row
Parents = Sequence[int] | Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Tree:
    """A token tree of one pass: the depth of each token, [T], and which tokens each one attends to, [T, T] bool.

    Or a tree for each row, [B, T] and [B, T, T].
    """

    depth: Tensor
    mask: Tensor

    @classmethod
    def from_parents(cls, parents: Parents, device: torch.device = CPU) -> "Tree":
        """Return the tree with root token 0, in which parents[i], an earlier token, is the parent of token i + 1."""
        rows = [row for row in parents if isinstance(row, tuple)]
        if rows:
            trees = [cls.from_parents(row, device) for row in rows]
            return cls(
                torch.stack([tree.depth for tree in trees]),
                torch.stack([tree.mask for tree in trees]),
            )
        mask = torch.eye(len(parents) + 1, dtype=torch.bool)
        for child, parent in enumerate(parents, 1):
            mask[child] |= mask[parent]
        return cls((mask.sum(1) - 1).to(device), mask.to(device))


class KVCache(Protocol):
    """A cache of which the first ``used`` positions of each row count. Rolling back is lowering that number."""

    used: list[int]


class Decoder(Protocol):
    """A model that decodes with a cache. llama.Llama and hf_decoder.HFDecoder are decoders."""

    context: int  # longest text in tokens

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab(self) -> int | None:
        """Return the width of the logits, None where it is not known."""
        return None

    @property
    def takes_rows(self) -> bool:
        """Return whether rows of a batch may have different lengths."""
        return True

    @property
    def architecture(self) -> Shape | None:
        """Return the shape of a model that draftlab's own engine computes, None for a model of transformers."""
        return None

    @property
    def weights_dtype(self) -> str | None:
        """Return how weights are stored where that is not a floating-point dtype: int8, or a quantisation method."""
        return None

    @property
    def weight_bytes(self) -> int:
        """Return how much memory the weights take."""
        return 0

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of the KV cache per token, at most."""
        return 0

    @property
    def replays_passes(self) -> bool:
        """Return whether a pass of a new size is recorded first, so that few sizes are better than small sizes."""
        return False

    def check_fits(self, capacity: int) -> None:
        """Raises UserError: capacity exceeds the model's context."""
        if capacity > self.context:
            raise UserError(f"{capacity} tokens do not fit the model's context of {self.context}")

    def new_cache(self, rows: int, capacity: int) -> Any:
        """Return an empty KVCache for rows of at most capacity tokens."""
        ...

    def forward(self, ids: Tensor, cache: Any, last: int = 0, tree: Tree | None = None) -> Tensor:
        """Append ids [B, T] to the cache; return logits [B, T, V], or those of the last tokens, [B, last, V].

        tree: Parents of the T tokens; by default each token follows the token before.
        """
        ...

    def forward_uncached(self, ids: Tensor, last: int, tree: Tree | None = None) -> Tensor:
        """Return the logits of the last tokens of whole texts, [B, last, V]; no cache is kept. tree: See forward."""
        return self.forward(ids, self.new_cache(len(ids), ids.shape[1]), last, tree)

    def draft(self, logits: Tensor, cache: Any, uniform: Tensor, choose: Sampler) -> Drafted:
        """Draft K tokens after the cached tokens, see draft_chain. The last token is not fed.

        logits: logits after the cached tokens, [B, V]. uniform: draws in [0, 1), [B, K].
        """
        return draft_chain(
            logits,
            uniform,
            choose,
            lambda ids: self.forward(ids.unsqueeze(1), cache, last=1)[:, -1],
        )

    def without_rollback(self) -> "Decoder":
        """Return a decoder for text without drafts, whose cache only grows."""
        return self


def end_of_pass(cache: Any, width: int) -> int:
    """Return the length of the longest row after a pass of width tokens. Raises ValueError: the cache is shorter."""
    end = max(cache.used) + width
    if end > cache.capacity:
        raise ValueError(f"{end} tokens do not fit a cache of {cache.capacity}")
    return end


def draft_chain(
    logits: Tensor, uniform: Tensor, choose: Sampler, following: Callable[[Tensor], Tensor]
) -> Drafted:
    """Draft tokens autoregressively, [B, K]; return them and the distributions they were drawn from, [B, K, V], if any.

    logits: after the texts, [B, V]. uniform: draws in [0, 1), [B, K]. following: returns logits after one more token.
    """
    ids, q = [], []
    for draws in uniform.unbind(1):
        token, drawn_from = choose(following(ids[-1]) if ids else logits, draws)
        ids.append(token)
        q += [] if drawn_from is None else [drawn_from]
    return torch.stack(ids, 1), torch.stack(q, 1) if q else None


def feed(
    model: Decoder,
    cache: KVCache,
    texts: Sequence[Sequence[int]],
    known: int | None = None,
    last: int = 1,
) -> Tensor:
    """Append the missing tokens of each text to the cache, at least its last tokens; return their logits, [B, last, V].

    Cached tokens beyond a text are dropped. Every row feeds the largest number of missing tokens: the end of
    their text once more, then padding, which the next pass overwrites. known: larger ids are fed as known - 1.
    """
    width = max(
        len(text) - min(used, len(text) - last)
        for text, used in zip(texts, cache.used, strict=True)
    )
    starts = [max(0, len(text) - width) for text in texts]
    rows = [
        [*text[at : at + width], *[0] * (width - len(text))]
        for text, at in zip(texts, starts, strict=True)
    ]
    ids = staged(rows, model.device)  # [B, width]
    if known is not None:
        ids.clamp_(max=known - 1)
    # index of each text's last token among those fed
    at = [min(width, len(text)) - 1 for text in texts]
    cache.used = starts
    logits = model.forward(ids, cache, last=width - min(at) + last - 1)
    cache.used = [len(text) for text in texts]
    if min(at) == width - 1:
        return logits
    rows_of = torch.arange(len(texts)).unsqueeze(1)
    return logits[rows_of, torch.tensor(at).unsqueeze(1) - min(at) + torch.arange(last)]
