"""Any causal language model behind the few calls that decoding needs: llama.py's where it can, else transformers'.

B rows, T new tokens, V vocab.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from draftlab.console import note
from draftlab.errors import UserError
from draftlab.latency.cost_model import Mode
from draftlab.model import checkpoint, llama, native_cpu
from draftlab.model.cuda_graphs import Graphed
from draftlab.model.native_cpu import Native


class KVCache(Protocol):
    """A cache: of each row its first ``used`` positions count. To roll back is to write a smaller number."""

    used: list[int]


class Decoder(Protocol):
    """What decoding asks of a model; llama.Llama is one."""

    @property
    def device(self) -> torch.device: ...

    @property
    def context(self) -> int:
        """Longest text in tokens."""
        ...

    def new_cache(self, rows: int, capacity: int) -> Any:
        """A KVCache for so many rows of at most capacity tokens."""
        ...

    def forward(self, ids: Tensor, cache: Any, last: int = 0, tree: llama.Tree | None = None) -> Tensor:
        """Feed ids [B, T] behind what the cache holds; logits [B, T, V], or of the last tokens only, [B, last, V].

        tree: how the T tokens stand to each other; left out, each follows the one before.
        """
        ...


@dataclass(slots=True)
class HFCache:
    """transformers' cache, which all rows leave at one length."""

    past: DynamicCache
    used: list[int]


class HFDecoder:
    """A transformers model as a Decoder, in memory or spread by accelerate; its cache grows and is cut off again."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, text = model, model.config.get_text_config()
        name = text.attribute_map.get("max_position_embeddings", "max_position_embeddings")  # GPT-2 says n_positions
        self.context = int(text.to_dict().get(name) or 1 << 30)

    @property
    def device(self) -> torch.device:
        held = (p.device for p in self.model.parameters() if not p.is_meta)  # others are on disk
        return next(held, checkpoint.CPU)

    def new_cache(self, rows: int, capacity: int) -> HFCache:
        """Raises UserError: capacity is more than the model's context, or it has no such cache."""
        if capacity > self.context:
            raise UserError(f"{capacity} tokens do not fit the model's context of {self.context}")
        past = DynamicCache(config=self.model.config)
        try:
            past.get_seq_length()
        except ValueError:
            kind = type(self.model).__name__
            raise UserError(f"{kind} has no attention whose cache could be cut off again: it is not decoded") from None
        # a layer that forgets what lies behind its window cannot take tokens back; the mask hides it as well
        past.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in past.layers]
        return HFCache(past, [0] * rows)

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: HFCache, last: int = 0, tree: llama.Tree | None = None) -> Tensor:
        """As Decoder says.

        Raises:
            UserError: rows at different lengths, a token tree, or a cache that transformers cannot roll back.
        """
        if tree is not None:
            raise UserError("a model that transformers runs verifies chains, not token trees")
        used, held = cache.used[0], int(cache.past.get_seq_length())
        if min(cache.used) != max(cache.used):
            raise UserError("a model that transformers runs speculates one row at a time; take a batch of 1")
        try:
            if held > used:
                cache.past.crop(used - held)
        except RuntimeError as error:
            raise UserError(f"{type(self.model).__name__} cannot take back what it has read: {error}") from error
        run: Any = self.model
        cache.used = [used + ids.shape[1]] * len(cache.used)
        return run(input_ids=ids, past_key_values=cache.past, use_cache=True, logits_to_keep=last).logits


def feed(
    model: Decoder, cache: KVCache, texts: Sequence[Sequence[int]], known: int | None = None, last: int = 1
) -> Tensor:
    """Feed what the cache lacks of each text, at least its last tokens; logits behind those, [B, last, V].

    What the cache holds beyond a text is forgotten. All rows feed as many tokens as the row that lacks most: the end of
    their texts again, and then padding, which the next pass overwrites. known: ids from there on are fed as known - 1.
    """
    width = max(len(text) - min(used, len(text) - last) for text, used in zip(texts, cache.used, strict=True))
    began = [max(0, len(text) - width) for text in texts]
    rows = [[*text[at : at + width], *[0] * (width - len(text))] for text, at in zip(texts, began, strict=True)]
    ids = torch.tensor(rows, device=model.device)  # [B, width]
    if known is not None:
        ids.clamp_(max=known - 1)
    at = [min(width, len(text)) - 1 for text in texts]  # of each text's last token among those fed
    cache.used = began
    logits = model.forward(ids, cache, last=width - min(at) + last - 1)
    cache.used = [len(text) for text in texts]
    if min(at) == width - 1:
        return logits
    rows_of = torch.arange(len(texts)).unsqueeze(1)
    return logits[rows_of, torch.tensor(at).unsqueeze(1) - min(at) + torch.arange(last)]


@torch.inference_mode()
def read(model: Decoder, ids: Tensor, last: int) -> Tensor:
    """Logits of the last tokens of whole texts, [B, last, V]; no cache is kept."""
    if isinstance(model, HFDecoder):
        run: Any = model.model
        return run(input_ids=ids, use_cache=False, logits_to_keep=last).logits
    return model.forward(ids, model.new_cache(*ids.shape), last=last)


def widened(cache: Any, rows: int) -> Any:
    """A cache of one row, held by each of so many."""
    if isinstance(cache, HFCache):
        cache.past.batch_repeat_interleave(rows)
        return HFCache(cache.past, cache.used * rows)
    layers, _, *size = cache.keys.shape
    keys, values = (held.expand(layers, rows, *size).contiguous() for held in (cache.keys, cache.values))
    return llama.Cache(keys, values, cache.used * rows)


def vocab_of(model: Decoder) -> int | None:
    """Tokens that a model knows, as wide as its logits; None: it does not say."""
    if isinstance(model, llama.Llama):
        return model.shape.vocab
    return int(model.model.config.get_text_config().vocab_size) if isinstance(model, HFDecoder) else None


def context_of(directory: Path) -> int:
    """Return the longest text in tokens that config.json allows; 2**30 where it says nothing."""
    config = checkpoint.read_config(directory)
    inner = config.get("text_config")
    config |= inner if isinstance(inner, dict) else {}
    found = (
        config.get(key) for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
    )
    return next((number for number in found if isinstance(number, int)), 1 << 30)


def check_mode(mode: Mode, device: torch.device, dtype: torch.dtype) -> None:
    """Raises UserError: a device or dtype that the mode does not run on."""
    if mode == "native":
        native_cpu.check(device, dtype)
    if mode == "graphs" and device.type != "cuda":
        raise UserError(f"mode graphs captures CUDA graphs, and this is {device.type}; take eager or compiled")


def chosen_mode(mode: Mode | Literal["auto"], device: torch.device, dtype: torch.dtype, models: Iterable[Path]) -> Mode:
    """auto: compiled on a CPU where that can run every model, else eager, and why is said."""
    if mode != "auto":
        return mode
    try:
        native_cpu.check(device, dtype)
        for directory in models:
            llama.check(directory)
        native_cpu.library()
    except UserError as error:
        note(f"mode eager: {error}")
        return "eager"
    return "native"


def in_mode(model: llama.Llama, mode: Mode, int8: bool = False) -> llama.Llama:
    """The model as a mode runs it: compiled is native.py's pass, graphs is graphs.py's. int8: rounded weights.

    Raises:
        UserError: a device or dtype that the mode does not run on; int8 in another mode.
    """
    check_mode(mode, model.device, model.embed.dtype)
    if mode == "native":
        return Native(model, int8)
    if int8:
        raise UserError(f"int8 weights are computed with in mode native, not {mode}")
    return Graphed(model) if mode == "graphs" else model


def load(directory: Path, dtype: torch.dtype, device: torch.device, device_map: str | None = None) -> Decoder:
    """The checkpoint by llama.py where it knows the architecture; otherwise, and with a device_map, by transformers."""
    if device_map is not None:
        return HFDecoder(checkpoint.load_model(directory, dtype, device, device_map).eval())
    try:
        return llama.load(directory, dtype, device)
    except UserError as error:
        note(f"{error}; transformers runs it instead")
    return HFDecoder(checkpoint.load_model(directory, dtype, device).eval())
