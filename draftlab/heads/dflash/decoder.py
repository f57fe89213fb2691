"""DFlash heads that run: a block diffusion model reads the target's states and drafts all tokens in one pass.

B rows (texts of a batch), T tokens, S positions, L layers, H query heads, K KV heads, C head_dim, D hidden, V vocab, W
draft vocab, A target layers whose states the head reads.

For each position of the text, each layer of the head computes a key and a value from hidden_norm(fc(states)), where
`states` are the states of the target at this position. The block consists of the last token of the text and the mask
tokens after it. Tokens of the block attend to the text and to each other. Each mask token predicts the token at its own
position. If sample_from_anchor is set, each token of the block instead predicts the token after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config

from draftlab.errors import UserError
from draftlab.heads.base import draft_ids, read_tensors
from draftlab.heads.dflash import layout
from draftlab.heads.dflash.layout import DFlashShape
from draftlab.model.devices import staged
from draftlab.model.llama import Cache, RotaryTables, rms_norm, rotary, spread


@dataclass(frozen=True, slots=True)
class Places:
    """The cache row and the position of each token of a pass, and the rotary tables at these positions."""

    rows: Tensor  # [B, 1]
    positions: Tensor  # [B, T]
    cos: Tensor  # [B, T, 1, C]
    sin: Tensor

    def turned(self, x: Tensor) -> Tensor:
        """Apply the rotary embeddings to x [B, T, H, C]."""
        return x * self.cos + x.roll(x.shape[-1] // 2, -1) * self.sin


class DFlash:
    """A DFlash head with its weights. It uses the target's embedding and output layer unless it has its own."""

    def __init__(
        self,
        config: DFlashShape,
        weights: Mapping[str, Tensor],
        embed: Tensor,
        head: Tensor,
        ids: Tensor | None,
        rope: tuple[Tensor, float],
    ) -> None:
        """Make a head from its weights and rotary tables.

        Args:
            embed: Embedding, [V, D].
            head: Output layer, [W, D].
            ids: The W token ids that the output layer predicts; None for all ids.
            rope: Rotary frequencies, [C / 2], and the scale of the rotary tables.
        """
        self.config = config
        self.weights = weights
        self.embed = embed
        self.head = head
        self.ids = ids
        self.rope = RotaryTables(*rope, config.context, embed)

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return self.config.layer_ids

    def check_fits(self, capacity: int) -> None:
        """Raise UserError if a text of `capacity` tokens and a block after it exceed the head's context."""
        length = capacity + self.config.block_size
        if length > self.config.context:
            raise UserError(
                f"a text of {length} tokens exceeds the DFlash head's context of {self.config.context} tokens; use "
                "shorter prompts or a smaller --max-new-tokens"
            )

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """Return an empty cache for `rows` texts of at most `capacity` tokens each, with room for a block after each.

        Raises:
            UserError: a text and its block exceed the head's context.
        """
        c = self.config
        self.check_fits(capacity)
        self.rope.reach(capacity + c.block_size)
        size = (c.layers, rows, c.kv_heads, capacity + c.block_size, c.head_dim)
        return Cache(self.embed.new_zeros(size), self.embed.new_zeros(size))

    @torch.inference_mode()
    def read(self, states: Tensor, positions: Tensor, cache: Cache) -> None:
        """Compute keys and values from states of the target, and cache them. ``cache.used`` does not change.

        states: States of the A target layers that the head reads, [B, T, A D]. positions: Their positions, [B, T].
        """
        context = F.linear(states, self.weights["fc.weight"])
        context = rms_norm(context, self.weights["hidden_norm.weight"], self.config.eps)
        places = self._places(positions)
        for layer in range(self.config.layers):
            self._store(layer, context, places, cache)

    @torch.inference_mode()
    def block_logits(self, last: Tensor, count: int, cache: Cache) -> Tensor:
        """Return the logits of the next `count` tokens of each text, [B, count, V].

        last: Last token of each text, [B]. Its position is ``cache.used``, which does not change.
        """
        return self.spread(self.own_logits(self.block_states(last, count, cache)[:, -count:]))

    def own_logits(self, states: Tensor) -> Tensor:
        """Return the logits of the head's W ids, [B, T, W], from final states [B, T, D]."""
        # two dimensions, because torch copies the whole output layer for a slice of three
        return F.linear(states.flatten(0, 1), self.head).unflatten(0, states.shape[:2])

    def text_logits(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Return the logits of the next N tokens of each text, [B, N, V].

        tokens: The last token of each text, and the N - 1 tokens after it, [B, N]. A DFlash head reads only the last
        token of the text. A DSpark head reads all N tokens.
        """
        return self.block_logits(tokens[:, 0], tokens.shape[1], cache)

    def spread(self, logits: Tensor) -> Tensor:
        """Return logits [..., W] of the head's ids as logits of all ids, [..., V], with -inf for ids that it lacks."""
        return logits if self.ids is None else spread(logits, self.ids, self.config.vocab)

    def block_states(self, last: Tensor, count: int, cache: Cache) -> Tensor:
        """Run the head's pass over a block. Return the states of its T tokens after the final norm, [B, T, D].

        last: Last token of each text, [B]. count: Number of drafted tokens, which the last `count` states predict.
        """
        c = self.config
        first = int(not self.config.sample_from_anchor)
        masks = last.new_full((len(last), count - 1 + first), c.mask_token_id)
        ids = torch.cat([last.unsqueeze(1), masks], 1)  # [B, T]
        used = staged(cache.used, self.device).unsqueeze(1)  # [B, 1]
        places = self._places(used + torch.arange(ids.shape[1], device=self.device))
        end = max(cache.used) + ids.shape[1]
        kinds = list(zip(c.windows, c.causal, strict=True))  # window and causality of each layer
        masks_of = {kind: self._mask(*kind, places.positions, end) for kind in set(kinds)}
        x = F.embedding(ids, self.embed)
        for layer, kind in enumerate(kinds):
            x = x + self._attention(layer, x, places, masks_of[kind], cache)
            normed = rms_norm(x, self._weight(layer, "post_attention_layernorm"), c.eps)
            gate, up = (F.linear(normed, self._weight(layer, f"mlp.{part}_proj")) for part in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, self._weight(layer, "mlp.down_proj"))
        return rms_norm(x, self.weights["norm.weight"], c.eps)

    def _weight(self, layer: int, name: str) -> Tensor:
        return self.weights[f"layers.{layer}.{name}.weight"]

    def _heads(self, layer: int, name: str, x: Tensor) -> Tensor:
        """Return the queries, keys or values ("q", "k" or "v") of x [B, T, D], as [B, T, heads, C]."""
        projected = F.linear(x, self._weight(layer, f"self_attn.{name}_proj"))
        return projected.unflatten(-1, (-1, self.config.head_dim))

    def _places(self, positions: Tensor) -> Places:
        rows = torch.arange(len(positions), device=self.device).unsqueeze(1)
        cos, sin = (table[positions].unsqueeze(2) for table in (self.rope.cos, self.rope.sin))
        return Places(rows, positions, cos, sin)

    def _mask(self, window: int | None, causal: bool, positions: Tensor, end: int) -> Tensor:
        """Return the attention mask of a block over the first `end` positions, bool [B, 1, T, end].

        positions: Positions of the block's tokens, [B, T].
        """
        read = torch.arange(end, device=self.device)
        last = positions if causal else positions[:, -1:].expand_as(positions)
        mask = read <= last.unsqueeze(-1)
        if window is not None:
            mask = mask & (read > positions.unsqueeze(-1) - window)
        return mask.unsqueeze(1)

    def _store(self, layer: int, x: Tensor, places: Places, cache: Cache) -> None:
        """Write a layer's keys and values of x [B, T, D] to the cache."""
        c = self.config
        k, v = self._heads(layer, "k", x), self._heads(layer, "v", x)
        k = rms_norm(k, self._weight(layer, "self_attn.k_norm"), c.eps)  # [B, T, K, C]
        cache.keys[layer][places.rows, :, places.positions] = places.turned(k)
        cache.values[layer][places.rows, :, places.positions] = v

    def _attention(self, layer: int, x: Tensor, places: Places, mask: Tensor, cache: Cache) -> Tensor:
        """Return the attention output [B, T, D] of a block x [B, T, D] that attends to the text and to itself."""
        c = self.config
        end = mask.shape[-1]
        normed = rms_norm(x, self._weight(layer, "input_layernorm"), c.eps)
        self._store(layer, normed, places, cache)
        q = self._heads(layer, "q", normed)
        q = rms_norm(q, self._weight(layer, "self_attn.q_norm"), c.eps)
        q = places.turned(q).transpose(1, 2)  # [B, H, T, C]
        keys, values = cache.keys[layer][:, :, :end], cache.values[layer][:, :, :end]
        out = F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=c.heads > c.kv_heads)
        return F.linear(out.transpose(1, 2).flatten(2), self._weight(layer, "self_attn.o_proj"))


def load(folder: Path, target_path: Path, embed: Tensor, head: Tensor) -> DFlash:
    """Load a DFlash head. Raises UserError: the errors of check and read_parts.

    embed, head: The target's embedding and output layer, [V, D] each.
    """
    config, layer, _ = layout.read_shape(folder, target_path, "dflash")
    return DFlash(config, *read_parts(folder, config, layer, embed, head))


def read_parts(
    folder: Path, config: DFlashShape, layer: Qwen3Config, embed: Tensor, head: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor | None, tuple[Tensor, float]]:
    """Read the weights of a head. Return the arguments of DFlash after `config`: weights, embed, head, ids and rope.

    Args:
        layer: transformers' configuration of the head's layers.
        embed: Embedding of the target, [V, D], for a head without its own.
        head: Output layer of the target, [V, D], for a head without its own.

    Raises:
        UserError: A tensor is missing, unknown or of another size, or draft_ids() refuses d2t and t2d.
    """
    tensors = read_tensors(folder, lambda name: name.removeprefix("model."))
    sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    config.check_tensors(sizes, folder)
    ids = None
    if config.draft_vocab < config.vocab:
        ids = draft_ids(tensors["d2t"], tensors.get("t2d"), config.vocab, folder).to(embed.device)
    weights = {name: t.to(embed.device, embed.dtype) for name, t in tensors.items() if name not in ("d2t", "t2d")}
    return (
        weights,
        weights.get("embed_tokens.weight", embed),
        weights.get("lm_head.weight", head),
        ids,
        rotary(layer, config.head_dim, folder),
    )
