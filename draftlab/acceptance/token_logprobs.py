"""What a model thinks of tokens that are already written: a teacher-forced pass over each text, in parts where whole
logits would not fit.

B texts in a pass, W tokens fed of each, n written tokens of a text, V vocab.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftlab.engine.verify import Warp
from draftlab.errors import UserError
from draftlab.model.decoder import Decoder, forward_uncached

LOGITS = 1 << 25  # elements of logits in one pass over several texts: wider ones gain nothing
PER_LOGIT = 16  # bytes at the peak: as the model gives them, in fp32, and what is made of them


@dataclass(frozen=True, slots=True)
class Looked:
    """Of each written token of one text, [n]: what the model thinks of it where it stands."""

    log_q: np.ndarray  # log-probability in the distribution that the model would sample from
    rank: np.ndarray  # how many tokens are more probable; of equal ones the lowest id comes first
    top: np.ndarray  # the largest probability there, at temperature 1


def look(
    model: Decoder,
    texts: Sequence[tuple[np.ndarray, np.ndarray]],
    vocab: int,
    warp: Warp,
    advance: Callable[[int], None] = lambda done: None,
    memory: float = 2.0,
) -> list[Looked]:
    """Of texts as (prompt, written) ids. vocab: logits that count. Long texts come first and together.

    memory: GB that the logits of one pass may take.

    Raises:
        UserError: a text is longer than the model's context.
    """
    longest = max((_length(text) for text in texts), default=0)
    if longest > model.context + 1:  # its last token is not fed
        raise UserError(f"a text has {longest} tokens with its prompt, and the model's context is {model.context}")
    found: list[Looked] = [Looked(*np.zeros((3, 0)))] * len(texts)
    order = sorted((i for i, (_, written) in enumerate(texts) if len(written)), key=lambda i: -_length(texts[i]))
    done, most = 0, positions(vocab, memory)
    while done < len(order):
        rows = max(1, min(LOGITS // vocab, most) // _length(texts[order[done]]))
        part = order[done : done + rows]
        for i, one in zip(part, _pass(model, [texts[i] for i in part], vocab, warp, most), strict=True):
            found[i] = one
        done += len(part)
        advance(done)
    return found


def positions(vocab: int, memory: float) -> int:
    """Return of how many positions the logits fit memory, in GB."""
    return max(1, int(memory * 1e9 / (PER_LOGIT * vocab)))


@torch.inference_mode()
def parts(model: Decoder, ids: Tensor, first: int, most: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the logits behind ids [B, W] from position first on, and where they begin: [B, t, V], t B at most most.

    What does not fit one pass goes through a cache.
    """
    rows, width = ids.shape
    step = max(1, most // rows)
    if width - first <= step:
        yield first, forward_uncached(model, ids, width - first)
        return
    cache = model.new_cache(rows, width)
    if first:
        model.forward(ids[:, :first], cache, last=1)
    for at in range(first, width, step):
        part = ids[:, at : at + step]
        yield at, model.forward(part, cache, last=part.shape[1])


def _pass(
    model: Decoder, texts: list[tuple[np.ndarray, np.ndarray]], vocab: int, warp: Warp, most: int
) -> list[Looked]:
    width = max(map(_length, texts)) - 1  # of the last token nothing follows
    ids = torch.zeros(len(texts), width, dtype=torch.long)  # what pads a row comes after it: causal, so never seen
    for row, (prompt, written) in zip(ids, texts, strict=True):
        row[: len(prompt) + len(written) - 1] = _long(np.concatenate([prompt, written])[:-1])
    first = min(len(prompt) for prompt, _ in texts) - 1
    found: list[list[Looked]] = [[] for _ in texts]
    for at, logits in parts(model, ids.to(model.device), first, most):
        for row, (prompt, written), seen in zip(logits[..., :vocab], texts, found, strict=True):
            start = len(prompt) - 1  # behind it comes the first written token
            low, high = max(start, at), min(start + len(written), at + len(row))
            if low < high:
                here = _long(written[low - start : high - start]).to(row.device)
                seen.append(_looked(row[low - at : high - at].float(), here, warp))
    return [Looked(*map(np.concatenate, zip(*map(_columns, seen), strict=True))) for seen in found]


def _columns(one: Looked) -> tuple[np.ndarray, ...]:
    return one.log_q, one.rank, one.top


def _looked(logits: Tensor, written: Tensor, warp: Warp) -> Looked:
    came = logits.gather(1, written[:, None])  # [n, 1]
    earlier = torch.arange(logits.shape[1], device=logits.device) < written[:, None]
    rank = ((logits > came) | ((logits == came) & earlier)).sum(1)
    top = (logits.amax(1) - logits.logsumexp(1)).exp()
    if warp.temperature == 0:
        log_q = torch.where(rank == 0, 0.0, -torch.inf)
    else:
        log_q = warp(logits).gather(1, written[:, None]).squeeze(1).log()
    return Looked(log_q.cpu().numpy(), rank.cpu().numpy(), top.cpu().numpy())


def _length(text: tuple[np.ndarray, np.ndarray]) -> int:
    return len(text[0]) + len(text[1])


def _long(ids: np.ndarray) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64))
