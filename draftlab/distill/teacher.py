"""The target as teacher: its distributions, from memory or from a cache.

B rows, T tokens, N of them that count, D hidden, V vocab.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftlab.data import Batch
from draftlab.distill.fused import Dense, TopK


@dataclass(frozen=True, slots=True)
class PlainHead:
    """Whether a model's logits are its head's product with the last hidden states, and nothing more.

    Then the product may be taken in parts. Models that scale or cap their logits give whole logits instead.
    """

    plain: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> "PlainHead":
        """Tried on a few tokens."""
        ids = torch.arange(4, device=model.device).unsqueeze(0)
        with torch.no_grad():
            whole = model(input_ids=ids, use_cache=False).logits
            hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            return cls(torch.equal(_head(model)(hidden).float(), whole.float()))

    def hidden_and_weight(self, model: PreTrainedModel, ids: Tensor, counted: Tensor) -> tuple[Tensor, Tensor | None]:
        """At the counted positions of ids [B, T]: hidden states [N, D] and head [V, D], or logits [N, V] and None."""
        if not self.plain:
            return model(input_ids=ids, use_cache=False).logits.flatten(0, 1)[counted], None
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, D]
        return hidden.flatten(0, 1)[counted], _head(model).get_parameter("weight")


def _head(model: PreTrainedModel) -> nn.Module:
    head = model.get_output_embeddings()
    assert head is not None  # every causal language model has one
    return head


class LocalTeacher:
    """The target itself, in memory."""

    def __init__(self, model: PreTrainedModel, compiled: bool) -> None:
        self.model, self.head = model, PlainHead.of(model)
        if compiled:
            model.get_decoder().compile()

    @torch.no_grad()
    def look(self, batch: Batch) -> Dense:
        """Its distributions after the positions that count."""
        ids = torch.from_numpy(batch.ids[:, :-1]).to(self.model.device)
        counted = torch.from_numpy(batch.mask).flatten().nonzero().squeeze(1).to(self.model.device)
        hidden, weight = self.head.hidden_and_weight(self.model, ids, counted)
        return Dense(hidden, None if weight is None else weight.detach())


class CachedTeacher:
    """What a cache keeps of the target; the target itself is not needed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def look(self, batch: Batch) -> TopK:
        """Its distributions after the positions that count.

        Raises:
            ValueError: a batch that does not come from a cache.
        """
        if batch.listed is None:
            raise ValueError("the batch carries nothing of a target")
        counted = batch.mask > 0
        listed = (batch.listed.ids, batch.listed.log_p, batch.listed.tail)
        return TopK(*(torch.from_numpy(array[counted]).to(self.device) for array in listed))
