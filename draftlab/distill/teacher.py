"""The target as teacher: its distributions, and text that it writes itself.

B rows, T tokens, N of them that count, D hidden, V vocab.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftlab.data import Batch
from draftlab.distill.fused import Dense, TopK
from draftlab.engine.verify import distribution, draw
from draftlab.llama import Llama


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


@dataclass(frozen=True, slots=True)
class GeneratedRows:
    """Prompts with the target's continuation, ids [N, P + G]; the prompt and what follows eos do not count."""

    ids: np.ndarray
    prompt: int
    eos_id: int | None
    rows: int

    def batch(self, step: int) -> Batch:
        """Rows in turn; they were drawn at random already."""
        picked = self.ids[(step * self.rows + np.arange(self.rows)) % len(self.ids)].astype(np.int64)
        mask = np.ones((self.rows, picked.shape[1] - 1), dtype=np.float32)
        mask[:, : self.prompt - 1] = 0
        if self.eos_id is not None:
            after = np.cumsum(picked[:, self.prompt :] == self.eos_id, axis=1)  # [B, G]
            mask[:, self.prompt :] *= after[:, :-1] == 0  # the eos itself is predicted, nothing after it
        return Batch(picked, mask)


def generate_rows(
    target: Llama,
    prompts: np.ndarray,
    *,
    length: int,
    temperature: float,
    seed: int,
    rows: int,
    advance: Callable[[int], None],
) -> np.ndarray:
    """Continue prompts [N, P] by length tokens, rows at a time: ids [N, P + length], uint32. advance: rows done."""
    parts = []
    for start in range(0, len(prompts), rows):
        part = torch.from_numpy(prompts[start : start + rows].astype(np.int64)).to(target.device)
        rng = torch.Generator().manual_seed(seed * 1_000_003 + start)
        parts.append(_continue(target, part, length, temperature, rng))
        advance(min(start + rows, len(prompts)))
    return torch.cat(parts).numpy().astype(np.uint32)


def cached_rows(path: Path, make: Callable[[], np.ndarray]) -> np.ndarray:
    """The rows kept at path, made and kept if there are none: a resumed run reads the same text."""
    if not path.exists():
        ids = make()
        writing = path.with_suffix(".writing")
        save_file({"ids": ids}, writing)
        writing.rename(path)
    return load_file(path)["ids"]


def _continue(target: Llama, ids: torch.Tensor, length: int, temperature: float, rng: torch.Generator) -> torch.Tensor:
    cache = target.new_cache(len(ids), ids.shape[1] + length)
    fed, out = ids, [ids]
    for _ in range(length):
        probabilities = distribution(target.forward(fed, cache, last=1)[:, -1], temperature)  # [B, V]
        fed = draw(probabilities, torch.rand(len(ids), generator=rng)).unsqueeze(1)
        out.append(fed)
    return torch.cat(out, 1).cpu()
