"""The target as teacher: its distributions, from memory, from a cache or from a server.

B rows, T tokens, N of them that count, D hidden, V vocab, k listed tokens.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from draftlab.data import Batch
from draftlab.distill.fused_loss import Dense, TopK
from draftlab.errors import UserError
from draftlab.servers.client import Server


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
        if batch.top_logprobs is None:
            raise ValueError("the batch carries nothing of a target")
        counted = batch.mask > 0
        listed = (batch.top_logprobs.ids, batch.top_logprobs.log_p, batch.top_logprobs.tail)
        return TopK(*(torch.from_numpy(array[counted]) for array in listed))


@dataclass(frozen=True, slots=True)
class ServedTeacher:
    """A target that runs on a server, asked anew for every batch: its k most probable tokens."""

    server: Server
    k: int
    vocab: int

    def look(self, batch: Batch) -> TopK:
        """Its distributions after the positions that count.

        Raises:
            UserError: the server fails, or lists a token beyond the vocabulary.
        """
        ids, log_p, _ = look_through(self.server, batch, self.k, self.vocab)
        return TopK(*(torch.from_numpy(array) for array in (ids, log_p, log_rest(log_p))))


def look_through(server: Server, batch: Batch, k: int, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a server thinks of the tokens that count: ids [N, k], log-probabilities [N, k], those of what came [N].

    Raises:
        UserError: the server fails, or lists a token beyond vocab.
    """
    counted = batch.mask > 0
    ends = [int(row.nonzero()[0].max(initial=-1)) + 1 for row in counted]  # what comes later decides nothing
    asked = [number for number, end in enumerate(ends) if end]
    found = server.prompt_logprobs([batch.ids[number, : ends[number] + 1].tolist() for number in asked], k)
    ids, log_p, came = [np.empty((0, k), np.int64)], [np.empty((0, k), np.float32)], [np.empty(0, np.float32)]
    for number, row in zip(asked, found, strict=True):
        here = counted[number, : ends[number]]
        ids.append(np.array(row.top_ids, np.int64)[here])
        log_p.append(np.array(row.top_logprobs, np.float32)[here])
        came.append(np.array(row.logprobs, np.float32)[here])
    listed = np.concatenate(ids)
    check_ids(listed, vocab)
    return listed, np.concatenate(log_p), np.concatenate(came)


def check_ids(listed: np.ndarray, vocab: int) -> None:
    """Raises UserError: a server lists a token beyond vocab."""
    if listed.max(initial=0) >= vocab:
        raise UserError(f"the server lists token {listed.max()}, and the vocabulary here has {vocab} tokens")


def log_rest(log_p: np.ndarray) -> np.ndarray:
    """log mass of the tokens that are not listed: [N, k] -> [N]. 1e-7 where rounding leaves less."""
    listed = np.logaddexp.reduce(log_p.astype(np.float64), axis=-1)
    return np.log(-np.expm1(np.minimum(listed, -1e-7))).astype(np.float32)
