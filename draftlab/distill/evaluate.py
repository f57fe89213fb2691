"""What a draft is for: tokens per target pass, on text that the target writes, for every K from one pass.

R texts, P prompt tokens, G written ones.
"""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from draftlab.distill.text import generate
from draftlab.engine import replay
from draftlab.engine.decoder import Hosted
from draftlab.engine.forced import Looked, look
from draftlab.engine.replay import ratio_interval, tokens_per_pass
from draftlab.engine.verify import Warp

KS = tuple(range(1, 9))
ROWS = 8  # texts per forward pass


@dataclass(frozen=True, slots=True)
class Written:
    """Texts of the target: ids [R, P + G], how many of the G count [R]; log p of each at temperature (0: greedy)."""

    ids: np.ndarray
    prompt: int
    lengths: np.ndarray
    log_p: np.ndarray  # [R, G]
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """Tokens per target pass at K, before and after, with 95 % intervals over texts; gained by the same draws."""

    k: int
    before: float
    after: float
    low: float
    high: float
    gain_low: float  # lower end of after / before


@torch.inference_mode()
def write(
    teacher: PreTrainedModel, prompts: np.ndarray, length: int, temperature: float, eos_id: int | None, seed: int
) -> Written:
    """Let the target continue prompts [R, P]; greedy at temperature 0."""
    ids = torch.from_numpy(prompts.astype(np.int64)).to(teacher.device)
    torch.manual_seed(seed)
    whole = torch.cat([generate(teacher, part, length, temperature) for part in ids.split(ROWS)]).cpu().numpy()
    wrote = whole[:, ids.shape[1] :]
    ended = wrote == eos_id if eos_id is not None else np.zeros_like(wrote, dtype=bool)
    lengths = np.where(ended.any(1), ended.argmax(1) + 1, wrote.shape[1])
    texts = [(row[: ids.shape[1]], row[ids.shape[1] :]) for row in whole]
    log_p = [found.log_q if temperature else np.zeros(length) for found in _look(teacher, texts, temperature)]
    return Written(whole, ids.shape[1], lengths, np.stack(log_p), temperature)


def chances(student: PreTrainedModel, written: Written) -> list[np.ndarray]:
    """Chance of each written token to be accepted; the first of a text comes with the prefill and does not count."""
    prompt, every = written.prompt, list(zip(written.ids, written.lengths, written.log_p, strict=True))
    texts = [(row[:prompt], row[prompt:][:n]) for row, n, _ in every]
    return replayed(student, texts, [log_p[:n] for _, n, log_p in every], written.temperature)


def replayed(
    student: PreTrainedModel, texts: list[tuple[np.ndarray, np.ndarray]], log_p: list[np.ndarray], temperature: float
) -> list[np.ndarray]:
    """The same of texts as (prompt, written) ids with the target's log-probabilities of what it wrote."""
    found = _look(student, texts, temperature)
    return [replay.chances(one.log_q, p)[1:] for one, p in zip(found, log_p, strict=True)]


def lengths(before: list[np.ndarray], after: list[np.ndarray]) -> list[Length]:
    found = []
    for k in KS:
        old, new = tokens_per_pass(before, k), tokens_per_pass(after, k)
        value, low, high = ratio_interval(new)
        _, gain_low, _ = ratio_interval(np.stack([old[:, 1], new[:, 1]], 1))  # same texts: passes over passes
        first = float(old[:, 0].sum() / old[:, 1].sum())
        found.append(Length(k=k, before=first, after=value, low=low, high=high, gain_low=gain_low))
    return found


def _look(model: PreTrainedModel, texts: list[tuple[np.ndarray, np.ndarray]], temperature: float) -> list[Looked]:
    was_training = model.training
    model.eval()
    found = look(Hosted(model), texts, int(model.config.vocab_size), Warp(temperature=temperature))
    model.train(was_training)
    return found
