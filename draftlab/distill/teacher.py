"""The target as teacher: its distributions, from memory or from a cache.

B rows, T tokens, N of them that count, D hidden, V vocab, k listed tokens.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from draftlab.data import Batch
from draftlab.distill.fused import Dense, TopK


class Listing(Protocol):
    """A teacher that is not in memory: it lists the most probable of its vocab tokens."""

    @property
    def vocab(self) -> int: ...

    def look(self, batch: Batch) -> TopK: ...


@dataclass(frozen=True, slots=True)
class PlainHead:
    """Whether a model's logits are its head's product with the last hidden states, and nothing more.

    Then the product may be taken in parts. Models that scale or cap their logits give whole logits instead, and so do
    models whose head lies on disk or in other processes. vocab: the first so many logits count, others are padding.
    """

    plain: bool
    vocab: int

    @classmethod
    def of(cls, model: PreTrainedModel, vocab: int) -> "PlainHead":
        """Tried on a few tokens."""
        head = _head(model)
        weight = head.get_parameter("weight")
        if weight.is_meta or isinstance(weight, DTensor):
            return cls(False, vocab)
        ids = torch.arange(4, device=model.device).unsqueeze(0)
        with torch.no_grad():
            whole = model(input_ids=ids, use_cache=False).logits
            hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            return cls(torch.equal(head(hidden).float(), whole.float()), vocab)

    def hidden_and_weight(self, model: PreTrainedModel, ids: Tensor, counted: Tensor) -> tuple[Tensor, Tensor | None]:
        """At the counted positions of ids [B, T]: hidden states [N, D] and head [V, D], or logits [N, V] and None."""
        if not self.plain:
            logits = model(input_ids=ids, use_cache=False).logits[..., : self.vocab]
            return logits.flatten(0, 1)[counted.to(logits.device)], None
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, D]
        return hidden.flatten(0, 1)[counted.to(hidden.device)], _head(model).get_parameter("weight")[: self.vocab]


def logits_of(model: PreTrainedModel) -> int:
    """How many logits a model has, padding included."""
    return _head(model).get_parameter("weight").shape[0]


def _head(model: PreTrainedModel) -> nn.Module:
    head = model.get_output_embeddings()
    assert head is not None  # every causal language model has one
    return head


def shard_by_layer(model: PreTrainedModel) -> None:
    """Spread a model's weights over all processes (FSDP2); each layer is gathered while it runs."""
    for layer in model.get_decoder().get_submodule("layers").children():
        fully_shard(layer)
    fully_shard(model)


class LocalTeacher:
    """The target itself, in memory or spread over devices and disk by accelerate; what it says comes to device."""

    def __init__(self, model: PreTrainedModel, vocab: int, device: torch.device) -> None:
        self.model, self.head, self.device = model, PlainHead.of(model, vocab), device

    @torch.no_grad()
    def look(self, batch: Batch) -> Dense:
        """Its distributions after the positions that count."""
        ids = torch.from_numpy(batch.ids[:, :-1]).to(self.model.device)
        counted = torch.from_numpy(batch.mask).flatten().nonzero().squeeze(1)
        hidden, weight = self.head.hidden_and_weight(self.model, ids, counted)
        return Dense(hidden.to(self.device), None if weight is None else weight.detach().to(self.device))


@dataclass(frozen=True, slots=True)
class CachedTeacher:
    """What a cache keeps of the target; the target itself is not needed."""

    vocab: int

    def look(self, batch: Batch) -> TopK:
        """Its distributions after the positions that count.

        Raises:
            ValueError: a batch that does not come from a cache.
        """
        if batch.listed is None:
            raise ValueError("the batch carries nothing of a target")
        counted = batch.mask > 0
        listed = (batch.listed.ids, batch.listed.log_p, batch.listed.tail)
        return TopK(*(torch.from_numpy(array[counted]) for array in listed))
