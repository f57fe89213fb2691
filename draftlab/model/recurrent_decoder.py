"""Models of transformers with recurrent layers (Mamba, linear attention, convolutions) as decoders that roll back.

A recurrent state cannot drop its last tokens. Each row therefore has its own cache, and a snapshot of its recurrent
states at an earlier position. Rolling back restores the snapshot, crops the keys of attention layers to the same
position, and reads the tokens after that position again.

B rows, T new tokens, V vocab.
"""

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from draftlab.errors import UserError
from draftlab.model.decoder import Decoder, Tree, end_of_pass
from draftlab.model.hf_decoder import RECURRENT, HFDecoder, has_layers, new_past
from draftlab.model.llama import LayerStates

# clones a tensor, or all tensors in nested dicts
copied = partial(tree_map_only, Tensor, Tensor.clone)
# attributes that a recurrent layer of transformers changes from token to token
STATES = ("conv_states", "recurrent_states", "has_previous_state")


@dataclass
class RecurrentRow:
    """The cache of one row, with a snapshot.

    Args:
        past: transformers' cache of the row.
        tokens: Token ids in the cache.
        base: Number of tokens in the cache when the snapshot was taken.
        snapshot: The recurrent layers of the cache, and copies of their states by name.
    """

    past: DynamicCache
    tokens: list[int] = field(default_factory=list)
    base: int = 0
    snapshot: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)

    def take_snapshot(self) -> None:
        self.base = len(self.tokens)
        self.snapshot = []
        for layer in self.past.layers:
            if isinstance(layer, RECURRENT):
                states = {name: copied(getattr(layer, name)) for name in STATES}
                self.snapshot.append((layer, states))

    def restore(self) -> None:
        """Roll the cache back to the snapshot: recurrent states, keys, values and tokens."""
        removed = len(self.tokens) - self.base
        for layer, states in self.snapshot:
            vars(layer).update(copied(states))
        for layer in self.past.layers:
            if isinstance(layer, DynamicLayer):
                DynamicLayer.crop(layer, -removed)
        self.tokens = self.tokens[: self.base]


@dataclass
class RecurrentCache:
    """The caches of a batch's rows. Only the first ``used[row]`` positions of a row are valid."""

    states: list[RecurrentRow]
    capacity: int
    used: list[int]
    layer_states: LayerStates | None = None

    def rows(self, mask: Tensor) -> "RecurrentCache":
        """Return a cache of only the rows that a mask selects, bool [B]."""
        chosen = mask.nonzero().squeeze(1).tolist()
        layers = self.layer_states and self.layer_states.rows(mask)
        states = [self.states[row] for row in chosen]
        return RecurrentCache(states, self.capacity, [self.used[row] for row in chosen], layers)


class RecurrentDecoder(HFDecoder):
    """A model with recurrent layers. Rows are computed one after the other, so they may have different lengths."""

    @property
    def masked(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True

    def new_cache(self, rows: int, capacity: int) -> Any:
        """Return an empty cache, see Decoder.new_cache. Raises UserError: capacity exceeds the model's context."""
        self.check_fits(capacity)
        return RecurrentCache([self._new_row() for _ in range(rows)], capacity, [0] * rows)

    def forward(self, ids: Tensor, cache: Any, last: int = 0, tree: Tree | None = None) -> Tensor:
        """Run one pass per row, see Decoder.forward.

        Raises:
            UserError: `tree` is set. A recurrent layer cannot separate the branches of a tree.
            ValueError: the tokens do not fit the cache.
        """
        if tree is not None:
            raise UserError(
                f"{type(self.model).__name__} has recurrent layers, so it can verify chains but not token trees; "
                "use a drafter without token trees"
            )
        end_of_pass(cache, ids.shape[1])
        logits = []
        with self.without_gradients():
            for number, (row, tokens) in enumerate(zip(cache.states, ids.tolist(), strict=True)):
                self._roll_back(row, cache.used[number])
                if len(tokens) > 1:
                    row.take_snapshot()
                logits.append(self._read(row, tokens, last, cache.layer_states, number))
            cache.used = [used + ids.shape[1] for used in cache.used]
            return torch.cat(logits)

    def without_rollback(self) -> Decoder:
        """Return a decoder that computes all rows in one pass, or this decoder if the model has no attention layers."""
        return HFDecoder(self.model, one_length=True) if has_layers(self.model, DynamicLayer) else self

    def _new_row(self) -> RecurrentRow:
        row = RecurrentRow(new_past(self.model))
        row.take_snapshot()
        return row

    def _roll_back(self, row: RecurrentRow, used: int) -> None:
        if len(row.tokens) == used:
            return
        kept = row.tokens[:used]
        if used < row.base or not row.base:
            vars(row).update(vars(self._new_row()))
        else:
            row.restore()
        if again := kept[len(row.tokens) :]:
            self._read(row, again, 1)
        row.take_snapshot()

    def _read(
        self,
        row: RecurrentRow,
        ids: list[int],
        last: int,
        layer_states: LayerStates | None = None,
        number: int = 0,
    ) -> Tensor:
        """Append token ids to a row, and return the logits of the last tokens, [1, last, V].

        number: Index of the row, at which `layer_states` stores the states.
        """
        if row.tokens and len(ids) > 1 and not self.continues:
            parts = [self._read(row, [token], 0, layer_states, number) for token in ids]
            return torch.cat(parts, 1)[:, -last:]
        start = len(row.tokens)
        end = len(row.tokens) + len(ids)
        known = self.arguments
        cached = "past_key_values" if "past_key_values" in known else "cache_params"
        arguments: dict[str, Any] = {cached: row.past, "use_cache": True}
        if "position_ids" in known:
            arguments["position_ids"] = torch.arange(start, end, device=self.device).unsqueeze(0)
        if "logits_to_keep" in known:
            arguments["logits_to_keep"] = last
        run: Any = self.model
        logits = run(input_ids=torch.tensor([ids], device=self.device), **arguments).logits
        row.tokens = row.tokens + ids
        if layer_states is not None:
            self.store_states(layer_states, torch.tensor([[number]]), torch.arange(start, end).unsqueeze(0))
        return logits[:, -last:]

    @cached_property
    @torch.inference_mode(False)
    @torch.no_grad()
    def continues(self) -> bool:
        """Return whether one pass can read several tokens after cached tokens. A trial checks its logits."""
        ids = self.trial[0]
        row = self._new_row()
        self.__dict__["continues"] = True  # set before the trial, which reads this property
        self._read(row, ids[:2], 1)
        found = self._read(row, ids[2:], 1)[0, -1]
        expected = self._read(self._new_row(), ids, 1)[0, -1]
        return self._agrees(found, expected)
