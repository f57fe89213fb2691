"""The target as teacher: its distributions from memory, from disk or from a server.

B rows, T tokens, N of them that count, D hidden, V vocab, k listed tokens.
"""

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from draftlab.data import Batch
from draftlab.model.trimmed_head import trimmed_head_of
from draftlab.training.fused_loss import Dense, TopK

if TYPE_CHECKING:
    from draftlab.servers.client import Server


class ListingTeacher(Protocol):
    """A teacher that is not in memory, and lists its most probable tokens.

    takes_packed: rows of a batch may hold several sequences.
    """

    @property
    def vocab(self) -> int: ...

    @property
    def takes_packed(self) -> bool: ...

    def distributions(self, batch: Batch) -> TopK: ...


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The head of a model, which makes its logits.

    plain: The product of its head and the last hidden states, so that it may be taken in parts. Models that scale or
    cap their logits give whole logits instead, and so do models whose head lies on disk or in other processes. vocab:
    the first logits count, others are padding; of a trimmed head those of its ids count. takes_packed: the model keeps
    the sequences of a row apart by their positions.
    """

    plain: bool
    vocab: int
    takes_packed: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel, vocab: int) -> "OutputHead":
        """Run a few tokens through the model to see its kind."""
        head = _head(model)
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
        """Return hidden states [N, D] and head [V, D], or logits [N, V] and None, at the counted positions of ids.

        positions: Positions of tokens in their sequences, [B, T], if rows hold several. attention_mask: of other than
        causal attention, [B, 1, T, T].
        """
        trimmed = trimmed_head_of(model)
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if positions is not None:
            inputs["position_ids"] = positions.to(ids.device)
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask
        if not self.plain:
            logits = model(**inputs).logits
            logits = (
                logits[..., : self.vocab]
                if trimmed is None
                else logits.index_select(-1, trimmed.ids)
            )
            return logits.flatten(0, 1)[counted.to(logits.device)], None
        hidden = model.get_decoder()(**inputs).last_hidden_state  # [B, T, D]
        weight = _head(model).get_parameter("weight")
        weight = weight[: self.vocab] if trimmed is None else weight.index_select(0, trimmed.ids)
        return hidden.flatten(0, 1)[counted.to(hidden.device)], weight


@torch.no_grad()
def _keeps_apart(model: PreTrainedModel) -> bool:
    """Run two sequences in one row, to see whether positions that start again keep the second from the first.

    Not so for state-space models, whose state goes on. Rounding is told from leaks by what the first sequence changes
    where positions go on.
    """
    decoder, was_training = model.get_decoder(), model.training
    if (
        not isinstance(decoder, nn.Module)
        or "position_ids" not in inspect.signature(decoder.forward).parameters
    ):
        return False
    model.eval()
    ids = torch.arange(8, device=model.device).unsqueeze(0)
    apart, following, packed = (
        decoder(input_ids=tokens, position_ids=places % modulus, use_cache=False)
        .last_hidden_state[:, -4:]
        .float()
        for tokens, places, modulus in ((ids[:, 4:], ids[:, :4], 8), (ids, ids, 8), (ids, ids, 4))
    )
    model.train(was_training)
    return bool((packed - apart).norm() <= 0.1 * (following - apart).norm())


def logits_of(model: PreTrainedModel) -> int:
    """Return how many logits a model has, padding included."""
    return _head(model).get_parameter("weight").shape[0]


def _head(model: PreTrainedModel) -> nn.Module:
    head = model.get_output_embeddings()
    assert head is not None  # every causal language model has one
    return head


def shard_by_layer(model: PreTrainedModel) -> None:
    """Shard a model's weights over all processes (FSDP2); each layer is gathered while it runs."""
    for layer in model.get_decoder().get_submodule("layers").children():
        fully_shard(layer)
    fully_shard(model)


class LocalTeacher:
    """The target in memory, perhaps spread over devices and disk by accelerate. Its distributions come to device."""

    def __init__(self, model: PreTrainedModel, vocab: int, device: torch.device) -> None:
        self.model, self.head, self.device = model, OutputHead.of(model, vocab), device
        self._weight: Tensor | None = None  # copy of a head that is elsewhere; it does not learn

    @property
    def takes_packed(self) -> bool:
        return self.head.takes_packed

    @torch.no_grad()
    def distributions(self, batch: Batch) -> Dense:
        """Return the target's distributions at the positions that count."""
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
    """The target's outputs as stored with the text; the target itself is not needed."""

    vocab: int
    takes_packed: bool = True

    def distributions(self, batch: Batch) -> TopK:
        """Return the target's distributions at the positions that count.

        Raises:
            ValueError: the batch carries none.
        """
        if batch.top_logprobs is None:
            raise ValueError("the batch carries no outputs of a target")
        counted = batch.mask > 0
        listed = (batch.top_logprobs.ids, batch.top_logprobs.log_p, batch.top_logprobs.tail)
        return TopK(*(torch.from_numpy(array[counted]) for array in listed))


@dataclass(frozen=True, slots=True)
class ServedTeacher:
    """A target that runs on a server and is asked for its k most probable tokens for every batch."""

    server: "Server"
    k: int
    vocab: int
    takes_packed: bool = False  # a server reads every text from its start

    def distributions(self, batch: Batch) -> TopK:
        """Return the target's distributions at the positions that count.

        Raises:
            UserError: the server fails, or lists a token beyond the vocabulary.
        """
        from draftlab.target_outputs.outputs import log_rest
        from draftlab.target_outputs.targets import score_on_server

        ids, log_p, _ = score_on_server(self.server, batch, self.k, self.vocab)
        return TopK(*(torch.from_numpy(array) for array in (ids, log_p, log_rest(log_p))))


def moved_to(device: torch.device, teacher: Dense | TopK) -> Dense | TopK:
    """Return listed tokens on a device; a local teacher's distributions are there already."""
    if not isinstance(teacher, TopK):
        return teacher
    return TopK(teacher.ids.to(device), teacher.log_p.to(device), teacher.tail.to(device))
