"""EAGLE-3 heads as modules to train, by training-time test: what follows a head's own states is learnt on those states.

B rows, T positions, L steps, D hidden, E hidden of the target, A layers read, V vocab, W draft vocab.

The head at position i reads the token at i + 1 beside the target's states of i, and predicts the token at i + 2. In
step l of a chain that begins at i it reads the token at i + 1 + l beside its own state of step l - 1, at rotary
position i + l. It attends to the target's states up to i and to its own of this chain: as servers decode with it.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftlab.distill.fused_loss import Dense, fused_loss
from draftlab.distill.losses import Loss
from draftlab.distill.objectives import Objective
from draftlab.model.eagle import Head, HeadConfig
from draftlab.model.trimmed_head import TrimmedHead


@dataclass(frozen=True, slots=True)
class TargetPass:
    """The target's distributions over the draft ids, and its states, [B, T, A E], from which a head learns."""

    distributions: Dense
    states: Tensor


class Attention(nn.Module):
    """The attention of one step: all positions of the first step up to its own, and its chain's later ones."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        d, self.head_dim = config.hidden, config.head_dim
        queries, cached = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.group = config.heads // config.kv_heads
        self.q_proj = nn.Linear(2 * d, queries, bias=False)
        self.k_proj = nn.Linear(2 * d, cached, bias=False)
        self.v_proj = nn.Linear(2 * d, cached, bias=False)
        self.o_proj = nn.Linear(queries, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x: [B, T, 2 D]. earlier: keys and values [B, H, T, C] of the steps before, to which this one's are added."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        k, v = (part.repeat_interleave(self.group, 1) for part in (k, v))
        earlier.append((k, v))
        if len(earlier) == 1:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = _attend_along_chains(q, earlier)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _attend_along_chains(q: Tensor, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attend from q [B, H, T, C] to the first step's positions up to each own, and to its own place in later steps."""
    (first_k, first_v), *own = steps
    width, scale = q.shape[2], q.shape[3] ** -0.5
    scores = torch.matmul(q, first_k.transpose(2, 3))  # [B, H, T, T]
    later = torch.ones(width, width, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)
    scores = torch.cat([scores, *((q * k).sum(-1, keepdim=True) for k, _ in own)], -1)
    weights = torch.softmax(scores.float() * scale, -1).to(q.dtype)
    out = torch.matmul(weights[..., :width], first_v)
    for step, (_, v) in enumerate(own):
        out = out + weights[..., width + step, None] * v
    return out


class Layer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        llama: Any = config.llama_config()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden, config.eps) for _ in range(3)
        )
        self.self_attn = Attention(config)
        self.mlp = LlamaMLP(llama)

    def forward(
        self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, earlier: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the layer's output [B, T, D], from token embeddings and states, [B, T, D] each."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = residual + self.self_attn(torch.cat([self.input_layernorm(embedded), normed], -1), cos, sin, earlier)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """The student. Its parameters have the names of speculators; the target's embedding is read, and not trained."""

    def __init__(self, config: HeadConfig, embedding: Tensor) -> None:
        """embedding: the target's, [V, E]."""
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.layer_ids) * config.target_hidden, config.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = LlamaRMSNorm(config.hidden, config.eps)
        self.lm_head = nn.Linear(config.hidden, config.draft_vocab, bias=False)
        self.embedding = [embedding]  # in a list, so that it is no part of the student
        self.rotary = LlamaRotaryEmbedding(cast(Any, config.llama_config()))

    @classmethod
    def of(cls, head: Head, embedding: Tensor) -> "EagleHead":
        student = cls(head.config, embedding if head.embedding is None else head.embedding)
        student.load_state_dict(head.weights)
        return student

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def get_decoder(self) -> nn.Module:
        return self

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, ids: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        """Return what lm_head reads after each step, [B, T, D] each; the last 1 + l positions of step l mean nothing.

        ids: [B, T]. states: the target's, [B, T, A E].
        """
        embedded = F.embedding(ids, self.embedding[0]).to(states)
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        hidden, earlier, outputs = self.fc(states), [], []
        for step in range(steps):
            cos, sin = self.rotary(hidden, positions + step)
            hidden = self.layers[0](embedded.roll(-1 - step, 1), hidden, cos, sin, earlier)
            outputs.append(self.norm(hidden))
        return outputs


class EagleObjective(Objective):
    """The student and its loss: the mean over the steps of training-time test, each on the same tokens."""

    def __init__(self, student: EagleHead, ids: Tensor, loss: Loss, temperature: float, steps: int) -> None:
        """ids: the target's id of each draft id, [W]."""
        super().__init__()
        self.student, self.loss, self.temperature, self.steps = student, loss, temperature, steps
        self.trimmed = TrimmedHead.of(ids, student.config.vocab)

    def forward(
        self, ids: Tensor, mask: Tensor, teacher: TargetPass, positions: None = None, depths: None = None
    ) -> Tensor:
        """Return the sums of DistillStep, [G, 6]: their mean over the steps; without gradients each step's own.

        positions, depths: none, as a row holds one sequence.
        """
        sums = self.by_step(ids, mask, teacher)
        return sums.mean(0, keepdim=True) if torch.is_grad_enabled() else sums

    def by_step(self, ids: Tensor, mask: Tensor, teacher: TargetPass) -> Tensor:
        """Return the sums of DistillStep for each step, [L, 6].

        ids: [B, T + 1]. mask: [B, T], zero in the first L columns: no chain of L steps ends there.
        """
        counted = mask.flatten().nonzero().squeeze(1)
        labels, weights = ids[:, 1:].flatten()[counted], mask.flatten()[counted]
        loss, target = self.loss.at(self.progress), teacher.distributions
        sums = []
        for step, hidden in enumerate(self.student(ids[:, :-1], teacher.states, self.steps)):
            chosen, head = hidden.flatten(0, 1)[counted - 1 - step], self.student.lm_head.weight
            found = fused_loss(chosen, head, labels, weights, target, loss, self.temperature, trimmed=self.trimmed)
            watched = [found.objective, found.cross_entropy, found.acceptance, found.slack, found.agreement]
            sums.append(torch.stack([*(value.detach() for value in watched), found.objective]))
        return torch.stack(sums)
