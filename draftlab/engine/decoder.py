"""Any causal language model behind the few calls that decoding needs: llama.py's where it can, else transformers'.

B rows, T new tokens, V vocab.
"""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from draftlab import checkpoint, llama
from draftlab.console import note
from draftlab.errors import UserError


class Decoder(Protocol):
    """What decoding asks of a model; llama.Llama is one."""

    @property
    def device(self) -> torch.device: ...

    @property
    def context(self) -> int:
        """Longest text in tokens."""
        ...

    def new_cache(self, rows: int, capacity: int) -> Any: ...

    def forward(self, ids: Tensor, cache: Any, last: int = 0) -> Tensor:
        """Feed ids [B, T] behind what the cache holds; logits [B, T, V], or of the last tokens only, [B, last, V]."""
        ...


class Hosted:
    """A transformers model as a Decoder, in memory or spread by accelerate; its cache grows and is not rolled back."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.context = int(model.config.to_dict().get("max_position_embeddings") or 1 << 30)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def new_cache(self, rows: int, capacity: int) -> DynamicCache:
        """Raises UserError: capacity is more than the model's context."""
        if capacity > self.context:
            raise UserError(f"{capacity} tokens do not fit the model's context of {self.context}")
        return DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: DynamicCache, last: int = 0) -> Tensor:
        run: Any = self.model
        return run(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=last).logits


@torch.inference_mode()
def read(model: Decoder, ids: Tensor, last: int) -> Tensor:
    """Logits of the last tokens of whole texts, [B, last, V]; no cache is kept."""
    if isinstance(model, Hosted):
        run: Any = model.model
        return run(input_ids=ids, use_cache=False, logits_to_keep=last).logits
    return model.forward(ids, model.new_cache(*ids.shape), last=last)


def load(directory: Path, dtype: torch.dtype, device: torch.device, device_map: str | None = None) -> Decoder:
    """The checkpoint by llama.py where it knows the architecture; otherwise, and with a device_map, by transformers."""
    if device_map is not None:
        return Hosted(checkpoint.load_model(directory, dtype, device, device_map).eval())
    try:
        return llama.load(directory, dtype, device)
    except UserError as error:
        note(f"{error}; transformers runs it instead")
    return Hosted(checkpoint.load_model(directory, dtype, device).eval())
