"""What a draft is for: tokens per target pass, on text that the target writes, for every K from one pass.

R texts, P prompt tokens, G written ones.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from draftlab.acceptance import expected
from draftlab.acceptance.expected import tokens_per_pass
from draftlab.acceptance.token_logprobs import TokenLogprobs, score_tokens
from draftlab.distill.on_policy import GeneratedRows
from draftlab.engine.batch_generate import BatchSettings, generate_batch
from draftlab.intervals import ratio_interval
from draftlab.model.decoder import Decoder
from draftlab.model.hf_decoder import HFDecoder
from draftlab.sampling import SamplingParams

KS = tuple(range(1, 9))


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


def write(
    writer: Decoder,
    prompts: np.ndarray,
    sampling: SamplingParams,
    settings: BatchSettings,
    advance: Callable[[int], None],
) -> Written:
    """Let the target continue prompts [R, P]."""
    texts = generate_batch(writer, prompts.tolist(), sampling, settings, advance=advance)
    rows = GeneratedRows.of(prompts, texts, sampling.max_tokens, len(prompts))
    log_p = np.zeros((len(texts), sampling.max_tokens), dtype=np.float32)
    for row, text in zip(log_p, texts, strict=True):
        row[: len(text.logprobs)] = text.logprobs
    return Written(rows.ids, rows.prompt, rows.lengths, log_p, sampling.temperature)


def chances(student: PreTrainedModel, written: Written, memory: float = 2.0) -> list[np.ndarray]:
    """Chance of each written token to be accepted; the first of a text comes with the prefill and does not count."""
    prompt, every = written.prompt, list(zip(written.ids, written.lengths, written.log_p, strict=True))
    texts = [(row[:prompt], row[prompt:][:n]) for row, n, _ in every]
    return replayed(student, texts, [log_p[:n] for _, n, log_p in every], written.temperature, memory)


def replayed(
    student: PreTrainedModel,
    texts: list[tuple[np.ndarray, np.ndarray]],
    log_p: list[np.ndarray],
    temperature: float,
    memory: float = 2.0,
) -> list[np.ndarray]:
    """The same of texts as (prompt, written) ids with the target's log-probabilities of what it wrote."""
    found = _look(student, texts, temperature, memory)
    return [expected.chances(one.logprobs, p)[1:] for one, p in zip(found, log_p, strict=True)]


def lengths(before: list[np.ndarray], after: list[np.ndarray]) -> list[Length]:
    found = []
    for k in KS:
        old, new = tokens_per_pass(before, k), tokens_per_pass(after, k)
        now = ratio_interval(new)
        gain = ratio_interval(np.stack([old[:, 1], new[:, 1]], 1))  # same texts: passes over passes
        first = float(old[:, 0].sum() / old[:, 1].sum())
        found.append(Length(k=k, before=first, after=now.value, low=now.low, high=now.high, gain_low=gain.low))
    return found


def _look(
    model: PreTrainedModel, texts: list[tuple[np.ndarray, np.ndarray]], temperature: float, memory: float
) -> list[TokenLogprobs]:
    was_training = model.training
    model.eval()
    vocab = int(model.config.get_text_config().vocab_size)
    found = score_tokens(HFDecoder(model), texts, vocab, SamplingParams(temperature=temperature), memory=memory)
    model.train(was_training)
    return found
