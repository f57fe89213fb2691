"""EAGLE-3 heads as modules to train with training-time test: a head reads its own states in training, as in decoding.

At position i, the head reads the target's hidden states of token i and the embedding of token i + 1, and predicts token
i + 2. This is step 0 of a chain of steps that begins at i. In each later step l, the head reads the embedding of token
i + 1 + l and its own state of step l - 1, at rotary position i + l. As in servers, it attends to step 0 of all
positions up to i, which reads the target's states, and to its own chain up to step l. One pass of the target gives both
the hidden states and the distributions to learn from.

Shapes: B rows, T positions, N tokens that count in the loss, L steps, D hidden, E hidden of the target, A layers of the
target that the head reads, H query heads, C head_dim, V vocab, W draft vocab.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from draftlab.heads.eagle3.layout import Head, HeadShape
from draftlab.heads.training import ChainStudent

Rotary = tuple[Tensor, Tensor]  # cosines and sines
KeysValues = tuple[Tensor, Tensor]  # keys and values of a step, [B, H, T, C] each


class Attention(nn.Module):
    """The attention of an EAGLE-3 head, for one step of training-time test.

    Position i attends to the keys of step 0 at all positions up to i, and to the keys of later steps only at i.
    """

    def __init__(self, config: HeadShape) -> None:
        super().__init__()
        d = config.hidden
        self.head_dim = config.head_dim
        queries = config.heads * config.head_dim
        cached = config.kv_heads * config.head_dim
        self.group = config.heads // config.kv_heads
        self.q_proj = nn.Linear(2 * d, queries, bias=False)
        self.k_proj = nn.Linear(2 * d, cached, bias=False)
        self.v_proj = nn.Linear(2 * d, cached, bias=False)
        self.o_proj = nn.Linear(queries, d, bias=False)
        self.q_norm, self.k_norm = (
            LlamaRMSNorm(config.head_dim, config.eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None, earlier: list[KeysValues]) -> Tensor:
        """Return the attention output, [B, T, D]. Append the step's keys and values to `earlier`.

        Args:
            x: Token embeddings and states, joined, [B, T, 2 D].
            mask: Attention mask to the positions of step 0, [B, 1, T, T]. None stands for a causal mask.
            earlier: Keys and values of all earlier steps.
        """
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), *rotary)
        k, v = (part.repeat_interleave(self.group, 1) for part in (k, v))
        earlier.append((k, v))
        if len(earlier) == 1:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        else:
            out = _attend_along_chains(q, earlier, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _attend_along_chains(q: Tensor, steps: list[KeysValues], mask: Tensor | None) -> Tensor:
    """Return the attention output of a step after step 0, [B, H, T, C].

    Position i attends to the keys of step 0 at all positions up to i, and to the keys of later steps only at i.

    Args:
        q: Queries of the step, [B, H, T, C].
        steps: Keys and values of the steps up to this one.
        mask: Attention mask to the positions of step 0. None stands for a causal mask.
    """
    (first_k, first_v), *own = steps
    width = q.shape[2]
    scale = q.shape[3] ** -0.5
    scores = torch.matmul(q, first_k.transpose(2, 3))  # [B, H, T, T]
    visible = torch.ones(width, width, dtype=torch.bool, device=q.device).tril() if mask is None else mask
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    scores = torch.cat([scores, *((q * k).sum(-1, keepdim=True) for k, _ in own)], -1)
    weights = torch.softmax(scores.float() * scale, -1).to(q.dtype)
    out = torch.matmul(weights[..., :width], first_v)
    for step, (_, v) in enumerate(own):
        out = out + weights[..., width + step, None] * v
    return out


class Layer(nn.Module):
    def __init__(self, config: HeadShape) -> None:
        super().__init__()
        llama: Any = config.llama_config()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden, config.eps) for _ in range(3)
        )
        self.self_attn = Attention(config)
        self.mlp = LlamaMLP(llama)

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rotary: Rotary,
        mask: Tensor | None,
        earlier: list[KeysValues],
    ) -> Tensor:
        """Return the layer's output [B, T, D] for token embeddings and states, [B, T, D] each."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = residual + self.self_attn(torch.cat([self.input_layernorm(embedded), normed], -1), rotary, mask, earlier)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(ChainStudent):
    """An EAGLE-3 head to train. Its embedding is frozen.

    The parameters are named as in the speculators library.
    """

    def __init__(self, config: HeadShape, embedding: Tensor) -> None:
        """Create a head with random weights. embedding: Token embedding that the head reads, [V, E]."""
        super().__init__()
        self.config = config
        layers = len(config.layer_ids)
        size = config.target_hidden
        self.fc = nn.Linear(layers * size, config.hidden, bias=False)
        self.input_norm = LlamaRMSNorm(layers * size, config.eps) if config.norm_before_fc else None
        norms = [LlamaRMSNorm(size, config.eps) for _ in range(layers)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = LlamaRMSNorm(config.hidden, config.eps)
        self.lm_head = nn.Linear(config.hidden, config.draft_vocab, bias=False)
        self.embedding = [embedding]  # in a list, so that torch does not register it as a parameter
        self.scale = nn.Buffer(torch.ones(self.fc.in_features), persistent=False)
        self.rotary = LlamaRotaryEmbedding(cast(Any, config.llama_config()))

    @classmethod
    def of(cls, head: Head, embedding: Tensor) -> "EagleHead":
        student = cls(head.config, embedding if head.embedding is None else head.embedding)
        student.load_state_dict(head.weights)
        return student

    @property
    def norms_before_fc(self) -> list[nn.Module]:
        """Return the norms before fc: one norm for all states, a norm for each layer that the head reads, or none."""
        return [self.input_norm] if self.input_norm is not None else list(self.fc_norm or ())

    def forward(self, ids: Tensor, states: Tensor, steps: int, positions: Tensor | None = None) -> list[Tensor]:
        """Return the input of lm_head in each step l of training-time test, [B, T, D] each.

        In step l, counted from 0, the last 1 + l positions of each sequence are invalid: their next tokens are unknown.

        Args:
            ids: Token ids, [B, T].
            states: The target's states of size E after the A layers that the head reads, joined, [B, T, A E].
            positions: Position of each token in its sequence, [B, T], if rows hold several sequences.
        """
        embedded = F.embedding(ids, self.embedding[0]).to(states)
        hidden = self.fc(self.features(states))
        earlier = []
        outputs = []
        masks = self._masks(hidden, steps, positions)
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        rotary = [self.rotary(hidden, positions + step) for step in range(steps)]
        for step in range(steps):
            hidden = self.layers[0](embedded.roll(-1 - step, 1), hidden, rotary[step], masks[step], earlier)
            outputs.append(self.norm(hidden))
            if self.config.norm_output:
                hidden = outputs[-1]
        return outputs

    def features(self, states: Tensor) -> Tensor:
        """Return the input of fc, [..., A E], for the states of A layers of the target, of width E each.

        If the head has norms before fc, they are applied to the states. Otherwise the states are divided by `scale`.
        """
        norms = self.norms_before_fc
        if not norms:
            return states / self.scale
        parts = states.chunk(len(norms), -1)
        return torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], -1)

    def _masks(self, hidden: Tensor, steps: int, positions: Tensor | None) -> Sequence[Tensor | None]:
        """Return the attention mask of each step, [B, 1, T, T]. None stands for a causal mask.

        A mask separates the sequences of a row, and limits attention to the sliding window.
        """
        width = hidden.shape[1]
        window = self.config.sliding_window
        mask = None
        if positions is not None:
            sequence = (positions == 0).cumsum(1)
            mask = (sequence.unsqueeze(2) == sequence.unsqueeze(1)).tril().unsqueeze(1)
        masks = [mask] * steps
        if window is not None and width + steps > window:
            earlier = torch.ones(1, 1, width, width, dtype=torch.bool, device=hidden.device).tril()
            read = earlier if mask is None else mask
            masks = [read.triu(step - window + 1) for step in range(steps)]
        return masks
