"""The target as teacher: its distributions from memory, from disk or from a server.

Shapes: B rows, T tokens, N tokens that count in the loss, D hidden, V vocab, k listed tokens.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from draftlab.data import Batch
from draftlab.model.trimmed_head import output_head, trimmed_head_of
from draftlab.servers.client import Server
from draftlab.target_outputs.outputs import log_rest
from draftlab.target_outputs.targets import score_on_server
from draftlab.training.fused_loss import Dense, TopK


class Distributions(Protocol):
    """A teacher: an object that returns the target's distributions for a batch.

    distributions() returns what the student's objective takes, such as Dense or TopK. takes_packed says whether a row
    of a batch may hold several sequences.
    """

    @property
    def vocab(self) -> int: ...

    @property
    def takes_packed(self) -> bool: ...

    def distributions(self, batch: Batch) -> Any: ...


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The output head (LM head) of a model.

    Attributes:
        plain: Whether the logits are the product of head and last hidden states, without scaling or a cap. It is False
            for a head on disk or in other processes.
        vocab: Number of logits that count. Logits after them are padding. It has no effect on a trimmed head.
        takes_packed: Whether the model keeps the sequences of a row separate if their positions restart at 0.
    """

    plain: bool
    vocab: int
    takes_packed: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel, vocab: int) -> "OutputHead":
        """Return a model's output head. The model runs on a few tokens, to find out the attributes."""
        head = output_head(model)
        weight = head.get_parameter("weight")
        if weight.is_meta or isinstance(weight, DTensor):
            return cls(False, vocab)
        ids = torch.arange(4, device=model.device).unsqueeze(0)
        with torch.no_grad():
            whole = model(input_ids=ids, use_cache=False).logits
            hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            plain = torch.equal(head(hidden).float(), whole.float())
        return cls(plain, vocab, _keeps_apart(model))

    def hidden_and_weight(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        counted: Tensor,
        positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run a model. Return its last hidden states, [N, D], and the weight of its head, [V, D].

        If `plain` is False, return logits, [N, V], and None.

        Args:
            ids: Token ids, [B, T].
            counted: Indices of the N wanted positions in the flattened ids.
            positions: Position of each token in its sequence, [B, T], if rows hold several sequences.
            attention_mask: Mask, [B, 1, T, T]. None for causal attention.
        """
        trimmed = trimmed_head_of(model)
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if positions is not None:
            inputs["position_ids"] = positions.to(ids.device)
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask
        if not self.plain:
            logits = model(**inputs).logits
            logits = logits[..., : self.vocab] if trimmed is None else logits.index_select(-1, trimmed.ids)
            return logits.flatten(0, 1)[counted.to(logits.device)], None
        hidden = model.get_decoder()(**inputs).last_hidden_state  # [B, T, D]
        weight = output_head(model).get_parameter("weight")
        weight = weight[: self.vocab] if trimmed is None else weight.index_select(0, trimmed.ids)
        return hidden.flatten(0, 1)[counted.to(hidden.device)], weight


@torch.no_grad()
def _keeps_apart(model: PreTrainedModel) -> bool:
    """Return whether two sequences in one row stay separate if the positions of the second sequence restart at 0.

    The model runs on a few tokens to find out. For example, state-space models do not separate sequences. The states of
    the second sequence may change a little by rounding. This change must therefore be at most a tenth of the change
    that occurs if the positions do not restart, so that the second sequence reads the first.
    """
    decoder = model.get_decoder()
    was_training = model.training
    if not isinstance(decoder, nn.Module) or "position_ids" not in inspect.signature(decoder.forward).parameters:
        return False
    model.eval()
    ids = torch.arange(8, device=model.device).unsqueeze(0)
    apart, following, packed = (
        decoder(input_ids=tokens, position_ids=places % modulus, use_cache=False).last_hidden_state[:, -4:].float()
        for tokens, places, modulus in ((ids[:, 4:], ids[:, :4], 8), (ids, ids, 8), (ids, ids, 4))
    )
    model.train(was_training)
    return bool((packed - apart).norm() <= 0.1 * (following - apart).norm())


def logits_of(model: PreTrainedModel) -> int:
    """Return the number of logits of a model, padding included."""
    return output_head(model).get_parameter("weight").shape[0]


def shard_by_layer(model: PreTrainedModel) -> None:
    """Shard a model's weights over all processes by FSDP2. A layer's weights are gathered while the layer runs."""
    for layer in model.get_decoder().get_submodule("layers").children():
        fully_shard(layer)
    fully_shard(model)


class LocalTeacher:
    """The target in memory as teacher. Its distributions are on `device`.

    accelerate may spread the target over several devices and disk.
    """

    def __init__(self, model: PreTrainedModel, vocab: int, device: torch.device) -> None:
        self.model = model
        self.vocab = vocab
        self.device = device
        self.head = OutputHead.of(model, vocab)
        self.takes_packed = self.head.takes_packed
        self._weight: Tensor | None = None  # copy of the frozen head on `device`, if the head is on another

    @torch.no_grad()
    def distributions(self, batch: Batch) -> Dense:
        """Return the target's distributions at the N positions that the mask of the batch selects."""
        ids = torch.from_numpy(batch.ids[:, :-1]).to(self.model.device)
        counted = torch.from_numpy(batch.mask).flatten().nonzero().squeeze(1)
        positions = None if batch.positions is None else torch.from_numpy(batch.positions)
        hidden, weight = self.head.hidden_and_weight(self.model, ids, counted, positions)
        weight = None if weight is None else weight.detach()
        if weight is not None and weight.device != self.device:
            self._weight = weight.to(self.device) if self._weight is None else self._weight
            weight = self._weight
        return Dense(hidden.to(self.device), weight)


@dataclass(frozen=True, slots=True)
class StoredTeacher:
    """A teacher that takes the distributions from stored target outputs, which the batches contain."""

    vocab: int
    takes_packed: bool = True

    def distributions(self, batch: Batch) -> TopK:
        """Return the target's distributions at the N positions that the mask of the batch selects."""
        top = batch.top_logprobs
        counted = batch.mask > 0
        assert top is not None  # batches of stored outputs have them
        return TopK(*(torch.from_numpy(array[counted]) for array in (top.ids, top.log_p, top.tail)))


@dataclass(frozen=True, slots=True)
class ServedTeacher:
    """The target on a server as teacher. The server lists the k most probable tokens at each position of a batch."""

    server: Server
    k: int
    vocab: int
    takes_packed: bool = False  # a server reads every sequence as a separate text

    def distributions(self, batch: Batch) -> TopK:
        """Return the target's distributions at the N positions that the mask of the batch selects.

        Raises:
            UserError: The server fails, or lists a token id that is not below `vocab`.
        """
        ids, log_p, _ = score_on_server(self.server, batch, self.k, self.vocab)
        return TopK(*(torch.from_numpy(array) for array in (ids, log_p, log_rest(log_p))))
