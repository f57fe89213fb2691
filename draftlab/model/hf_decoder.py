"""Causal language models of transformers as decoders, with a cache that rolls back.

B rows, T new tokens, V vocab.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from draftlab.errors import UserError
from draftlab.model import checkpoint, llama


def _without_gradients(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Leave inference mode: FSDP2 trains with the very tensors in which a pass gathers weights."""
    return torch.inference_mode(False)(torch.no_grad()(run))


@dataclass
class HFCache:
    """transformers' cache, in which all rows have the same length."""

    past: DynamicCache
    used: list[int]


class HFDecoder:
    """A transformers model as a Decoder, in memory or spread over devices by accelerate."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, text = model, model.config.get_text_config()
        self.vocab = int(text.vocab_size)
        name = text.attribute_map.get("max_position_embeddings", "max_position_embeddings")  # GPT-2 says n_positions
        self.context = int(text.to_dict().get(name) or checkpoint.UNLIMITED)

    @property
    def device(self) -> torch.device:
        devices = (p.device for p in self.model.parameters() if not p.is_meta)  # meta ones are offloaded to disk
        return next(devices, checkpoint.CPU)

    def new_cache(self, rows: int, capacity: int) -> HFCache:
        """Return an empty cache. Raises UserError: capacity exceeds the context, or the model has no such cache."""
        if capacity > self.context:
            raise UserError(f"{capacity} tokens do not fit the model's context of {self.context}")
        past = DynamicCache(config=self.model.config)
        try:
            past.get_seq_length()
        except ValueError:
            kind = type(self.model).__name__
            raise UserError(f"{kind} has no attention cache that can be rolled back, so it cannot speculate") from None
        # a sliding-window layer drops old tokens and cannot roll back; the attention mask hides them as well
        past.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in past.layers]
        return HFCache(past, [0] * rows)

    @_without_gradients
    def forward(self, ids: Tensor, cache: HFCache, last: int = 0, tree: llama.Tree | None = None) -> Tensor:
        """Run one pass, see Decoder.

        Raises:
            UserError: rows of different lengths, a token tree, or a cache that transformers cannot roll back.
        """
        if tree is not None:
            raise UserError("a model that transformers runs verifies chains, not token trees")
        if min(cache.used) != max(cache.used):
            raise UserError("a model that transformers runs speculates one row at a time; use a batch size of 1")
        return self.run(ids, cache, last)

    def run(self, ids: Tensor, cache: HFCache, last: int) -> Tensor:
        """Run a pass of rows of one length. Raises UserError: a cache that transformers cannot roll back."""
        used, cached = cache.used[0], int(cache.past.get_seq_length())
        try:
            if cached > used:
                cache.past.crop(used - cached)
        except RuntimeError as error:
            raise UserError(f"the cache of {type(self.model).__name__} cannot be rolled back: {error}") from error
        run: Any = self.model
        cache.used = [used + ids.shape[1]] * len(cache.used)
        return run(input_ids=ids, past_key_values=cache.past, use_cache=True, logits_to_keep=last).logits

    @_without_gradients
    def forward_uncached(self, ids: Tensor, last: int, tree: llama.Tree | None = None) -> Tensor:
        run: Any = self.model
        if tree is None:
            return run(input_ids=ids, use_cache=False, logits_to_keep=last).logits
        layout = {"position_ids": tree.depth.unsqueeze(0), "attention_mask": tree.mask[None, None]}
        return run(input_ids=ids, use_cache=False, logits_to_keep=last, **layout).logits
