"""Causal language models of transformers as decoders.

They can roll back, compute rows of different lengths and token trees, and store the states of layers.

B rows (texts of a batch), T new tokens, S slots of the cache, V vocab, A layers whose states are stored, E hidden.

In a pass, transformers appends T slots to every row. Usually slot i of every row has the token at position i. Then a
pass needs no mask, and rolling back drops slots. Otherwise a table stores the position of the token in each slot, or -1
for a slot that the attention mask hides. Rolling back then changes only the table. Slots at the end that no row reads
are dropped. A cache with more than SPARSE slots per position of the longest row is packed.
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from draftlab.errors import UserError
from draftlab.model import checkpoint
from draftlab.model.decoder import Decoder, Tree, end_of_pass
from draftlab.model.hf_files import FULL, SLIDING, context_of, quantization_method
from draftlab.model.llama import LayerStates
from draftlab.model.trimmed_head import output_head

# base class of cache layers that have a recurrent state instead of keys and values
RECURRENT: Any = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
SPARSE = 2  # the cache is packed when it has more than SPARSE slots per position of the longest row
TRIAL = ((5, 9, 14, 3, 7), (11, 4, 8))  # token ids of two texts, see HFDecoder.masked
# largest error of the logits in a trial, relative to the largest logit; 0.05 for other dtypes
TRIAL_ERROR = {torch.float32: 1e-3, torch.float64: 1e-6}


@dataclass
class HFCache:
    """A cache of transformers, and the position of the token in each of its slots.

    Args:
        capacity: Largest number of positions of a row.
        used: Number of valid positions of each row, [B].
        slots: Number of slots, S.
        table: For each row and slot, the position of the slot's token in the text, or -1 if no token may read the
            slot, [B, S]. None: slot i of every row has the token at position i.
        layer_states: Store for the states of the layers that a drafter reads. None: they are not stored.
    """

    past: DynamicCache
    capacity: int
    used: list[int]
    slots: int = 0
    table: Tensor | None = None
    layer_states: LayerStates | None = None

    @property
    def position(self) -> Tensor:
        """Return the position of the token in each slot, or -1 if no token may read the slot, [B, S]."""
        ordered = torch.arange(self.slots).expand(len(self.used), -1)
        return ordered if self.table is None else self.table

    def keep(self, row: int, at: int, path: Sequence[int]) -> None:
        """Keep the accepted drafted tokens of a row, and drop its other drafted tokens.

        at: Position of the first drafted token. path: Indices of the accepted tokens among the drafted tokens. The
        token at position at + path[j] moves to position at + j.
        """
        self.table = self.position.clone()
        own = self.table[row].clone()
        self.table[row].masked_fill_(own >= at, -1)
        for to, i in enumerate(path):
            self.table[row].masked_fill_(own == at + i, at + to)
        if self.layer_states is not None:
            self.layer_states.keep(row, at, path)
        self.used[row] = at + len(path)

    @torch.inference_mode(False)  # later passes write into these tensors
    def rows(self, mask: Tensor) -> "HFCache":
        """Return a cache of only the rows that a mask selects, bool [B].

        The new cache takes over the tensors of this cache. This cache must not be used again.
        """
        chosen = mask.nonzero().squeeze(1)
        for layer in cast(Any, self.past.layers):
            (layer.reorder_cache if isinstance(layer, RECURRENT) else layer.batch_select_indices)(chosen)
        used = [used for used, chosen in zip(self.used, mask.tolist(), strict=True) if chosen]
        layers = self.layer_states and self.layer_states.rows(mask)
        table = None if self.table is None else self.table[mask.to(self.table.device)]
        return HFCache(self.past, self.capacity, used, self.slots, table, layers)

    def drop_unread(self) -> None:
        """Drop the positions from `used` on, and the slots at the end that no token reads. Pack a sparse cache.

        Raises:
            RuntimeError: transformers cannot crop this cache.
        """
        size = max(self.used)
        if self.table is not None or size != min(self.used):
            positions = self.position
            self.table = positions.masked_fill(positions >= torch.tensor(self.used).unsqueeze(1), -1)
            read = (self.table >= 0).any(0).nonzero()
            size = int(read[-1]) + 1 if len(read) else 0
        if self.slots > size:
            self.past.crop(size - self.slots)  # a negative number is the number of tokens to remove
            self.slots = size
        if self.table is not None:
            self.table = self.table[:, :size]
            if size > SPARSE * max(1, *self.used):
                self._pack()
            if bool((self.table == torch.arange(self.slots)).all()):
                self.table = None

    def _pack(self) -> None:
        """Sort each row's slots by position, and shorten the cache to the longest row."""
        positions = self.position
        self.slots = max(self.used)
        order = positions.masked_fill(positions < 0, self.capacity + 1).argsort(1)
        order = order[:, : self.slots]
        for layer in cast(Any, self.past.layers):
            slots = order.to(layer.keys.device)[:, None, :, None]
            layer.keys = layer.keys.gather(2, slots.expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3]))
            layer.values = layer.values.gather(2, slots.expand(-1, layer.values.shape[1], -1, layer.values.shape[3]))
        self.table = positions.gather(1, order)


class HFDecoder(Decoder):
    """A transformers model as a Decoder, on one device or spread over devices by accelerate."""

    def __init__(self, model: PreTrainedModel, *, one_length: bool = False, trained: bool = False) -> None:
        """Wrap a model of transformers.

        Args:
            one_length: Whether all rows of a batch will have the same length. `masked` is then False, without a trial.
            trained: Whether the model is trained between passes. Passes then avoid inference mode, because FSDP2
                gathers weights in a pass into tensors with which it later trains.
        """
        self.model = model
        self.config = model.config.get_text_config()
        self.one_length = one_length
        self.trained = trained
        self.arguments = frozenset(inspect.signature(model.forward).parameters)
        self.context = context_of(self.config.to_dict())
        # states of the last pass by layer id: the states of id i are the residual stream after i layers
        self._states: dict[int, Tensor] = {}

    @property
    def device(self) -> torch.device:
        # meta parameters are offloaded to disk
        devices = (p.device for p in self.model.parameters() if not p.is_meta)
        return next(devices, checkpoint.CPU)

    @property
    def vocab(self) -> int:
        return int(self.config.vocab_size)

    @property
    def weights_dtype(self) -> str | None:
        return quantization_method(self.model.config.to_dict())

    @property
    def weight_bytes(self) -> int:
        return sum(p.nbytes for p in self.model.parameters())

    @property
    def embed(self) -> Tensor:
        """Return the embedding, [V, E]."""
        return _weight(self.model.get_input_embeddings())

    @property
    def head(self) -> Tensor:
        """Return the output layer, [V, E]."""
        return _weight(output_head(self.model))

    @property
    def takes_rows(self) -> bool:
        """Return whether the texts of a batch may have different lengths."""
        return self.masked

    @property
    def kv_bytes(self) -> int:
        """Return an upper bound of the KV cache's bytes per token, as if each query head had a KV head of its own."""
        return 2 * self.config.num_hidden_layers * self.config.hidden_size * self.model.dtype.itemsize

    def new_cache(self, rows: int, capacity: int) -> HFCache:
        """Return an empty cache for `rows` texts of at most `capacity` tokens each.

        Raises:
            UserError: capacity exceeds the model's context.
        """
        self.check_fits(capacity)
        return HFCache(new_past(self.model), capacity, [0] * rows)

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Return a context without gradients, and in inference mode unless the model is trained."""
        with torch.inference_mode(not self.trained), torch.no_grad():
            yield

    @torch.inference_mode(False)
    def new_layer_states(self, cache: HFCache, ids: tuple[int, ...]) -> LayerStates:
        """Return empty LayerStates for every position of a cache, and add hooks that read the states of the layers.

        ids: Ids of the layers, see LayerStates.
        """
        keep_states(self.model, [i for i in ids if i not in self._states], self._states)
        size = (len(cache.used), cache.capacity, len(ids) * self.config.hidden_size)
        return LayerStates(ids, torch.zeros(size, dtype=self.model.dtype, device=self.device))

    def forward(self, ids: Tensor, cache: HFCache, last: int = 0, tree: Tree | None = None) -> Tensor:
        """Run one pass, see Decoder.forward.

        Raises:
            UserError: transformers cannot roll back the cache; or rows of different lengths or a token tree need a
                custom mask, which the model does not accept.
            ValueError: the tokens do not fit the cache.
        """
        end_of_pass(cache, ids.shape[1])
        try:
            cache.drop_unread()
        except RuntimeError as error:
            raise UserError(f"the cache of {type(self.model).__name__} cannot drop rejected tokens: {error}") from error
        if (tree is not None or cache.table is not None) and not self.masked:
            text = f"{type(self.model).__name__} runs neither token trees nor batches of texts of different lengths"
            raise UserError(
                f"{text}, because its attention accepts no custom mask; use --batch 1 and a drafter without token trees"
            )
        with self.without_gradients():
            return self._run(ids, cache, last, tree)

    def _run(self, ids: Tensor, cache: HFCache, last: int, tree: Tree | None = None) -> Tensor:
        """Run a pass, and record the positions of its tokens."""
        width = ids.shape[1]
        plain = tree is None and cache.table is None
        layout = {} if plain else self._layout(cache, width, tree)
        run: Any = self.model
        logits = run(input_ids=ids, past_key_values=cache.past, use_cache=True, logits_to_keep=last, **layout).logits
        if cache.table is not None or cache.layer_states is not None:
            places = torch.tensor(cache.used).unsqueeze(1) + torch.arange(width)  # [B, T]
            if cache.table is not None:
                cache.table = torch.cat([cache.table, places], 1)
            if cache.layer_states is not None:
                self.store_states(cache.layer_states, torch.arange(len(ids)).unsqueeze(1), places)
        cache.slots += width
        cache.used = [count + width for count in cache.used]
        return logits

    def store_states(self, layer_states: LayerStates, rows: Tensor, places: Tensor) -> None:
        """Copy the states of the last pass to `layer_states`.

        rows: Indices of the rows, [B, 1]. places: Positions of the tokens, [B, T].
        """
        for layers in layer_states.ids:
            layer_states.store(layers, self._states[layers].to(layer_states.states), (rows, slice(None), places))

    def _layout(self, cache: HFCache, width: int, tree: Tree | None) -> dict[str, Any]:
        """Return the arguments position_ids and attention_mask of a pass."""
        tree = tree or Tree.chain(width)
        used = torch.tensor(cache.used).unsqueeze(1)
        at = (used + tree.depth.cpu()).expand(len(used), -1)  # [B, T]
        old = (cache.position >= 0).unsqueeze(1).expand(-1, width, -1)
        seen = torch.cat([old, tree.mask.cpu().expand(len(used), -1, -1)], 2)  # [B, T, S + T]
        masks = {FULL: seen}
        window = getattr(self.config, "sliding_window", None)
        if window is not None and getattr(self.config, "use_sliding_window", True):
            age = at.unsqueeze(2) - torch.cat([cache.position, at], 1).unsqueeze(1)
            masks[SLIDING] = seen & (age < window)
        added = {kind: self._added(mask) for kind, mask in masks.items()}
        by_layer = getattr(self.config, "layer_types", None) is not None
        mask = added if by_layer and SLIDING in added else added.get(SLIDING, added[FULL])
        return {"position_ids": at.to(self.device), "attention_mask": mask}

    def _added(self, seen: Tensor) -> Tensor:
        """Convert a mask, bool [B, T, S + T], to numbers to add to the attention scores, [B, 1, T, S + T]."""
        mask = torch.zeros(seen.shape, dtype=self.model.dtype)
        return mask.masked_fill_(~seen, torch.finfo(mask.dtype).min).unsqueeze(1).to(self.device)

    @property
    def trial(self) -> list[list[int]]:
        """Return the token ids of TRIAL modulo the size of the model's vocabulary."""
        return [[token % self.vocab for token in row] for row in TRIAL]

    @cached_property
    @torch.inference_mode(False)
    @torch.no_grad()
    def masked(self) -> bool:
        """Return whether the model accepts custom attention masks. Token trees and rows of different lengths need them.

        A trial with two rows of different lengths decides. There is no trial, and the result is False, if one_length is
        set, the model uses ALiBi, it takes no position_ids, or a layer has neither full nor sliding-window attention.
        """
        kinds = set(getattr(self.config, "layer_types", None) or [])
        counted = "position_ids" not in self.arguments
        if self.one_length or kinds - {FULL, SLIDING} or counted or getattr(self.config, "alibi", False):
            return False
        first, second = (torch.tensor([row], device=self.device) for row in self.trial)
        cache = self.new_cache(2, 8)
        try:
            self._run(torch.cat([first[:, :3], second[:, :3]]), cache, 1)
            cache.used = [3, 2]
            cache.drop_unread()
            ids = torch.cat([first[:, 3:], second[:, 2:].repeat(1, 2)])
            found = self._run(ids, cache, 2)
        except Exception:  # models raise many types of errors on a custom mask
            return False
        expected = torch.cat([self.forward_uncached(first, 1)[:, 0], self.forward_uncached(second, 1)[:, 0]])
        return self._agrees(torch.stack([found[0, 1], found[1, 0]]), expected)

    def _agrees(self, found: Tensor, expected: Tensor) -> bool:
        """Return whether logits of a trial equal the expected logits up to rounding, see TRIAL_ERROR."""
        error = (found - expected).abs().max() / expected.abs().max()
        return bool(error < TRIAL_ERROR.get(self.model.dtype, 0.05))

    def forward_uncached(self, ids: Tensor, last: int, tree: Tree | None = None) -> Tensor:
        run: Any = self.model
        layout: dict[str, Tensor] = {}
        if tree is not None:
            layout["position_ids"] = tree.depth.unsqueeze(0)
            layout["attention_mask"] = tree.mask[None, None]
        with self.without_gradients():
            return run(input_ids=ids, use_cache=False, logits_to_keep=last, **layout).logits


def _weight(module: nn.Module) -> Tensor:
    """Return a module's weight. A weight that accelerate keeps on disk is read into memory."""
    with align_module_device(module):
        return module.get_parameter("weight").detach()


def keep_states(model: PreTrainedModel, layer_ids: Iterable[int], states: dict[int, Tensor]) -> None:
    """Add hooks to a model, so that every pass stores the states of these layers in the dict `states`, by layer id.

    layer_ids: Id i is the residual stream after i layers; id 0 is the input of the first layer.

    Raises:
        UserError: draftlab does not find the layers of the model.
    """
    layers = decoder_layers(model)

    def keep_input(module: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        states[0] = args[0] if args else named["hidden_states"]

    def keep_output(layer_id: int, module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        states[layer_id] = output[0] if isinstance(output, tuple) else output

    for layer_id in layer_ids:
        states[layer_id] = torch.empty(0)
        if layer_id == 0:
            layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)
        else:
            layers[layer_id - 1].register_forward_hook(partial(keep_output, layer_id))


def new_past(model: PreTrainedModel) -> DynamicCache:
    """Return an empty cache of transformers that can be rolled back."""
    past = DynamicCache(config=model.config)
    # A sliding-window cache drops old tokens, so it cannot roll back. These caches keep all tokens, and the attention
    # mask hides the old tokens.
    past.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in past.layers]
    return past


def has_layers(model: PreTrainedModel, kind: type | tuple[type, ...]) -> bool:
    """Return whether a model's cache has a layer of a class, such as RECURRENT."""
    return any(isinstance(layer, kind) for layer in new_past(model).layers)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of a model's decoder layers.

    Raises:
        UserError: the model has no ModuleList of num_hidden_layers modules.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in cast(nn.Module, model.get_decoder()).modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(
        f"{type(model).__name__} keeps its {count} layers in no ModuleList, so draftlab cannot read the hidden states "
        "that an EAGLE-3 head needs; use a draft model instead of a head"
    )
