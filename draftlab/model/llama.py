"""LLaMA-like decoders with a static cache, for inference, built from Hugging Face tensors.

B rows (texts of a batch), T new tokens, S cached + new tokens, K KV heads, G query heads per KV head, H = K G query
heads, C head_dim, D hidden, V vocab. Each row of a batch has its own length. Lowering ``Cache.used[row]`` rolls a row
back: the positions from there on are not read, and the next tokens overwrite them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftlab.errors import OtherArchitecture
from draftlab.model import checkpoint
from draftlab.model.decoder import (
    NARROW,
    AttentionMetadata,
    Decoder,
    Tree,
    attend,
    end_of_pass,
    pinned_backends,
)
from draftlab.model.devices import staged
from draftlab.model.hf_files import FULL, SLIDING, context_of, read_head_ids
from draftlab.model.shape import Shape
from draftlab.reading import reading


@dataclass(frozen=True, slots=True)
class LayerStates:
    """States of A layers at each position of a cache.

    Args:
        ids: Ids of the layers, ascending. Id i is the residual stream after i layers.
        states: The concatenated states of these layers, [B, capacity, A D].
    """

    ids: tuple[int, ...]
    states: Tensor

    def store(self, layers: int, x: Tensor, slots: "tuple[slice | Tensor, ...]") -> None:
        """Store x [B, T, D], the residual stream after `layers` layers, if `layers` is in ids.

        slots: Same as in AttentionMetadata.
        """
        if layers in self.ids:
            at = self.ids.index(layers) * x.shape[-1]
            self.states[slots[0], slots[2], at : at + x.shape[-1]] = x

    def rows(self, mask: Tensor) -> "LayerStates":
        """Return the LayerStates of only the rows that a mask selects, bool [B]."""
        return LayerStates(self.ids, self.states[mask])

    def keep(self, row: int, at: int, path: Sequence[int]) -> None:
        """Keep the states of accepted drafted tokens, see Cache.keep."""
        self.states[row, at : at + len(path)] = self.states[row, [at + i for i in path]]


@dataclass(slots=True)
class Cache:
    """A KV cache. Only the first ``used[row]`` positions of a row are valid.

    Args:
        keys: [layers, B, K, capacity, C].
        values: [layers, B, K, capacity, C].
        used: [B]. Default: 0 for each row.
        layer_states: Store for the states of the layers that a drafter reads. None: they are not stored.
    """

    keys: Tensor
    values: Tensor
    used: list[int] = field(default_factory=list)
    layer_states: LayerStates | None = None

    def __post_init__(self) -> None:
        self.used = self.used or [0] * self.keys.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def keep(self, row: int, at: int, path: Sequence[int]) -> None:
        """Keep the accepted drafted tokens of a row, and drop its other drafted tokens.

        at: Position of the first drafted token. path: Indices of the accepted tokens among the drafted tokens. The
        token at position at + path[j] moves to position at + j.
        """
        end = at + len(path)
        if list(path) != list(range(len(path))):
            for cached in (self.keys, self.values):
                cached[:, row, :, at:end] = cached[:, row, :, [at + i for i in path]]
            if self.layer_states is not None:
                self.layer_states.keep(row, at, path)
        self.used[row] = end

    def copy_from(self, part: "Cache", rows: range) -> None:
        """Copy the keys and values of `part`, a cache of only these rows, to the first positions of the rows."""
        at = slice(rows.start, rows.stop)
        self.keys[:, at, :, : part.capacity] = part.keys
        self.values[:, at, :, : part.capacity] = part.values

    def rows(self, mask: Tensor) -> "Cache":
        """Return a copy of the cache with only the rows that a mask selects, bool [B]."""
        used = [used for used, keep in zip(self.used, mask.tolist(), strict=True) if keep]
        layers = self.layer_states and self.layer_states.rows(mask)
        return Cache(self.keys[:, mask], self.values[:, mask], used, layers)


@dataclass(frozen=True, slots=True)
class Block:
    """Weights of one layer. q, k and v are stacked to one matrix, and so are gate and up.

    input_norm and post_norm normalise the inputs of attention and MLP. attention_norm and mlp_norm normalise the
    outputs. OLMo 2 has only norms of outputs. Other models have only norms of inputs.
    """

    input_norm: Tensor | None  # [D]
    qkv: Tensor  # [(H + 2K) C, D]
    qkv_bias: Tensor | None
    qk_norm: tuple[Tensor, Tensor] | None  # [C] each, or over all heads, [H C] and [K C]
    o: Tensor  # [D, H C]
    o_bias: Tensor | None
    post_norm: Tensor | None
    gate_up: Tensor  # [2 ffn, D]
    gate_up_bias: Tensor | None
    down: Tensor  # [D, ffn]
    down_bias: Tensor | None
    attention_norm: Tensor | None
    mlp_norm: Tensor | None


class Llama(Decoder):
    """A LLaMA-like model that runs in draftlab's own engine, with a static cache."""

    hidden_norm: Tensor | None = None  # only EAGLE-3 heads have it, see heads/eagle3/decoder.py
    norm_before_residual = False  # only EAGLE-3 heads set it
    # sliding window: number of latest tokens that attention reads, including the current token; None: all tokens
    window: int | None = None

    def __init__(
        self,
        shape: Shape,
        weights: Mapping[str, Tensor],
        inv_freq: Tensor,
        rope_scale: float,
        eps: float,
        context: int,
    ) -> None:
        """Make a model from weights by name.

        Args:
            inv_freq: Rotary frequencies, [C / 2].
            rope_scale: Factor of the rotary tables cos and sin.
            context: Length in tokens of the longest text.
        """
        self.shape = shape
        self.eps = eps
        self.context = context
        names = shape.names()
        self.embed = weights[names["embed"]]
        self.head = self.embed if shape.tied else weights[names["head"]]
        self.head_ids: Tensor | None = None
        self.pard_token: int | None = None  # mask token of a parallel draft (model/parallel.py)
        self.norm = weights[names["norm"]]
        self.blocks = [_block(shape, weights, layer) for layer in range(shape.layers)]
        self.rope = RotaryTables(inv_freq, rope_scale, context, self.embed)

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def vocab(self) -> int:
        return self.shape.vocab

    @property
    def architecture(self) -> Shape:
        return self.shape

    @property
    def weight_bytes(self) -> int:
        return self.shape.weight_bytes(self.embed.itemsize)

    @property
    def kv_bytes(self) -> int:
        return self.shape.kv_bytes_per_token(self.embed.itemsize)

    def trim_head(self, ids: list[int]) -> None:
        """Reduce the LM head to the token ids `ids`. The logits of all other ids become -inf."""
        self.head_ids = torch.tensor(ids, device=self.device)
        self.head = self.head[self.head_ids]

    def expand_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of a trimmed LM head as logits of all ids, [..., V], with -inf for the missing ids.

        Logits of a head that is not trimmed are returned as they are.
        """
        return logits if self.head_ids is None else spread(logits, self.head_ids, self.shape.vocab)

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """Return an empty cache for `rows` texts of at most `capacity` tokens each.

        Raises:
            UserError: capacity exceeds the model's context.
        """
        self.check_fits(capacity)
        self.rope.reach(capacity)
        s = self.shape
        size = (s.layers, rows, s.kv_heads, capacity, s.head_dim)
        return Cache(self.embed.new_zeros(size), self.embed.new_zeros(size))

    def new_layer_states(self, cache: Cache, ids: tuple[int, ...]) -> LayerStates:
        """Return empty LayerStates for every position of a cache. ids: Ids of the layers, see LayerStates."""
        rows = cache.keys.shape[1]
        capacity = cache.capacity
        return LayerStates(ids, self.embed.new_zeros(rows, capacity, len(ids) * self.shape.hidden))

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: Cache, last: int = 0, tree: Tree | None = None) -> Tensor:
        """Append ids [B, T] to the cache, and return their logits, [B, T, V].

        Args:
            last: If not 0, return only the logits of the last `last` tokens, [B, last, V].
            tree: Token tree of the T tokens. Default: each token follows the token before it.

        Raises:
            ValueError: the tokens do not fit the cache.
        """
        width = ids.shape[1]
        end_of_pass(cache, width)
        metadata = self._metadata(cache, width, tree)
        logits = self.decode(ids, cache, metadata, last)
        cache.used = [used + width for used in cache.used]
        return logits

    def decode(self, ids: Tensor, cache: Cache, metadata: AttentionMetadata, last: int) -> Tensor:
        """Run a pass over ids [B, T], and return the logits of the last tokens, [B, last, V].

        The pass writes to the cache, but cache.used does not change. last: 0 stands for all tokens.
        """
        x = F.embedding(ids, self.embed)  # [B, T, D]
        layer_states = cache.layer_states
        with pinned_backends(self.device):
            for layer, block in enumerate(self.blocks):
                if layer_states is not None:
                    layer_states.store(layer, x, metadata.slots)
                x = self.run_layer(layer, x, self._normed(x, block.input_norm), cache, metadata)
        if layer_states is not None:
            layer_states.store(len(self.blocks), x, metadata.slots)
        x = rms_norm(x[:, -last:], self.norm, self.eps)
        return self.expand_logits(F.linear(x, self.head))

    def run_layer(self, layer: int, residual: Tensor, x: Tensor, cache: Cache, metadata: AttentionMetadata) -> Tensor:
        """Run a layer, and return the residual stream after it, [B, T, D]. x: Input of the layer's attention."""
        block = self.blocks[layer]
        added = self._attention(block, x, cache.keys[layer], cache.values[layer], metadata)
        residual = residual + self._normed(added, block.attention_norm)
        x = self._normed(residual, block.post_norm)
        gate, up = F.linear(x, block.gate_up, block.gate_up_bias).chunk(2, -1)
        added = F.linear(F.silu(gate) * up, block.down, block.down_bias)
        return residual + self._normed(added, block.mlp_norm)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, weight, self.eps)

    def _metadata(self, cache: Cache, width: int, tree: Tree | None) -> AttentionMetadata:
        end = max(cache.used) + width
        device = self.device
        slides = self.window is not None and end > self.window
        if tree is not None or slides or min(cache.used) != max(cache.used):
            return self.attention_metadata(staged(cache.used, device).unsqueeze(1), width, end, tree)
        start = end - width
        folded = width == 1 or (end - width > 0 and width <= NARROW)
        mask: Tensor | None = None
        if width > 1 and folded:
            attended = torch.ones(width, end, dtype=torch.bool, device=device).tril(start)
            mask = self._folded_mask(attended[None, None])
        elif width > 1 and start:
            mask = causal_lower_right(width, end)
        new = slice(start, end)
        return AttentionMetadata(
            self.rope.cos[new],
            self.rope.sin[new],
            mask,
            (slice(None), slice(None), new),
            end,
            folded,
        )

    def attention_metadata(self, used: Tensor, width: int, end: int, tree: Tree | None = None) -> AttentionMetadata:
        """Return the metadata of a pass whose rows may have different lengths.

        used: Number of cached tokens of each row, [B, 1]. width: Number of new tokens per row, T. end: Number of cache
        positions that attention reads, S.
        """
        own = tree or Tree.chain(width, used.device)
        # [B, 1, S]: at each position, the index among the new tokens
        new = (torch.arange(end, device=used.device) - used).unsqueeze(1)
        among = own.mask.expand(len(used), width, width).gather(2, new.clamp(0, width - 1).expand(-1, width, -1))
        attended = ((new >= 0) & (new < width) & among) | (new < 0)
        if self.window is not None:
            # distance of each position from each new token, [B, T, S]
            age = (used + own.depth).unsqueeze(2) - torch.arange(end, device=used.device)
            recent = age < self.window
            # a tree is never deeper than the window
            attended &= recent if tree is None else recent | (new >= 0)
        attended = attended.unsqueeze(1)
        rows = torch.arange(len(used), device=used.device).unsqueeze(1)
        positions = used + own.depth
        cos, sin = (table[positions].unsqueeze(1) for table in (self.rope.cos, self.rope.sin))
        slots = used + torch.arange(width, device=used.device)
        folded = width <= NARROW
        mask = self._folded_mask(attended) if folded else attended
        return AttentionMetadata(cos, sin, mask, (rows, slice(None), slots), end, folded)

    def _folded_mask(self, attended: Tensor) -> Tensor:
        """Convert a mask, bool [B, 1, T, S], to numbers to add to the scores of folded heads, [B, 1, G T, S]."""
        bias = torch.zeros(attended.shape, dtype=self.embed.dtype, device=attended.device)
        return bias.masked_fill_(~attended, -torch.inf).repeat(1, 1, self.shape.heads // self.shape.kv_heads, 1)

    def _attention(self, block: Block, x: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata) -> Tensor:
        s = self.shape
        # [B, H+2K, T, C]
        qkv = F.linear(x, block.qkv, block.qkv_bias).unflatten(-1, (-1, s.head_dim)).transpose(1, 2)
        qk = qkv[:, : s.heads + s.kv_heads]
        v = qkv[:, s.heads + s.kv_heads :]
        if block.qk_norm is not None:
            parts = qk[:, : s.heads], qk[:, s.heads :]
            qk = torch.cat(
                [self._head_norm(x, weight) for x, weight in zip(parts, block.qk_norm, strict=True)],
                1,
            )
        qk = qk * metadata.cos + qk.roll(s.head_dim // 2, -1) * metadata.sin
        k = qk[:, s.heads :]
        # indexing by tensors puts the indexed dimensions first: [B, T, K, C]
        ragged = not isinstance(metadata.slots[0], slice)
        keys[metadata.slots] = k.transpose(1, 2) if ragged else k
        values[metadata.slots] = v.transpose(1, 2) if ragged else v
        out = attend(qk[:, : s.heads], keys[:, :, : metadata.end], values[:, :, : metadata.end], metadata)
        return F.linear(out.transpose(1, 2).flatten(2), block.o, block.o_bias)

    def _head_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x, queries or keys [B, H, T, C], after RMSNorm per head or, with whole_qk_norm, over all heads."""
        if not self.shape.whole_qk_norm:
            return rms_norm(x, weight, self.eps)
        whole = rms_norm(x.transpose(1, 2).flatten(2), weight, self.eps)  # [B, T, H C]
        return whole.unflatten(2, (x.shape[1], -1)).transpose(1, 2)


# Multipliers in Granite's config.json, each with the roles of the weights that it multiplies.
MULTIPLIERS: dict[str, tuple[str, ...]] = {
    "embedding_multiplier": ("embed",),
    "attention_multiplier": ("q", "q_bias"),  # replaces 1 / sqrt(C)
    "residual_multiplier": ("o", "o_bias", "down", "down_bias"),
    "logits_scaling": ("head",),  # a divisor of the logits
}


class Multiplied(Mapping[str, Tensor]):
    """Granite's weights by name. Access multiplies some of them by a factor from config.json, see MULTIPLIERS."""

    def __init__(self, weights: Mapping[str, Tensor], shape: Shape, config: Mapping[str, object]) -> None:
        """Wrap weights. shape: The model's shape with tied=False, because head and embedding have different factors."""
        self.weights = weights
        self.embed = shape.names()["embed"]
        self.factors: dict[str, float] = {}
        for key, roles in MULTIPLIERS.items():
            factor = float(str(config.get(key, 1.0)))
            if key == "attention_multiplier":
                factor *= shape.head_dim**0.5
            factor = 1 / factor if key == "logits_scaling" else factor
            for layer in range(shape.layers):
                names = shape.names(layer)
                self.factors |= {names[role]: factor for role in roles if role in names}

    def __getitem__(self, name: str) -> Tensor:
        # a tied head is the embedding
        weight = self.weights[name if name in self.weights else self.embed]
        factor = self.factors.get(name, 1.0)
        return weight if factor == 1 else (weight.float() * factor).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def check_supported(directory: Path) -> Shape:
    """Check that draftlab's engine runs a checkpoint, and return its shape. Weights need not be downloaded.

    Raises:
        UserError: files are broken, or the weights are quantised.
        OtherArchitecture: the engine does not support the architecture, activation or rotary scaling.
    """
    return _supported(directory)[0]


def load(directory: Path, dtype: torch.dtype, device: torch.device = checkpoint.CPU) -> Llama:
    """Load a checkpoint into draftlab's engine. Raises UserError: the errors of check_supported."""
    shape, config, (inv_freq, scale), window = _supported(directory)
    context = context_of(config, 2048)
    weights: Mapping[str, Tensor] = checkpoint.Weights(directory, dtype, device)
    if MULTIPLIERS.keys() & config.keys():
        shape = shape.model_copy(update={"tied": False})
        weights = Multiplied(weights, shape, config)
    model = Llama(shape, weights, inv_freq, scale, float(str(config["rms_norm_eps"])), context)
    model.window = window
    if (ids := read_head_ids(directory, shape.vocab)) is not None:
        model.trim_head(ids)
    return model


def _supported(
    directory: Path,
) -> tuple[Shape, dict[str, object], tuple[Tensor, float], int | None]:
    """Return a checkpoint's shape, its config, its rotary frequencies with their scale, and its sliding window.

    Raises:
        UserError: the errors of check_supported.
    """
    config = checkpoint.read_config(directory)
    shape = checkpoint.read_shape(directory)
    kind = config.get("model_type")
    if kind not in checkpoint.MODEL_TYPES:
        raise OtherArchitecture(
            f"{directory} is a {kind} model, but draftlab's engine runs only {', '.join(checkpoint.MODEL_TYPES)}"
        )
    if config.get("hidden_act") != "silu":
        raise OtherArchitecture(
            f"{directory} has the activation {config.get('hidden_act')!r}, but draftlab's engine runs only silu"
        )
    with reading(f"{directory}/config.json cannot be used"):
        full = checkpoint.auto_config(directory)
        eps = {"rms_norm_eps": full.rms_norm_eps}  # transformers' default
    window = _window(full, directory)
    return shape, config | eps, rotary(full, shape.head_dim, directory), window


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Return the sliding window in tokens, or None if every layer reads the whole text.

    Only some of the layers may have it. config: transformers' config, with layer_types if its layers may differ.
    """
    fields = type(config).__dataclass_fields__  # a field that the class does not declare is ignored
    window = config.sliding_window if "sliding_window" in fields else None
    kinds = config.layer_types if "layer_types" in fields else [SLIDING]
    short = window is not None and window < context_of(config.to_dict())
    return window if short and SLIDING in kinds else None


def _window(config: PreTrainedConfig, directory: Path) -> int | None:
    """Return the sliding window of all layers. Raises OtherArchitecture: only some of the layers have it."""
    window = sliding_window(config)
    if window is not None and FULL in getattr(config, "layer_types", ()):
        raise OtherArchitecture(
            f"{directory} has a sliding window of {window} tokens in some layers only, but draftlab's engine runs only "
            "one kind of attention"
        )
    return window


def _block(shape: Shape, weights: Mapping[str, Tensor], layer: int) -> Block:
    names = shape.names(layer)

    def tensor(role: str) -> Tensor | None:
        return weights[names[role]] if role in names else None

    def stack(*roles: str) -> Tensor:
        return torch.cat([weights[names[role]] for role in roles])

    return Block(
        input_norm=tensor("input_norm"),
        qkv=stack("q", "k", "v"),
        qkv_bias=stack("q_bias", "k_bias", "v_bias") if shape.qkv_bias else None,
        qk_norm=(weights[names["q_norm"]], weights[names["k_norm"]]) if "q_norm" in names else None,
        o=weights[names["o"]],
        o_bias=tensor("o_bias"),
        post_norm=tensor("post_norm"),
        gate_up=stack("gate", "up"),
        gate_up_bias=stack("gate_bias", "up_bias") if shape.mlp_bias else None,
        down=weights[names["down"]],
        down_bias=tensor("down_bias"),
        attention_norm=tensor("attention_norm"),
        mlp_norm=tensor("mlp_norm"),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def spread(logits: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """Return logits [..., W] of the W ids in `ids` as logits of all ids, [..., vocab]. All other logits are -inf."""
    full = logits.new_full((*logits.shape[:-1], vocab), -torch.inf)
    return full.index_copy_(-1, ids, logits)


class RotaryTables:
    """The rotary tables cos and sin, [length, C] each. They are as long as the longest text so far.

    A context of a million tokens would need gigabytes, although most requests are short.
    """

    def __init__(self, inv_freq: Tensor, scale: float, context: int, like: Tensor) -> None:
        """Make empty tables.

        Args:
            inv_freq: Rotary frequencies, [C / 2].
            scale: Factor of both tables.
            context: Largest length.
            like: A tensor with the dtype and the device of the tables.
        """
        self._inv_freq = inv_freq
        self._scale = scale
        self.context = context
        self._like = like
        self.cos, self.sin = rotary_tables(inv_freq, scale, 0, like)

    def reach(self, length: int) -> None:
        """Make the tables long enough for texts of `length` tokens, which is at most the context."""
        if length > len(self.cos):
            longer = min(self.context, max(length, 2 * len(self.cos), LEAST_ROTARY))
            self.cos, self.sin = rotary_tables(self._inv_freq, self._scale, longer, self._like)


def rotary_tables(inv_freq: Tensor, scale: float, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rotary tables cos and sin, [length, C] each, in the dtype and on the device of `like`.

    The table sin includes the sign of rotate_half: the rotated x is x cos + x.roll(C / 2, -1) sin.

    inv_freq: Rotary frequencies, [C / 2]. scale: Factor of both tables.
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inv_freq.float().cpu())
    angles = torch.cat([angles, angles], -1)
    sign = torch.ones(angles.shape[1])
    sign[: len(inv_freq)] = -1
    return (angles.cos() * scale).to(like), (angles.sin() * scale * sign).to(like)


LEAST_ROTARY = 4096  # tokens
# kinds that do not depend on the length of the text
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def rotary(config: PreTrainedConfig, head_dim: int, directory: Path) -> tuple[Tensor, float]:
    """Return the rotary frequencies, [C / 2], and the factor of the rotary tables, from transformers' config.

    Raises:
        OtherArchitecture: the kind of rotary scaling is not supported, because it depends on the length of the text.
    """
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / torch.pow(float(str(rope["rope_theta"])), exponents), 1.0
    if kind not in ROPE_KINDS:
        raise OtherArchitecture(
            f"{directory} has the rotary scaling {kind!r}, but draftlab's engine runs only default, linear, llama3 and "
            "yarn"
        )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
