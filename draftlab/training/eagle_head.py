"""EAGLE-3 heads as modules to train, by training-time test: a head reads its own states in training, as in decoding.

B rows, T positions, N tokens that count, L steps, D hidden, E hidden of the target, A layers read, V vocab, W draft
vocab.

The head at position i reads the token at i + 1 with the target's states of i, and predicts the token at i + 2. In
step l of a chain that begins at i it reads the token at i + 1 + l with its own state of step l - 1, at rotary
position i + l. It attends to the target's states up to i and to its own of this chain: as servers decode with it.
One pass of the target gives the distributions and the states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from draftlab.data import Batch
from draftlab.model.eagle import Head, HeadShape
from draftlab.model.hf_decoder import decoder_layers
from draftlab.model.trimmed_head import TrimmedHead
from draftlab.training.fused_loss import Dense, fused_loss
from draftlab.training.losses import Loss, wide
from draftlab.training.objectives import Objective
from draftlab.training.teachers import OutputHead, logits_of


@dataclass(frozen=True, slots=True)
class TargetPass:
    """The target's distributions over the draft ids, and its states, [B, T, A E], from which a head learns."""

    distributions: Dense
    states: Tensor


@dataclass(frozen=True, slots=True)
class Places:
    """Places of tokens. rotary: cosines and sines of each step. masks: positions that each step reads, [B, 1, T, T].

    None reads all earlier positions. A mask keeps apart the sequences that share a row, and holds a sliding window.
    """

    rotary: list[tuple[Tensor, Tensor]]
    masks: Sequence[Tensor | None]


class Attention(nn.Module):
    """The attention of one step: all positions of the first step up to its own, and its chain's later positions."""

    def __init__(self, config: HeadShape) -> None:
        super().__init__()
        d, self.head_dim = config.hidden, config.head_dim
        queries, cached = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.group = config.heads // config.kv_heads
        self.q_proj = nn.Linear(2 * d, queries, bias=False)
        self.k_proj = nn.Linear(2 * d, cached, bias=False)
        self.v_proj = nn.Linear(2 * d, cached, bias=False)
        self.o_proj = nn.Linear(queries, d, bias=False)
        self.q_norm, self.k_norm = (
            (LlamaRMSNorm(config.head_dim, config.eps), LlamaRMSNorm(config.head_dim, config.eps))
            if config.qk_norm
            else (nn.Identity(), nn.Identity())
        )

    def forward(
        self, x: Tensor, at: "Places", step: int, earlier: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """x: [B, T, 2 D]. earlier: keys and values [B, H, T, C] of the steps before, to which this one's are added."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), *at.rotary[step])
        k, v = (part.repeat_interleave(self.group, 1) for part in (k, v))
        earlier.append((k, v))
        if step == 0:
            mask = at.masks[0]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        else:
            out = _attend_along_chains(q, earlier, at.masks[step])
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _attend_along_chains(
    q: Tensor, steps: list[tuple[Tensor, Tensor]], mask: Tensor | None
) -> Tensor:
    """Attend from q [B, H, T, C] to the first step's positions up to each own, and to its own place in later steps."""
    (first_k, first_v), *own = steps
    width, scale = q.shape[2], q.shape[3] ** -0.5
    scores = torch.matmul(q, first_k.transpose(2, 3))  # [B, H, T, T]
    visible = (
        torch.ones(width, width, dtype=torch.bool, device=q.device).tril() if mask is None else mask
    )
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
        at: Places,
        step: int,
        earlier: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Return the layer's output [B, T, D], from token embeddings and states, [B, T, D] each."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = residual + self.self_attn(
            torch.cat([self.input_layernorm(embedded), normed], -1), at, step, earlier
        )
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """The student. Its parameters have the names of speculators; the target's embedding is read, and not trained.

    scale: sizes of the target's states, by which fc divides while it learns: some are a thousand times as large.
    """

    scale: Tensor

    def __init__(self, config: HeadShape, embedding: Tensor) -> None:
        """embedding: the target's, [V, E]."""
        super().__init__()
        self.config = config
        layers, size = len(config.layer_ids), config.target_hidden
        self.fc = nn.Linear(layers * size, config.hidden, bias=False)
        self.input_norm = LlamaRMSNorm(layers * size, config.eps) if config.norm_before_fc else None
        norms = [LlamaRMSNorm(size, config.eps) for _ in range(layers)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = LlamaRMSNorm(config.hidden, config.eps)
        self.lm_head = nn.Linear(config.hidden, config.draft_vocab, bias=False)
        self.embedding = [embedding]  # a list, so that it is no part of the student
        self.scale = nn.Buffer(torch.ones(self.fc.in_features), persistent=False)
        self.rotary = LlamaRotaryEmbedding(cast(Any, config.llama_config()))

    @classmethod
    def of(cls, head: Head, embedding: Tensor) -> "EagleHead":
        student = cls(head.config, embedding if head.embedding is None else head.embedding)
        student.load_state_dict(head.weights)
        return student

    @property
    def reads_normed(self) -> bool:
        """Return whether there are norms before fc."""
        return self.config.norm_before_fc or self.config.fc_norm

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def get_decoder(self) -> nn.Module:
        return self

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of a head that reads the states as they are."""
        tensors = self.state_dict()
        return tensors | {"fc.weight": tensors["fc.weight"] / self.scale}

    def forward(
        self, ids: Tensor, states: Tensor, steps: int, positions: Tensor | None = None
    ) -> list[Tensor]:
        """Return what lm_head reads after each step, [B, T, D] each; the last 1 + l positions of step l mean nothing.

        ids: [B, T]. states: the target's, [B, T, A E]. positions: See Batch; the end of each sequence means nothing.
        """
        embedded = F.embedding(ids, self.embedding[0]).to(states)
        hidden, earlier, outputs = self.fc(self.features(states)), [], []
        at = self._places(hidden, steps, positions)
        for step in range(steps):
            hidden = self.layers[0](embedded.roll(-1 - step, 1), hidden, at, step, earlier)
            outputs.append(self.norm(hidden))
            if self.config.norm_output:
                hidden = outputs[-1]
        return outputs

    def features(self, states: Tensor) -> Tensor:
        """Return what fc reads of the target's states, [..., A E]."""
        if self.input_norm is not None:
            return self.input_norm(states)
        if self.fc_norm is None:
            return states / self.scale
        parts = states.chunk(len(self.fc_norm), -1)
        return torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)

    def _places(self, hidden: Tensor, steps: int, positions: Tensor | None) -> Places:
        width, window = hidden.shape[1], self.config.sliding_window
        mask = None
        if positions is None:
            positions = torch.arange(width, device=hidden.device).unsqueeze(0)
        else:
            sequence = (positions == 0).cumsum(1)
            mask = (sequence.unsqueeze(2) == sequence.unsqueeze(1)).tril().unsqueeze(1)
        masks = [mask] * steps
        if window is not None and width + steps > window:
            earlier = torch.ones(1, 1, width, width, dtype=torch.bool, device=hidden.device).tril()
            read = earlier if mask is None else mask
            masks = [read.triu(step - window + 1) for step in range(steps)]
        return Places([self.rotary(hidden, positions + step) for step in range(steps)], masks)


class EagleObjective(Objective):
    """The student and its loss: the mean over the steps of training-time test, each on the same tokens."""

    takes_packed = True
    rates = MappingProxyType({"lm_head.weight": 0.25})  # the target's, which needs little change

    def __init__(
        self, student: EagleHead, ids: Tensor, loss: Loss, temperature: float, steps: int
    ) -> None:
        """ids: the target's id of each draft id, [W]."""
        super().__init__()
        self.student, self.loss, self.temperature, self.steps = student, loss, temperature, steps
        self.trimmed = TrimmedHead.of(ids, student.config.vocab)

    def forward(
        self,
        ids: Tensor,
        mask: Tensor,
        teacher: TargetPass,
        positions: Tensor | None = None,
        depths: None = None,
    ) -> Tensor:
        """Return the sums of DistillStep, [G, 6]: their mean over the steps; without gradients each step's own.

        ids: [B, T + 1]. mask: [B, T], zero in the first L positions of a sequence: no chain of L steps ends there.
        positions: Same as in Batch. depths: none, as this is no parallel draft.
        """
        counted = mask.flatten().nonzero().squeeze(1)
        labels, weights = ids[:, 1:].flatten()[counted], mask.flatten()[counted]
        outputs = self.student(ids[:, :-1], teacher.states, self.steps, positions)
        # L of [N, D]
        read = [out.flatten(0, 1)[counted - 1 - step] for step, out in enumerate(outputs)]
        target = teacher.distributions
        if not torch.is_grad_enabled():
            return torch.stack([self._sums(hidden, labels, weights, target) for hidden in read])
        # all steps in one, so that the target's head is applied once per token
        rows = torch.arange(len(counted), device=ids.device).repeat_interleave(self.steps)
        target = replace(target, rows=rows)
        hidden = torch.stack(read, 1).flatten(0, 1)
        return self._sums(hidden, labels[rows], weights[rows] / self.steps, target).unsqueeze(0)

    def _sums(self, hidden: Tensor, labels: Tensor, weights: Tensor, target: Dense) -> Tensor:
        head, loss = self.student.lm_head.weight, self.loss.at(self.progress)
        loss_sum = fused_loss(
            hidden, head, labels, weights, target, loss, self.temperature, trimmed=self.trimmed
        )
        watched = [
            loss_sum.objective,
            loss_sum.cross_entropy,
            loss_sum.acceptance,
            loss_sum.slack,
            loss_sum.agreement,
        ]
        return torch.stack([*(value.detach() for value in watched), loss_sum.objective])


ROWS = 256  # rows of whole logits at once


class EagleTeacher:
    """A frozen target that transformers runs, with hooks on the layers that the head reads.

    It may be spread over devices and disk by accelerate. All that it returns is on device, the student's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layer_ids: tuple[int, ...],
        ids: Tensor,
        temperature: float,
        device: torch.device,
    ) -> None:
        """ids: the target's id of each draft id, [W]. temperature: The temperature of the loss.

        Raises:
            UserError: the model's layers cannot be found.
        """
        self.model = model.eval().requires_grad_(False)
        self.ids, self.temperature, self.device = ids.to(device), temperature, device
        self.head = OutputHead.of(model, logits_of(model))
        self.whole_head = self.weight if self.head.plain else None
        self.draft_head = None if self.whole_head is None else self.whole_head[self.ids]
        self.states: dict[int, Tensor] = dict.fromkeys(layer_ids, torch.empty(0))
        layers = decoder_layers(model)
        for layer_id in layer_ids:
            if layer_id == 0:
                layers[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)
            else:
                layers[layer_id - 1].register_forward_hook(self._keeper(layer_id))

    @property
    def takes_packed(self) -> bool:
        return self.head.takes_packed

    @property
    def vocab(self) -> int:
        return len(self.ids)

    @property
    def weight(self) -> Tensor:
        return (
            cast(nn.Module, self.model.get_output_embeddings())
            .get_parameter("weight")
            .detach()
            .to(self.device)
        )

    @property
    def embedding(self) -> Tensor:
        return (
            cast(nn.Module, self.model.get_input_embeddings())
            .get_parameter("weight")
            .detach()
            .to(self.device)
        )

    @torch.no_grad()
    def distributions(self, batch: Batch) -> TargetPass:
        """Return the target's distributions at the positions that count, and its states at all."""
        ids = torch.from_numpy(batch.ids[:, :-1]).to(self.model.device)
        counted = torch.from_numpy(batch.mask).flatten().nonzero().squeeze(1)
        positions = None if batch.positions is None else torch.from_numpy(batch.positions)
        hidden = self.head.hidden_and_weight(self.model, ids, counted, positions)[0].to(self.device)
        states = self._joined()  # states of that pass
        if self.whole_head is None:
            return TargetPass(
                Dense(hidden[:, self.ids], None, log_total=self._log_total(hidden)), states
            )
        total = torch.cat(
            [self._log_total(part @ self.whole_head.T) for part in hidden.split(ROWS)]
        )
        return TargetPass(Dense(hidden, self.draft_head, log_total=total), states)

    @torch.no_grad()
    def states_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states that the head reads, [B, T, A E], and what the target's output layer reads, [B, T, E]."""
        decoder, ids = cast(Any, self.model.get_decoder()), ids.to(self.model.device)
        read = decoder(input_ids=ids, use_cache=False).last_hidden_state
        return self._joined(), read.to(self.device)

    def _joined(self) -> Tensor:
        return torch.cat([self.states[i].to(self.device) for i in sorted(self.states)], -1)

    def _log_total(self, logits: Tensor) -> Tensor:
        return torch.logsumexp(wide(logits) / self.temperature, -1)

    def _keeper(self, layer_id: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self.states[layer_id] = output[0] if isinstance(output, tuple) else output

        return keep

    def _keep_input(self, module: nn.Module, args: Any, named: Any) -> None:
        self.states[0] = args[0] if args else named["hidden_states"]
