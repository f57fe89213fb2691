"""DFlash heads as modules to train, on many blocks of each text in one pass.

The head drafts one block in a pass. A block begins at an anchor, a random token of the text, and its other tokens are
mask tokens. They attend to tokens of their block, and to the target's hidden states of the tokens before the anchor.

Shapes: B rows, T positions, A blocks of a row, M tokens of a block, K drafted tokens, N predictions, D hidden, H query
heads, G kv heads, C head_dim, V vocab, L layers of the target that the head reads. A M is the product of A and M.
"""

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from draftlab.data import Batch
from draftlab.heads.dflash.layout import DFlashShape
from draftlab.heads.training import StatesStudent, TargetPass
from draftlab.training.fused_loss import chosen
from draftlab.training.losses import Loss
from draftlab.training.objectives import Objective, random_ranks, run_lengths


def run_layer(
    layer: Qwen3DecoderLayer, x: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor
) -> Tensor:
    """Return the output of a layer for all tokens of the blocks, [B, A M, D]: M tokens in each of A blocks per row.

    Args:
        layer: A Qwen3DecoderLayer.
        x: Input of the layer at the tokens of the blocks, [B, A M, D].
        context: The target's states after the head's fc and norm, [B, T, D].
        rotary: Cosines and sines for the positions of the context, followed by the blocks, [B, T + A M, C] each.
        mask: Whether each token of the blocks attends to each position of the context, followed by the blocks,
            [B, 1, A M, T + A M].
    """
    attention = layer.self_attn
    own = layer.input_layernorm(x)
    both = torch.cat([context, own], 1)

    def heads(projection: nn.Module, x: Tensor) -> Tensor:
        return projection(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

    q = attention.q_norm(heads(attention.q_proj, own))  # [B, H, A M, C]
    k = attention.k_norm(heads(attention.k_proj, both))  # [B, G, T + A M, C]
    cos, sin = (table.unsqueeze(1) for table in rotary)
    k = k * cos + rotate_half(k) * sin
    cos, sin = (table[:, :, context.shape[1] :] for table in (cos, sin))
    q = q * cos + rotate_half(q) * sin
    groups = attention.num_key_value_groups
    k, v = (part.repeat_interleave(groups, 1) for part in (k, heads(attention.v_proj, both)))
    out = F.scaled_dot_product_attention(q, k, v.to(q), mask)
    x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x))


class BlockHead(StatesStudent):
    """A DFlash head to train. It uses the target's embedding and LM head, which are frozen.

    The parameters are named as in z-lab's checkpoints.
    """

    def __init__(self, config: DFlashShape, layer: Qwen3Config, embedding: Tensor, output: nn.Module) -> None:
        """Create a head with random weights.

        Args:
            config: Sizes of the head.
            layer: Qwen3Config of the head's layers.
            embedding: The target's embedding, [V, D].
            output: The target's LM head.
        """
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.layer_ids) * config.hidden, config.hidden, bias=False)
        self.hidden_norm, self.norm = (Qwen3RMSNorm(config.hidden, config.eps) for _ in range(2))
        self.layers = nn.ModuleList([Qwen3DecoderLayer(layer, i) for i in range(config.layers)])
        self.rotary = Qwen3RotaryEmbedding(layer)
        self.frozen = [embedding, output]  # a list, so that torch does not register parameters
        self.scale = nn.Buffer(torch.ones(self.fc.in_features), persistent=False)

    def get_output_embeddings(self) -> nn.Module:
        return cast(nn.Module, self.frozen[1])

    def forward(self, ids: Tensor, states: Tensor, anchors: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the hidden states from which the LM head predicts the K drafted tokens of A blocks, [B, A, K, D].

        Args:
            ids: Token ids, [B, T].
            states: The target's states after the L layers that the head reads, joined, [B, T, L D].
            anchors: Index of the first token of each block in its row, [B, A].
            positions: Position of each token in its sequence, [B, T], if rows hold several sequences.
        """
        c = self.config
        count = anchors.shape[1]
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        inside = torch.arange(c.block_size, device=ids.device)
        at = (positions.gather(1, anchors).unsqueeze(-1) + inside).flatten(1)  # [B, A M]
        tokens = anchors.new_full((len(ids), count, c.block_size), c.mask_token_id)
        tokens[..., 0] = ids.gather(1, anchors)
        context = self.hidden_norm(self.fc(states / self.scale))
        x = F.embedding(tokens.flatten(1), cast(Tensor, self.frozen[0])).to(context)
        rotary = self.rotary(context, torch.cat([positions, at], 1))
        kinds = list(zip(c.windows, c.causal, strict=True))
        masks = {kind: self._mask(*kind, anchors, positions, at) for kind in set(kinds)}
        for layer, kind in zip(self.layers, kinds, strict=True):
            x = run_layer(cast(Qwen3DecoderLayer, layer), x, context, rotary, masks[kind])
        return self.norm(x).unflatten(1, (count, -1))[:, :, -c.most :]

    def _mask(self, window: int | None, causal: bool, anchors: Tensor, positions: Tensor, at: Tensor) -> Tensor:
        """Return the attention mask of the tokens of the blocks, M in each of A blocks per row, [B, 1, A M, T + A M].

        The first T columns are the tokens of the text, and the other columns are the tokens of the blocks.

        Args:
            window: Size of the sliding window. None for full attention.
            causal: Whether a token sees no later tokens of its block.
            anchors: Index of the first token of each block in its row, [B, A].
            positions: Position of each token of the text in its sequence, [B, T].
            at: Position of each token of the blocks in its sequence, [B, A M].
        """
        size = self.config.block_size
        block = torch.arange(at.shape[1], device=at.device) // size
        place = anchors.repeat_interleave(size, 1)  # [B, A M]
        sequence = (positions == 0).cumsum(1)
        text = sequence.gather(1, place).unsqueeze(2) == sequence.unsqueeze(1)
        text = text & (torch.arange(positions.shape[1], device=at.device) < place.unsqueeze(2))
        own = (block.unsqueeze(1) == block).expand(len(at), -1, -1)
        own = own.tril() if causal else own
        mask = torch.cat([text, own], 2)
        if window is not None:
            read = torch.cat([positions, at], 1).unsqueeze(1)
            mask = mask & (read > at.unsqueeze(2) - window)
        return mask.unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Anchors:
    """A random choice of anchors in each batch. A block of drafted tokens begins at each anchor.

    Attributes:
        share: Share of anchors among the positions of a row whose mask is not 0. The number of anchors is rounded up.
        most: Number of drafted tokens of a block, K.
    """

    share: float
    most: int
    seed: int

    def drawn(self, batch: Batch, number: int) -> Batch:
        """Return the batch with random anchors, marked by their depths. The draw depends only on `seed` and `number`.

        The depth of an anchor is the number of tokens to predict after it, at most K. Other positions have depth 0.
        """
        counted = batch.mask > 0
        order = random_ranks(counted, self.seed, number)
        chosen = order < np.ceil(self.share * counted.sum(1, keepdims=True))
        ahead = np.minimum(run_lengths(counted), self.most)
        return replace(batch, depths=np.where(chosen & counted, ahead, 0))


class BlockObjective(Objective):
    """A DFlash head with its loss.

    The drafted token at place k of a block, counted from 1, has the weight exp(-(k - 1) / gamma) in the loss. The
    weights are scaled to a mean of 1.
    """

    takes_packed = True

    def __init__(self, student: BlockHead, loss: Loss, temperature: float, gamma: float, anchors: Anchors) -> None:
        super().__init__(student, loss, temperature)
        self.depths = anchors
        decay = torch.exp(-torch.arange(student.config.most) / gamma)
        self.decay = nn.Buffer(decay / decay.mean(), persistent=False)

    def forward(
        self,
        ids: Tensor,
        mask: Tensor,
        teacher: TargetPass,
        positions: Tensor | None,
        depths: Tensor,
    ) -> Tensor:
        """Return the six sums that DistillStep.forward describes, over all predictions of the blocks, [1, 6].

        Without gradients, as in evaluation, return the six sums for each of the K drafted tokens of a block, [K, 6].
        The weights by gamma then do not apply.

        Args:
            ids: Token ids, [B, T + 1].
            mask: Weight of each next token in the loss, [B, T].
            positions: Position of each token in its sequence, [B, T], if rows hold several sequences.
            depths: Number of tokens to predict after each anchor, [B, T]. It is 0 for tokens that are not anchors.
        """
        most = max(1, int((depths > 0).sum(1).max()))
        # a row with fewer anchors is filled up with positions of depth 0, which predict nothing
        anchors = (depths > 0).long().argsort(dim=1, descending=True, stable=True)[:, :most]
        hidden = self.student(ids[:, :-1], teacher.states, anchors, positions)
        age = torch.arange(hidden.shape[2], device=ids.device)
        wanted = age < depths.gather(1, anchors).unsqueeze(-1)  # [B, A, K]
        row = torch.arange(len(ids), device=ids.device).view(-1, 1, 1) * mask.shape[1]
        predicted = (row + anchors.unsqueeze(-1) + age)[wanted]  # [N]
        order = predicted.argsort(stable=True)
        hidden = hidden[wanted][order]
        predicted = predicted[order]
        ages = age.expand_as(wanted)[wanted][order]
        if torch.is_grad_enabled():
            return self._sums(hidden, predicted, ids, mask, teacher, self.decay[ages]).unsqueeze(0)
        parts = [ages == k for k in age]
        return torch.stack([self._sums(hidden[part], predicted[part], ids, mask, teacher) for part in parts])

    def _sums(
        self,
        hidden: Tensor,
        predicted: Tensor,
        ids: Tensor,
        mask: Tensor,
        teacher: TargetPass,
        decay: Tensor | float = 1.0,
    ) -> Tensor:
        """Return the six sums that DistillStep.forward describes, over N predictions, [6].

        Args:
            hidden: Inputs of the LM head, [N, D].
            predicted: Index of each prediction in the flattened mask, [N].
            decay: Weight of each prediction by its place in the block, [N], or one number for all predictions.
        """
        weights = mask.flatten()[predicted] * decay
        target = chosen(teacher.distributions, mask.flatten().nonzero().squeeze(1), predicted)
        head = self.student.get_output_embeddings().get_parameter("weight")
        return self.sums(hidden, head, ids[:, 1:].flatten()[predicted], weights, target)
