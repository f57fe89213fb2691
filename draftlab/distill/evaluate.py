"""What a draft is for: tokens per target pass, on text that the target writes, for every K from one pass.

R texts, P prompt tokens, G written ones, V vocab.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftlab.distill.losses import log_probs
from draftlab.distill.text import generate
from draftlab.engine.replay import ratio_interval, tokens_per_pass

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
    whole = torch.cat([generate(teacher, part, length, temperature) for part in ids.split(ROWS)])
    wrote = whole[:, ids.shape[1] :].cpu().numpy()
    ended = wrote == eos_id if eos_id is not None else np.zeros_like(wrote, dtype=bool)
    lengths = np.where(ended.any(1), ended.argmax(1) + 1, wrote.shape[1])
    log_p = _each(teacher, whole, ids.shape[1], temperature)[0]
    return Written(whole.cpu().numpy(), ids.shape[1], lengths, log_p, temperature)


def chances(student: PreTrainedModel, written: Written) -> list[np.ndarray]:
    """Chance of each written token to be accepted; the first of a text comes with the prefill and does not count."""
    ids = torch.from_numpy(written.ids).to(student.device)
    log_q, top = _each(student, ids, written.prompt, written.temperature)
    if written.temperature == 0:
        found = (top == written.ids[:, written.prompt :]).astype(np.float64)
    else:
        found = np.exp(np.minimum(0.0, log_q.astype(np.float64) - written.log_p))
    return [row[1:n] for row, n in zip(found, written.lengths, strict=True)]


def lengths(before: list[np.ndarray], after: list[np.ndarray]) -> list[Length]:
    found = []
    for k in KS:
        old, new = tokens_per_pass(before, k), tokens_per_pass(after, k)
        value, low, high = ratio_interval(new)
        _, gain_low, _ = ratio_interval(np.stack([old[:, 1], new[:, 1]], 1))  # same texts: passes over passes
        first = float(old[:, 0].sum() / old[:, 1].sum())
        found.append(Length(k=k, before=first, after=value, low=low, high=high, gain_low=gain_low))
    return found


@torch.inference_mode()
def _each(model: PreTrainedModel, ids: Tensor, prompt: int, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """log-probability of each token after the prompt, and the most probable one in its place: [R, G] each."""
    was_training = model.training
    model.eval()
    values, tops = [], []
    for part in ids.split(ROWS):
        logits = model(input_ids=part[:, :-1], use_cache=False).logits[:, prompt - 1 :]  # [R, G, V]
        found = log_probs(logits, temperature or 1.0)
        values.append(found.gather(2, part[:, prompt:, None]).squeeze(2).cpu())
        tops.append(found.argmax(-1).cpu())
    model.train(was_training)
    return torch.cat(values).numpy(), torch.cat(tops).numpy()
