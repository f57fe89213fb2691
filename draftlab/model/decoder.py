"""Decoders: the interface of models that decode, implemented by llama.py and, for other families, with transformers.

B rows, T new tokens, S cached + new, K drafted tokens, V vocab. Attention of llama.py reads a static cache, with H
query heads in groups of G and C head_dim. Attention has a mask only if needed, and uses the kernels in BACKENDS.
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

NARROW = 64  # most tokens of a pass with folded heads, whose mask is repeated for every head and takes memory
# without cuDNN, which plans anew for every S, and on some devices is wrong for fewer than 8 kv heads (pytorch #193893)
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Rotary tables, attention mask and cache slots of one pass. Rows of the batch have equal or different lengths.

    folded: The G query heads of a KV head form G T rows of one product. mask: If folded, an addend of the scores, or
    None if every token attends to every position; else a bool mask or a causal bias, or None for causal attention from
    position 0.
    """

    cos: Tensor  # [T, C] or [B, 1, T, C]
    sin: Tensor
    mask: Tensor | None  # folded: [B, 1, G T, S]; else [T, S] or [B, 1, T, S]
    slots: tuple[slice | Tensor, ...]  # slots of the new keys and values in [B, K, capacity, C]
    end: int  # S
    folded: bool = False


def attend(q: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Return the attention of q [B, H, T, C] to keys and values [B, K, S, C]; the result is [B, H, T, C].

    Kernels with masks repeat the keys of grouped heads. Folded heads avoid this repetition.
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
    """Return a context in which attention on a GPU uses BACKENDS only; a CPU has a single backend."""
    return sdpa_kernel(BACKENDS) if device.type == "cuda" else contextlib.nullcontext()


CPU = torch.device("cpu")

Drafted = tuple[Tensor, Tensor | None]  # tokens, and the distributions q they were drawn from
# parent of each token of a tree, or of the tree of each row
Parents = Sequence[int] | Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Tree:
    """A token tree of one pass. depth: Depth of each token, [T]. mask: Whether token i attends to j, [T, T] bool.

    Batches with one tree per row have [B, T] and [B, T, T].
    """

    depth: Tensor
    mask: Tensor

    @classmethod
    def chain(cls, width: int, device: torch.device = CPU) -> "Tree":
        """Return the tree in which each token follows the token before."""
        mask = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        return cls(torch.arange(width, device=device), mask)

    @classmethod
    def from_parents(cls, parents: Parents, device: torch.device = CPU) -> "Tree":
        """Return the tree in which token 0 is the root, and parents[i] <= i is the parent of token i + 1."""
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


class Sampler(Protocol):
    """Chooses drafted tokens [B] from logits [B, V] and draws [B], with their distributions q [B, V], if any."""

    def __call__(self, logits: Tensor, draws: Tensor, /) -> Drafted: ...

    @property
    def ended(self) -> bool:
        """Return whether the draft ends with the tokens that were chosen last."""
        return False


class KVCache(Protocol):
    """A cache with ``used`` valid positions in each row. Lowering that number rolls the cache back."""

    used: list[int]


class Decoder(Protocol):
    """A model that decodes with a cache. llama.Llama and hf_decoder.HFDecoder are decoders."""

    context: int  # longest text in tokens

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab(self) -> int | None:
        """Return the width of the logits, None if unknown."""
        return None

    @property
    def takes_rows(self) -> bool:
        """Return whether rows of a batch may have different lengths."""
        return True

    @property
    def architecture(self) -> Shape | None:
        """Return the shape of a model that draftlab's own engine runs, None if transformers runs the model."""
        return None

    @property
    def weights_dtype(self) -> str | None:
        """Return "int8" or the quantisation method of the weights, None for weights of a floating-point dtype."""
        return None

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights."""
        return 0

    @property
    def kv_bytes(self) -> int:
        """Return the largest number of bytes that the KV cache takes per token."""
        return 0

    @property
    def replays_passes(self) -> bool:
        """Return whether the first pass of each size is slow because it is recorded. Callers then use few sizes."""
        return False

    def check_fits(self, capacity: int) -> None:
        """Raises UserError: capacity exceeds the model's context."""
        if capacity > self.context:
            raise UserError(
                f"{capacity} tokens exceed the model's context of {self.context}; use shorter prompts "
                "or fewer new tokens"
            )

    def new_cache(self, rows: int, capacity: int) -> Any:
        """Return an empty KVCache for rows of at most capacity tokens."""
        ...

    def forward(self, ids: Tensor, cache: Any, last: int = 0, tree: Tree | None = None) -> Tensor:
        """Append ids [B, T] to the cache; return their logits, [B, T, V] or, for the last tokens alone, [B, last, V].

        tree: Tree of the T tokens; by default each token follows the token before.
        """
        ...

    def forward_uncached(self, ids: Tensor, last: int, tree: Tree | None = None) -> Tensor:
        """Return the logits of the last tokens of whole texts, [B, last, V], without a cache. tree: See forward."""
        return self.forward(ids, self.new_cache(len(ids), ids.shape[1]), last, tree)

    def draft(self, logits: Tensor, cache: Any, uniform: Tensor, choose: Sampler) -> Drafted:
        """Draft K tokens after the cached tokens, see draft_chain. The last drafted token does not enter the cache.

        logits: Logits after the cached tokens, [B, V]. uniform: Draws in [0, 1), [B, K].
        """
        return draft_chain(
            logits,
            uniform,
            choose,
            lambda ids: self.forward(ids.unsqueeze(1), cache, last=1)[:, -1],
        )

    def without_rollback(self) -> "Decoder":
        """Return a decoder for plain decoding, whose caches cannot be rolled back."""
        return self


def end_of_pass(cache: Any, width: int) -> int:
    """Return the longest row's length after a pass of `width` tokens. Raises ValueError: the cache is shorter."""
    end = max(cache.used) + width
    if end > cache.capacity:
        raise ValueError(f"{end} tokens exceed the cache's capacity of {cache.capacity}")
    return end


def draft_chain(
    logits: Tensor, uniform: Tensor, choose: Sampler, following: Callable[[Tensor], Tensor]
) -> Drafted:
    """Draft at most K tokens autoregressively. Return the tokens, [B, K], and their distributions, [B, K, V], if any.

    Fewer tokens are drafted if `choose` ends the draft.

    logits: Logits after the texts, [B, V]. uniform: Draws in [0, 1), [B, K]. following: Function that feeds the tokens
    of one step, [B], and returns the next logits, [B, V].
    """
    ids, q = [], []
    for draws in uniform.unbind(1):
        token, drawn_from = choose(following(ids[-1]) if ids else logits, draws)
        ids.append(token)
        q += [] if drawn_from is None else [drawn_from]
        if choose.ended:
            break
    return torch.stack(ids, 1), torch.stack(q, 1) if q else None


def feed(
    model: Decoder,
    cache: KVCache,
    texts: Sequence[Sequence[int]],
    known: int | None = None,
    last: int = 1,
) -> Tensor:
    """Append to the cache the tokens of each text that it lacks; return the logits of the last tokens, [B, last, V].

    The last tokens are fed even if cached, and cached tokens beyond a text are dropped. Every row feeds the same number
    of tokens: a row that lacks fewer feeds the end of its text again, or padding if the text is shorter. known: Number
    of ids that the model knows; larger ids are fed as known - 1.
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
    # index of each text's last token among the fed tokens
    at = [min(width, len(text)) - 1 for text in texts]
    cache.used = starts
    logits = model.forward(ids, cache, last=width - min(at) + last - 1)
    cache.used = [len(text) for text in texts]
    if min(at) == width - 1:
        return logits
    rows_of = torch.arange(len(texts)).unsqueeze(1)
    return logits[rows_of, torch.tensor(at).unsqueeze(1) - min(at) + torch.arange(last)]
