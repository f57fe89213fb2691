"""Acceptance length of a student: tokens per target pass on text that the target wrote, for every K from one pass.

R texts, P prompt tokens, G generated tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from draftlab.acceptance import expected
from draftlab.acceptance.expected import tokens_per_pass
from draftlab.acceptance.token_logprobs import score_tokens
from draftlab.distill.on_policy import GeneratedRows
from draftlab.engine.batch_generate import BatchSettings, generate_batch
from draftlab.intervals import ratio_interval
from draftlab.model.decoder import Decoder
from draftlab.model.hf_decoder import HFDecoder
from draftlab.sampling import SamplingParams

KS = tuple(range(1, 9))


@dataclass(frozen=True, slots=True)
class TargetText:
    """Text that the target wrote: ids [R, P + G], tokens that count of the G [R], log p of each at temperature."""

    ids: np.ndarray
    prompt: int
    lengths: np.ndarray
    log_p: np.ndarray  # [R, G]
    temperature: float  # 0: greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthComparison:
    """Tokens per target pass at K before and after training, with the 95 % interval of the latter over texts.

    gain_low: lower end of after / before, from the same bootstrap draws.
    """

    k: int
    before: float
    after: float
    low: float
    high: float
    gain_low: float


def generate(
    target: Decoder,
    prompts: np.ndarray,
    sampling: SamplingParams,
    settings: BatchSettings,
    advance: Callable[[int], None],
) -> TargetText:
    """Let the target continue prompts [R, P]."""
    texts = generate_batch(target, prompts.tolist(), sampling, settings, advance=advance)
    rows = GeneratedRows.of(prompts, texts, sampling.max_tokens, len(prompts))
    log_p = np.zeros((len(texts), sampling.max_tokens), dtype=np.float32)
    for row, text in zip(log_p, texts, strict=True):
        row[: len(text.logprobs)] = text.logprobs
    return TargetText(rows.ids, rows.prompt, rows.lengths, log_p, sampling.temperature)


def acceptance_probabilities(student: PreTrainedModel, text: TargetText, memory: float = 2.0) -> list[np.ndarray]:
    """Return the probability that each token of the target is accepted, by text; a text's first is not drafted."""
    rows = list(zip(text.ids, text.lengths, text.log_p, strict=True))
    texts = [(ids[: text.prompt], ids[text.prompt :][:n]) for ids, n, _ in rows]
    return replay(student, texts, [log_p[:n] for _, n, log_p in rows], text.temperature, memory)


def replay(
    student: PreTrainedModel,
    texts: list[tuple[np.ndarray, np.ndarray]],
    log_p: list[np.ndarray],
    temperature: float,
    memory: float = 2.0,
) -> list[np.ndarray]:
    """Do the same for texts as ids of (prompt, continuation). log_p: the target's, of each continuation."""
    was_training, vocab = student.training, int(student.config.get_text_config().vocab_size)
    student.eval()
    scored = score_tokens(HFDecoder(student), texts, vocab, SamplingParams(temperature=temperature), memory=memory)
    student.train(was_training)
    return [expected.chances(draft.logprobs, target)[1:] for draft, target in zip(scored, log_p, strict=True)]


def compare_lengths(before: list[np.ndarray], after: list[np.ndarray]) -> list[LengthComparison]:
    """Compare acceptance probabilities of the same texts before and after training, at every K."""
    comparisons = []
    for k in KS:
        old, new = tokens_per_pass(before, k), tokens_per_pass(after, k)
        now = ratio_interval(new)
        gain = ratio_interval(np.stack([old[:, 1], new[:, 1]], 1))  # same texts: passes over passes
        first = float(old[:, 0].sum() / old[:, 1].sum())
        comparisons.append(
            LengthComparison(k=k, before=first, after=now.value, low=now.low, high=now.high, gain_low=gain.low)
        )
    return comparisons
