"""Decoders: the interface of models that decode, implemented by llama.py and, for other families, with transformers.

B rows (texts of a batch), T new tokens, S cached + new tokens, K drafted tokens, V vocab. In attention, K is the number
of KV heads, G the number of query heads per KV head, H = K G, and C head_dim. Attention of llama.py reads a static
cache, has a mask only if it needs one, and uses the kernels in BACKENDS.
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

# Most tokens of a pass with folded heads, see AttentionMetadata. Their mask is stored G times, so it must be small.
NARROW = 64
# cuDNN is left out: it plans anew for every S, and on some devices is wrong for fewer than 8 KV heads (pytorch #193893)
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Rotary tables, attention mask and cache slots of one pass, whose rows may have different lengths.

    Args:
        mask: If folded, the numbers that are added to the attention scores, or None if every token attends to every
            position. If not folded, a bool mask or a causal bias, or None for causal attention from position 0.
        slots: Index of the new keys and values in the cache of a layer, [B, K, capacity, C].
        folded: Whether the G query heads of a KV head are computed as one head with G T queries.
    """

    cos: Tensor  # [T, C] or [B, 1, T, C]
    sin: Tensor
    mask: Tensor | None  # folded: [B, 1, G T, S]; else [T, S] or [B, 1, T, S]
    slots: tuple[slice | Tensor, ...]
    end: int  # S
    folded: bool = False


def attend(q: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Return the attention output [B, H, T, C] of queries q [B, H, T, C] over keys and values [B, K, S, C].

    Kernels with a mask copy each KV head once per query head. Folded heads avoid these copies.
    """
    group = q.shape[1] // keys.shape[1]
    if metadata.folded:
        folded = q.unflatten(1, (-1, group)).flatten(2, 3)  # [B, K, G T, C]
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=metadata.mask)
        return out.unflatten(2, (group, -1)).flatten(1, 2)
    causal = metadata.mask is None
    return F.scaled_dot_product_attention(q, keys, values, metadata.mask, is_causal=causal, enable_gqa=group > 1)


def pinned_backends(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which attention on a GPU uses the kernels in BACKENDS only. On a CPU it does nothing."""
    return sdpa_kernel(BACKENDS) if device.type == "cuda" else contextlib.nullcontext()


CPU = torch.device("cpu")

Drafted = tuple[Tensor, Tensor | None]  # tokens, and their distributions q; None for greedy tokens
# the parents of a tree's tokens: one tree for all rows, or a tuple for each row
Parents = Sequence[int] | Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Tree:
    """The token tree of one pass.

    Args:
        depth: Number of ancestors of each token, [T]; or [B, T] if each row has its own tree.
        mask: Whether token i attends to token j, bool [T, T]; or [B, T, T] if each row has its own tree.
    """

    depth: Tensor
    mask: Tensor

    @classmethod
    def chain(cls, width: int, device: torch.device = CPU) -> "Tree":
        """Return the tree of a chain of `width` tokens: the parent of each token is the token before it."""
        mask = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        return cls(torch.arange(width, device=device), mask)

    @classmethod
    def from_parents(cls, parents: Parents, device: torch.device = CPU) -> "Tree":
        """Return the tree whose root is token 0, and in which parents[i] is the parent of token i + 1.

        If `parents` has a tuple for each row, each row has its own tree.

        Raises:
            ValueError: parents[i] is negative or above i.
        """
        rows = [row for row in parents if isinstance(row, tuple)]
        if rows:
            trees = [cls.from_parents(row, device) for row in rows]
            return cls(
                torch.stack([tree.depth for tree in trees]),
                torch.stack([tree.mask for tree in trees]),
            )
        mask = torch.eye(len(parents) + 1, dtype=torch.bool)
        for child, parent in enumerate(parents, 1):
            assert isinstance(parent, int)  # tuples are in `rows`
            if not 0 <= parent < child:
                raise ValueError(f"the parent of token {child} of a tree is {parent}, not an earlier token")
            mask[child] |= mask[parent]
        return cls((mask.sum(1) - 1).to(device), mask.to(device))


class TokenChooser(Protocol):
    """Chooses the next drafted token of each row from logits [B, V] and uniform draws [B] in [0, 1): generate.Sampler.

    It returns the tokens [B], and the draft distributions q [B, V] from which they were drawn. For greedy tokens, it
    returns None in place of q.
    """

    def __call__(self, logits: Tensor, draws: Tensor, /) -> Drafted: ...

    @property
    def ended(self) -> bool:
        """Return whether the draft ends with the tokens that were chosen last."""
        return False


class KVCache(Protocol):
    """A KV cache. The first ``used[row]`` positions of a row are valid, and lowering used[row] rolls the row back."""

    used: list[int]

    @property
    def capacity(self) -> int:
        """Return the largest number of positions of a row."""
        ...

    def keep(self, row: int, at: int, path: Sequence[int]) -> None:
        """Keep the accepted tokens of a row after a pass over a token tree, and drop its other drafted tokens.

        at: Position of the first drafted token. path: Indices of the accepted tokens among the drafted tokens. The
        token at position at + path[j] moves to position at + j.
        """
        ...


class Decoder(Protocol):
    """A language model that decodes with a KV cache. llama.Llama and hf_decoder.HFDecoder implement it."""

    context: int  # length of the longest text, in tokens

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab(self) -> int | None:
        """Return the width of the logits, or None if it is unknown."""
        return None

    @property
    def takes_rows(self) -> bool:
        """Return whether the texts of a batch may have different lengths."""
        return True

    @property
    def architecture(self) -> Shape | None:
        """Return the shape of the model if draftlab's own engine runs it, or None if transformers runs it."""
        return None

    @property
    def weights_dtype(self) -> str | None:
        """Return "int8" or the quantisation method of the weights, or None for weights of a floating-point dtype."""
        return None

    @property
    def weight_bytes(self) -> int:
        """Return the size of the weights in bytes."""
        return 0

    @property
    def kv_bytes(self) -> int:
        """Return the number of bytes that the KV cache needs per token, or an upper bound of this number."""
        return 0

    @property
    def replays_passes(self) -> bool:
        """Return whether passes replay CUDA graphs. If so, the first pass of each shape is slow; use few shapes."""
        return False

    def check_fits(self, capacity: int) -> None:
        """Raise UserError if texts of `capacity` tokens exceed the model's context."""
        if capacity > self.context:
            raise UserError(
                f"a text of {capacity} tokens exceeds the model's context of {self.context} tokens; use shorter "
                "prompts or a smaller --max-new-tokens"
            )

    def new_cache(self, rows: int, capacity: int) -> Any:
        """Return an empty KVCache for `rows` texts of at most `capacity` tokens each."""
        ...

    def forward(self, ids: Tensor, cache: Any, last: int = 0, tree: Tree | None = None) -> Tensor:
        """Append ids [B, T] to the cache, and return their logits, [B, T, V].

        Args:
            last: If not 0, return only the logits of the last `last` tokens, [B, last, V].
            tree: Token tree of the T tokens. Default: each token follows the token before it.
        """
        ...

    def forward_uncached(self, ids: Tensor, last: int, tree: Tree | None = None) -> Tensor:
        """Return the logits of the last `last` tokens of each text, [B, last, V]. The pass starts from an empty cache.

        ids: Whole texts, [B, T]. tree: Same as in forward.
        """
        return self.forward(ids, self.new_cache(len(ids), ids.shape[1]), last, tree)

    def draft(self, logits: Tensor, cache: Any, uniform: Tensor, choose: TokenChooser) -> Drafted:
        """Draft K tokens after the cached tokens, and append all but the last to the cache.

        logits, uniform, choose and the result: See draft_chain.
        """
        return draft_chain(
            logits,
            uniform,
            choose,
            lambda ids: self.forward(ids.unsqueeze(1), cache, last=1)[:, -1],
        )

    def without_rollback(self) -> "Decoder":
        """Return a decoder of the same model for decoding without a draft. Its caches need not be able to roll back."""
        return self


def end_of_pass(cache: KVCache, width: int) -> int:
    """Return the longest row's length after a pass of `width` tokens.

    Raises:
        ValueError: the cache is too short, or the length of a row is negative.
    """
    if min(cache.used) < 0:
        raise ValueError(f"a row of the cache has {min(cache.used)} tokens")
    end = max(cache.used) + width
    if end > cache.capacity:
        raise ValueError(f"{end} tokens exceed the cache's capacity of {cache.capacity}")
    return end


def draft_chain(
    logits: Tensor, uniform: Tensor, choose: TokenChooser, following: Callable[[Tensor], Tensor]
) -> Drafted:
    """Draft K tokens, one after the other, or fewer if `choose` ends the draft.

    Args:
        logits: Logits of the first drafted token, [B, V].
        uniform: Draws in [0, 1), [B, K].
        choose: Chooses a token of each row from logits and draws.
        following: Feeds a token of each row, [B], and returns the logits of the next token, [B, V].

    Returns: The tokens, [B, K], and their distributions, [B, K, V], or None if `choose` returns no distributions.
    """
    ids = []
    q = []
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
    """Append the uncached tokens of each text to the cache, and return the logits of the last tokens, [B, last, V].

    The last `last` tokens of a text are fed even if they are cached. Cached tokens after the end of a text are dropped.
    All texts feed the same number of tokens. A text with fewer uncached tokens feeds cached tokens again. A text that
    is too short for that is padded at its end.

    known: Number of ids in the model's vocabulary. Ids from `known` on are fed as known - 1.
    """
    width = max(len(text) - min(used, len(text) - last) for text, used in zip(texts, cache.used, strict=True))
    starts = [max(0, len(text) - width) for text in texts]
    rows = [[*text[at : at + width], *[0] * (width - len(text))] for text, at in zip(texts, starts, strict=True)]
    ids = staged(rows, model.device)  # [B, width]
    if known is not None:
        ids.clamp_(max=known - 1)
    # index of each text's last token in its row of fed tokens
    at = [min(width, len(text)) - 1 for text in texts]
    cache.used = starts
    logits = model.forward(ids, cache, last=width - min(at) + last - 1)
    cache.used = [len(text) for text in texts]
    if min(at) == width - 1:
        return logits
    rows_of = torch.arange(len(texts)).unsqueeze(1)
    return logits[rows_of, torch.tensor(at).unsqueeze(1) - min(at) + torch.arange(last)]
