"""The fast decoder: LLaMA-like models with a static cache, built from Hugging Face tensors by their names.

B rows, T new tokens, S cached + new, H query heads, K kv heads, C head_dim, D hidden, V vocab. Each row of a batch
stands at a length of its own. Rolling back is changing ``Cache.used``: what lies behind it is overwritten, never read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor
from torch.nn import functional as F

from draftlab.errors import UserError
from draftlab.files import validation_text
from draftlab.model import checkpoint
from draftlab.model.shape import Shape

# Families whose forward pass is exactly the one below; others share the layout but scale or gate something.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
HEAD_IDS = "head_ids.json"  # beside a checkpoint: the ids that its head is computed for (draftlab trim)


@dataclass(slots=True)
class Cache:
    """Keys and values, [layers, B, K, capacity, C] each; of each row the first ``used`` positions count, [B].

    hidden_states: input of the head at each position, [B, capacity, D], if set; keep does not reorder it.
    """

    keys: Tensor
    values: Tensor
    used: list[int] = field(default_factory=list)
    hidden_states: Tensor | None = None

    def __post_init__(self) -> None:
        self.used = self.used or [0] * self.keys.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def keep(self, row: int, at: int, path: Sequence[int]) -> None:
        """Of what a row holds from position at on, only path stays, in its order: at + path[0] comes first."""
        end = at + len(path)
        if list(path) != list(range(len(path))):
            for held in (self.keys, self.values):
                held[:, row, :, at:end] = held[:, row, :, [at + i for i in path]]
        self.used[row] = end

    def expand(self, rows: int) -> "Cache":
        """Return the cache of one row, repeated for several."""
        layers, _, *size = self.keys.shape
        keys, values = (cached.expand(layers, rows, *size).contiguous() for cached in (self.keys, self.values))
        return Cache(keys, values, self.used * rows)


@dataclass(frozen=True, slots=True)
class Tree:
    """Where tokens of one pass stand to each other: how deep, [T], and which of them each one sees, [T, T] bool."""

    depth: Tensor
    sees: Tensor

    @classmethod
    def from_parents(cls, parents: Sequence[int], device: torch.device = checkpoint.CPU) -> "Tree":
        """A root, token 0, and what descends from it: parents[i] is that of token i + 1, and comes before it."""
        sees = torch.eye(len(parents) + 1, dtype=torch.bool)
        for child, parent in enumerate(parents, 1):
            sees[child] |= sees[parent]
        return cls((sees.sum(1) - 1).to(device), sees.to(device))


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Of one pass over rows that stand at one length, or each at its own."""

    cos: Tensor  # [T, C] or [B, 1, T, C]
    sin: Tensor
    mask: Tensor | None  # [T, S] or [B, 1, T, S]
    slots: tuple[slice | Tensor, ...]  # where in [B, K, capacity, C] the new keys and values go
    end: int  # S


@dataclass(frozen=True, slots=True)
class Block:
    """Weights of one layer; q, k, v and gate, up are stacked, so that each is one product."""

    input_norm: Tensor  # [D]
    qkv: Tensor  # [(H + 2K) C, D]
    qkv_bias: Tensor | None
    qk_norm: tuple[Tensor, Tensor] | None  # [C] each
    o: Tensor  # [D, H C]
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor  # [2 ffn, D]
    gate_up_bias: Tensor | None
    down: Tensor  # [D, ffn]
    down_bias: Tensor | None


class Llama:
    """A decoder for inference: weights, the rotary tables, and one forward pass over a static cache."""

    def __init__(
        self, shape: Shape, weights: Mapping[str, Tensor], inv_freq: Tensor, rope_scale: float, eps: float, context: int
    ) -> None:
        """inv_freq: rotary frequencies, [C / 2]; rope_scale multiplies both tables; context: longest S."""
        self.shape, self.eps, self.context = shape, eps, context
        self.embed = weights["model.embed_tokens.weight"]
        self.head = self.embed if shape.tied else weights["lm_head.weight"]
        self.head_ids: Tensor | None = None
        self.norm = weights["model.norm.weight"]
        self.blocks = [_block(shape, weights, layer) for layer in range(shape.layers)]
        angles = torch.outer(torch.arange(context, dtype=torch.float32), inv_freq.float().cpu())
        angles = torch.cat([angles, angles], -1)  # [context, C]
        # the sign of rotate_half is put into the sine table: x cos + swap_halves(x) sin
        sign = torch.ones(shape.head_dim)
        sign[: shape.head_dim // 2] = -1
        self.cos = (angles.cos() * rope_scale).to(self.embed)
        self.sin = (angles.sin() * rope_scale * sign).to(self.embed)

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def trim_head(self, ids: list[int]) -> None:
        """Compute the logits of these ids alone; those of all others are -inf from now on."""
        self.head_ids = torch.tensor(ids, device=self.device)
        self.head = self.head[self.head_ids]

    def expand_logits(self, logits: Tensor) -> Tensor:
        """What the head gives as logits of every id, [..., V]."""
        if self.head_ids is None:
            return logits
        every = logits.new_full((*logits.shape[:-1], self.shape.vocab), -torch.inf)
        return every.index_copy_(-1, self.head_ids, logits)

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache for rows sequences of at most capacity tokens.

        Raises:
            UserError: capacity is more than the model's context.
        """
        self.check_fits(capacity)
        s = self.shape
        size = (s.layers, rows, s.kv_heads, capacity, s.head_dim)
        return Cache(self.embed.new_zeros(size), self.embed.new_zeros(size))

    def check_fits(self, capacity: int) -> None:
        """Raises UserError: capacity is more than the model's context."""
        if capacity > self.context:
            raise UserError(f"{capacity} tokens do not fit the model's context of {self.context}")

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: Cache, last: int = 0, tree: Tree | None = None) -> Tensor:
        """Feed ids [B, T] behind what each row of the cache holds; logits [B, T, V], or of the last tokens only,
        [B, last, V]. tree: of the T tokens; left out, each follows the one before.

        Raises:
            ValueError: they do not fit the cache.
        """
        width = ids.shape[1]
        if max(cache.used) + width > cache.capacity:
            raise ValueError(f"{max(cache.used) + width} tokens do not fit a cache of {cache.capacity}")
        logits = self.decode(
            ids, cache.keys, cache.values, self._metadata(cache, width, tree), last, cache.hidden_states
        )
        cache.used = [used + width for used in cache.used]
        return logits

    def decode(
        self,
        ids: Tensor,
        keys: Tensor,
        values: Tensor,
        place: AttentionMetadata,
        last: int,
        states: Tensor | None = None,
    ) -> Tensor:
        """The pass itself, of ids in their place. states: as in Cache."""
        x = F.embedding(ids, self.embed)  # [B, T, D]
        for layer, block in enumerate(self.blocks):
            normed = _rms_norm(x, block.input_norm, self.eps)
            x = x + self._attention(block, normed, keys[layer], values[layer], place)
            gate, up = F.linear(_rms_norm(x, block.post_norm, self.eps), block.gate_up, block.gate_up_bias).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, block.down, block.down_bias)
        x = _rms_norm(x[:, -last:] if states is None else x, self.norm, self.eps)
        if states is not None:
            states[place.slots[0], place.slots[2]] = x
        return self.expand_logits(F.linear(x[:, -last:], self.head))

    def _metadata(self, cache: Cache, width: int, tree: Tree | None) -> AttentionMetadata:
        end, device = max(cache.used) + width, self.device
        if tree is None and min(cache.used) == max(cache.used):
            began = end - width
            mask = torch.ones(width, end, dtype=torch.bool, device=device).tril(began) if width > 1 else None
            new = slice(began, end)
            return AttentionMetadata(self.cos[new], self.sin[new], mask, (slice(None), slice(None), new), end)
        return self.attention_metadata(torch.tensor(cache.used, device=device).unsqueeze(1), width, end, tree)

    def attention_metadata(self, used: Tensor, width: int, end: int, tree: Tree | None = None) -> AttentionMetadata:
        """Of width tokens behind used cached ones of each row, [B, 1]; S is end, at least the longest row's."""
        along = torch.arange(width, device=used.device)
        depth = along if tree is None else tree.depth
        sees = torch.ones(width, width, dtype=torch.bool, device=used.device).tril() if tree is None else tree.sees
        ahead = torch.arange(end, device=used.device) - used  # [B, S], of each place: which new token it holds
        among = (ahead >= 0) & (ahead < width) & sees[:, ahead.clamp(0, width - 1)]  # [T, B, S]
        mask = (among | (ahead < 0)).transpose(0, 1).unsqueeze(1)
        rows = torch.arange(len(used), device=used.device).unsqueeze(1)
        cos, sin = self.cos[used + depth].unsqueeze(1), self.sin[used + depth].unsqueeze(1)
        return AttentionMetadata(cos, sin, mask, (rows, slice(None), used + along), end)

    def _attention(self, block: Block, x: Tensor, keys: Tensor, values: Tensor, place: AttentionMetadata) -> Tensor:
        s = self.shape
        qkv = F.linear(x, block.qkv, block.qkv_bias).unflatten(-1, (-1, s.head_dim)).transpose(1, 2)  # [B, H+2K, T, C]
        qk, v = qkv[:, : s.heads + s.kv_heads], qkv[:, s.heads + s.kv_heads :]
        if block.qk_norm is not None:
            q, k = qk[:, : s.heads], qk[:, s.heads :]
            qk = torch.cat([_rms_norm(q, block.qk_norm[0], self.eps), _rms_norm(k, block.qk_norm[1], self.eps)], 1)
        qk = qk * place.cos + qk.roll(s.head_dim // 2, -1) * place.sin
        k = qk[:, s.heads :]
        ragged = not isinstance(place.slots[0], slice)  # then indices lead: [B, T, K, C]
        keys[place.slots] = k.transpose(1, 2) if ragged else k
        values[place.slots] = v.transpose(1, 2) if ragged else v
        out = F.scaled_dot_product_attention(
            qk[:, : s.heads],
            keys[:, :, : place.end],
            values[:, :, : place.end],
            attn_mask=place.mask,
            enable_gqa=s.heads != s.kv_heads,
        )  # [B, H, T, C]
        return F.linear(out.transpose(1, 2).flatten(2), block.o, block.o_bias)


def check_supported(directory: Path) -> Shape:
    """The shape of a checkpoint that this decoder computes; no weight is read.

    Raises:
        UserError: an architecture or rotary scheme that it does not compute.
    """
    return _computed(directory)[0]


def load(directory: Path, dtype: torch.dtype, device: torch.device = checkpoint.CPU) -> Llama:
    """The checkpoint as a Llama. Raises as check_supported."""
    shape, config, (inv_freq, scale) = _computed(directory)
    context = int(str(config.get("max_position_embeddings", 2048)))
    window = config.get("sliding_window")
    if isinstance(window, int) and config.get("use_sliding_window", True):
        context = min(context, window)  # inside the window attention is full
    weights = checkpoint.Weights(directory, dtype, device)
    model = Llama(shape, weights, inv_freq, scale, float(str(config["rms_norm_eps"])), context)
    if (directory / HEAD_IDS).is_file():
        model.trim_head(_head_ids(directory / HEAD_IDS, shape.vocab))
    return model


def _computed(directory: Path) -> tuple[Shape, dict[str, object], tuple[Tensor, float]]:
    """Shape, config and rotary of a supported checkpoint."""
    config, shape = checkpoint.read_config(directory), checkpoint.planned_shape(directory)
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise UserError(f"{directory} is a {kind} model; the engine knows {', '.join(MODEL_TYPES)}")
    if config.get("hidden_act") != "silu":
        raise UserError(f"{directory}: activation {config.get('hidden_act')!r}; the engine computes silu")
    return shape, config, _rotary(directory, shape)


def _head_ids(file: Path, vocab: int) -> list[int]:
    """Raises UserError: not a list of different ids below vocab."""
    try:
        return TypeAdapter(list[Annotated[int, Field(ge=0, lt=vocab)]]).validate_json(file.read_bytes())
    except ValidationError as error:
        raise UserError(f"{file}: {validation_text(error)}") from None


def _block(shape: Shape, weights: Mapping[str, Tensor], layer: int) -> Block:
    attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
    queries, cached = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def stack(prefix: str, rows: dict[str, int], kind: str) -> Tensor:
        """One part in memory beside the whole."""
        whole, at = None, 0
        for name, size in rows.items():
            part = weights[f"{prefix}{name}.{kind}"]
            whole = part.new_empty(sum(rows.values()), *part.shape[1:]) if whole is None else whole
            whole[at : at + size] = part
            at += size
        assert whole is not None
        return whole

    qkv = {"q_proj": queries, "k_proj": cached, "v_proj": cached}
    gate_up = {"gate_proj": shape.ffn, "up_proj": shape.ffn}
    return Block(
        input_norm=weights[f"model.layers.{layer}.input_layernorm.weight"],
        qkv=stack(attention, qkv, "weight"),
        qkv_bias=stack(attention, qkv, "bias") if shape.qkv_bias else None,
        qk_norm=(weights[attention + "q_norm.weight"], weights[attention + "k_norm.weight"]) if shape.qk_norm else None,
        o=weights[attention + "o_proj.weight"],
        o_bias=weights[attention + "o_proj.bias"] if shape.o_bias else None,
        post_norm=weights[f"model.layers.{layer}.post_attention_layernorm.weight"],
        gate_up=stack(mlp, gate_up, "weight"),
        gate_up_bias=stack(mlp, gate_up, "bias") if shape.mlp_bias else None,
        down=weights[mlp + "down_proj.weight"],
        down_bias=weights[mlp + "down_proj.bias"] if shape.mlp_bias else None,
    )


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _rotary(directory: Path, shape: Shape) -> tuple[Tensor, float]:
    """Rotary frequencies [C / 2] and the scale of the tables, by transformers' own rules."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.from_pretrained(directory)
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        return 1.0 / torch.pow(float(str(rope["rope_theta"])), exponents), 1.0
    if kind not in ("linear", "llama3", "yarn"):  # the others change with the length of the text
        raise UserError(f"{directory}: rotary scaling {kind!r}; the engine computes default, linear, llama3 and yarn")
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
