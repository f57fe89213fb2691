"""What a model thinks of tokens that are already written: one teacher-forced pass over each text.

B texts in a pass, W tokens fed of each, n written tokens of a text, V vocab.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftlab.engine.decoder import Decoder, read
from draftlab.engine.verify import Warp
from draftlab.errors import UserError

LOGITS = 1 << 25  # elements of logits in one pass


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
) -> list[Looked]:
    """Of texts as (prompt, written) ids. vocab: logits that count. Long texts come first and together.

    Raises:
        UserError: a text is longer than the model's context.
    """
    longest = max((_length(text) for text in texts), default=0)
    if longest > model.context + 1:  # its last token is not fed
        raise UserError(f"a text has {longest} tokens with its prompt, and the model's context is {model.context}")
    found: list[Looked] = [Looked(*np.zeros((3, 0)))] * len(texts)
    order = sorted((i for i, (_, written) in enumerate(texts) if len(written)), key=lambda i: -_length(texts[i]))
    done = 0
    while done < len(order):
        rows = max(1, LOGITS // (vocab * _length(texts[order[done]])))
        part = order[done : done + rows]
        for i, one in zip(part, _pass(model, [texts[i] for i in part], vocab, warp), strict=True):
            found[i] = one
        done += len(part)
        advance(done)
    return found


@torch.inference_mode()
def _pass(model: Decoder, texts: list[tuple[np.ndarray, np.ndarray]], vocab: int, warp: Warp) -> list[Looked]:
    width = max(map(_length, texts)) - 1  # of the last token nothing follows
    ids = torch.zeros(len(texts), width, dtype=torch.long)  # what pads a row comes after it: causal, so never seen
    for row, (prompt, written) in zip(ids, texts, strict=True):
        row[: len(prompt) + len(written) - 1] = _long(np.concatenate([prompt, written])[:-1])
    first = min(len(prompt) for prompt, _ in texts) - 1
    logits = read(model, ids.to(model.device), width - first)[..., :vocab]  # [B, W - first, V]
    starts = [len(prompt) - 1 - first for prompt, _ in texts]
    return [
        _looked(row[start : start + len(written)].float(), _long(written).to(row.device), warp)
        for row, start, (_, written) in zip(logits, starts, texts, strict=True)
    ]


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
