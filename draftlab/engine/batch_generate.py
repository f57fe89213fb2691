"""Text that a model writes after prompts: evaluation, training text, caches and traces all come from here.

B prompts decoded together, P tokens of a prompt, n written ones, k listed, V vocab. Each prompt has random numbers of
its own, so that what is sampled does not depend on the prompts beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from draftlab.console import note
from draftlab.engine.verify import Warp, draw
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.model.decoder import Decoder, load, model_vocab_size, with_mode
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.llama import Llama

Stop = Literal["length", "eos"]
GIGABYTE = 1_000_000_000
PER_LOGIT = 32  # bytes at the peak of a step that samples: logits, probabilities and their sums in fp64


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing(Warp):
    """How a model writes.

    ends: ids that end a text, which belong to it. known: ids from there on are padding, and never written. top: most
    probable tokens listed at each place. rows: most prompts at once; memory: GB that logits and KV cache may take,
    which makes them fewer.
    """

    max_new_tokens: int
    seed: int = 0
    ends: tuple[int, ...] = ()
    known: int | None = None
    top: int = 0
    rows: int = 64
    memory: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What was written after one prompt. log_p is in the distribution that was sampled from, top_log_p in the raw."""

    ids: np.ndarray  # [n]
    log_p: np.ndarray  # [n]
    stop: Stop
    top_ids: np.ndarray  # [n, k], the most probable first
    top_log_p: np.ndarray  # [n, k]

    @classmethod
    def cut(
        cls, ids: np.ndarray, log_p: np.ndarray, top_ids: np.ndarray, top_log_p: np.ndarray, ends: tuple[int, ...]
    ) -> "Continuation":
        """Return what was written up to the first token that ends a text."""
        found = np.flatnonzero(np.isin(ids, ends))
        n = int(found[0]) + 1 if len(found) else len(ids)
        return cls(
            ids=ids[:n], log_p=log_p[:n], top_ids=top_ids[:n], top_log_p=top_log_p[:n],
            stop="eos" if len(found) else "length",
        )  # fmt: skip


def load_writer(
    directory: Path, dtype: torch.dtype | None, device: torch.device, device_map: str | None = None
) -> Decoder:
    """Return the checkpoint as what writes fastest here: the engine, compiled on a CPU; or transformers.

    dtype: None is checkpoint.compute_dtype's.
    """
    dtype = dtype or checkpoint.compute_dtype(directory, device)
    note(f"loading {hub.checkpoint_name(directory)} in {checkpoint.dtype_name(dtype)}")
    model = load(directory, dtype, device, device_map)
    if not isinstance(model, Llama) or device.type != "cpu" or dtype == torch.float16:
        return model
    try:
        return with_mode(model, "native")
    except UserError as error:
        note(f"{error}; text is written in mode eager")
        return model


def write(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    how: Writing,
    *,
    numbers: Sequence[int] | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> list[Continuation]:
    """Continue each prompt. numbers: of the prompts; with the seed they decide what is sampled. advance: prompts done.

    Raises:
        UserError: a prompt and its text do not fit the model's context.
    """
    numbers = range(len(prompts)) if numbers is None else numbers
    check_room(max(map(len, prompts), default=0), how.max_new_tokens, model.context)
    found: dict[int, Continuation] = {}
    for group in _groups(model, prompts, how):
        written = _write(model, [prompts[i] for i in group], [numbers[i] for i in group], how)
        found |= zip(group, written, strict=True)
        advance(len(found))
    return [found[i] for i in range(len(prompts))]


def check_room(longest: int, length: int, context: int) -> None:
    """Raises UserError: the longest prompt with so many tokens more does not fit a context."""
    if longest + length > context:
        raise UserError(
            f"a prompt has {longest} tokens; with {length} more it does not fit the target's context of {context}"
        )


def _groups(model: Decoder, prompts: Sequence[Sequence[int]], how: Writing) -> Iterator[list[int]]:
    """Which prompts are decoded together, the longest first; transformers' cache wants them of one length."""
    group: list[int] = []
    for i in sorted(range(len(prompts)), key=lambda i: -len(prompts[i])):
        if group:
            longest = len(prompts[group[0]])
            alike = isinstance(model, Llama) or len(prompts[i]) == longest
            if not alike or len(group) >= rows_in(model, longest + how.max_new_tokens, how):
                yield group
                group = []
        group.append(i)
    if group:
        yield group


def rows_in(model: Decoder, length: int, how: Writing) -> int:
    """Return how many texts of that length fit how.memory, at least one and at most how.rows."""
    each = PER_LOGIT * (model_vocab_size(model) or 0) + length * _kv_bytes(model)
    return max(1, min(how.rows, int(how.memory * GIGABYTE / each)))


def _kv_bytes(model: Decoder) -> int:
    """Bytes that the KV cache takes for a token; for transformers, of a model without grouped heads."""
    if isinstance(model, HFDecoder):
        config = model.model.config.get_text_config()
        return 2 * config.num_hidden_layers * config.hidden_size * model.model.dtype.itemsize
    if not isinstance(model, Llama):
        return 0
    s = model.shape
    return 2 * s.layers * s.kv_heads * s.head_dim * model.embed.itemsize


@torch.inference_mode()
def _write(model: Decoder, prompts: list[Sequence[int]], numbers: list[int], how: Writing) -> list[Continuation]:
    device = model.device
    cache = model.new_cache(len(prompts), max(map(len, prompts)) + how.max_new_tokens)
    fed = _prefilled(model, cache, prompts)
    uniform = torch.stack([_uniform(how, number) for number in numbers]).to(device)  # [B, T]
    ends = torch.tensor(how.ends, device=device, dtype=torch.long)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    steps: list[tuple[Tensor, ...]] = []
    for u in uniform.T:
        logits = model.forward(fed, cache, last=1)[:, -1, : how.known].float()  # [B, V]
        ids, log_p = _next(logits, how, u)
        steps.append((ids, log_p, *_listed(logits, how.top)))
        fed = ids.unsqueeze(1)
        if how.ends:
            ended |= torch.isin(ids, ends)
            if ended.all():
                break
    columns = [torch.stack(column, 1).cpu().numpy() for column in zip(*steps, strict=True)]
    return [Continuation.cut(*row, ends=how.ends) for row in zip(*columns, strict=True)]


def _prefilled(model: Decoder, cache: object, prompts: list[Sequence[int]]) -> Tensor:
    """Return what is fed first: the prompts, or, where their lengths differ, their last tokens behind the rest."""
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    if shortest == longest:
        return torch.tensor([list(p) for p in prompts], device=model.device)  # [B, P]
    held: Any = cache
    rows = [[*p[:-1], *[0] * (longest - len(p))] for p in prompts]  # what pads a row is overwritten, never read
    model.forward(torch.tensor(rows, device=model.device), held, last=1)
    held.used = [len(p) - 1 for p in prompts]
    return torch.tensor([p[-1:] for p in prompts], device=model.device)  # [B, 1]


def _next(logits: Tensor, how: Writing, u: Tensor) -> tuple[Tensor, Tensor]:
    """The next token of each row and its log-probability, [B] each."""
    if how.temperature == 0:
        ids = logits.argmax(-1)
        return ids, torch.zeros_like(ids, dtype=torch.float32)
    p = how(logits)
    ids = draw(p, u)
    return ids, p.gather(1, ids.unsqueeze(1)).squeeze(1).log()


def _listed(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    if top == 0:
        return logits.new_empty(len(logits), 0, dtype=torch.long), logits.new_empty(len(logits), 0)
    listed = torch.log_softmax(logits, -1).topk(top)
    return listed.indices, listed.values


def _uniform(how: Writing, number: int) -> Tensor:
    rng = torch.Generator().manual_seed(how.seed * 1_000_003 + number)
    return torch.rand(how.max_new_tokens, generator=rng)
