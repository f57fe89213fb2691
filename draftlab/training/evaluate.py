"""Acceptance length of a student: tokens per target pass on text that the target wrote, for every K from one pass.

R texts, P prompt tokens, N generated tokens of all texts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from draftlab.acceptance import expected
from draftlab.acceptance.expected import tokens_per_pass
from draftlab.acceptance.offset_logprobs import score_offsets
from draftlab.acceptance.token_logprobs import score_tokens
from draftlab.engine.batch_generate import Batching, generate_batch
from draftlab.intervals import ratio_interval
from draftlab.model.decoder import Decoder
from draftlab.model.hf_decoder import HFDecoder
from draftlab.sampling import SamplingParams
from draftlab.training.parallel import Offsets

KS = tuple(range(1, 9))


@dataclass(frozen=True, slots=True)
class TargetText:
    """Text that the target wrote: ids of (prompt, continuation), and its log-probabilities of each continuation."""

    texts: list[tuple[np.ndarray, np.ndarray]]
    log_p: list[np.ndarray]
    temperature: float  # of log_p; 0: greedy

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], temperature: float) -> "TargetText":
        """Return what generate() returned as arrays."""
        ends, starts = np.cumsum(arrays["lengths"])[:-1], np.cumsum(arrays["prompt_lengths"])[:-1]
        texts = list(zip(np.split(arrays["prompts"], starts), np.split(arrays["ids"], ends), strict=True))
        return cls(texts, np.split(arrays["log_p"], ends), temperature)


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
    prompts: Sequence[np.ndarray],
    sampling: SamplingParams,
    batching: Batching,
    advance: Callable[[int], None],
) -> dict[str, np.ndarray]:
    """Let the target continue R prompts; return them, lengths [R], ids [N] and log_p [N] as arrays of a file."""
    texts = generate_batch(target, [ids.tolist() for ids in prompts], sampling, batching, advance=advance)
    return {
        "prompts": np.concatenate(prompts),
        "prompt_lengths": np.array(list(map(len, prompts))),
        "lengths": np.array([len(text.ids) for text in texts]),
        "ids": np.concatenate([text.ids for text in texts]),
        "log_p": np.concatenate([text.logprobs for text in texts]).astype(np.float32),
    }


def acceptance_probabilities(
    student: PreTrainedModel, text: TargetText, memory: float = 2.0, offsets: Offsets | None = None
) -> list[np.ndarray]:
    """Return the probability that each token of the target is accepted, by text; a text's first is not drafted.

    offsets: of a parallel draft, for which they are by offset, [n, K].
    """
    was_training, vocab = student.training, int(student.config.get_text_config().vocab_size)
    sampling = SamplingParams(temperature=text.temperature)
    student.eval()
    if offsets is None:
        scored = score_tokens(HFDecoder(student), text.texts, vocab, sampling, memory=memory)
    else:
        count, token = offsets.count, offsets.token
        scored = score_offsets(HFDecoder(student), text.texts, vocab, sampling, count, token, memory=memory)
    student.train(was_training)
    targets = text.log_p if offsets is None else [log_p[:, None] for log_p in text.log_p]
    return [expected.chances(draft.logprobs, target)[1:] for draft, target in zip(scored, targets, strict=True)]


def compare_lengths(before: list[np.ndarray], after: list[np.ndarray]) -> list[LengthComparison]:
    """Compare acceptance probabilities of the same texts before and after training, at every K."""
    comparisons = []
    for k in KS if before[0].ndim == 1 else range(1, before[0].shape[1] + 1):
        old, new = tokens_per_pass(before, k), tokens_per_pass(after, k)
        now = ratio_interval(new)
        gain = ratio_interval(np.stack([old[:, 1], new[:, 1]], 1))  # same texts: passes over passes
        first = float(old[:, 0].sum() / old[:, 1].sum())
        comparisons.append(
            LengthComparison(k=k, before=first, after=now.value, low=now.low, high=now.high, gain_low=gain.low)
        )
    return comparisons
