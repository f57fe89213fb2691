"""Acceptance length of a student: tokens per target pass on the target's text, at every K from one pass per text.

R texts, P prompt tokens, N generated tokens of all texts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from draftlab.acceptance import expected
from draftlab.acceptance.expected import tokens_per_pass
from draftlab.acceptance.token_logprobs import score_offsets, score_tokens
from draftlab.console import note, progress
from draftlab.data import HeldOut
from draftlab.engine.batch_generate import Batching, generate_batch
from draftlab.intervals import ratio
from draftlab.model.checkpoint import Weights, max_model_len
from draftlab.model.decoder import Decoder
from draftlab.model.hf_decoder import HFDecoder
from draftlab.sampling import SamplingParams
from draftlab.training import checkpointer
from draftlab.training.objectives import Offsets
from draftlab.training.texts import Author
from draftlab.training.trainer import LengthComparison

KS = tuple(range(1, 9))
EVALUATED_TEXTS, EVALUATED_PROMPT, EVALUATED_LENGTH = (
    48,
    64,
    64,
)  # number of texts, prompt tokens and generated tokens for acceptance length
CPU_OPERATIONS = 7e11  # operations per evaluation on a CPU, about four seconds: limits the texts


@dataclass(frozen=True, slots=True)
class TargetText:
    """Text that the target wrote: ids of (prompt, continuation), and log-probabilities of the continuations.

    temperature: Temperature of the sampling and of log_p. 0 is greedy.
    """

    texts: list[tuple[np.ndarray, np.ndarray]]
    log_p: list[np.ndarray]
    temperature: float = 0.0

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], temperature: float = 0.0) -> "TargetText":
        """Convert the arrays that generate() returns."""
        ends, starts = np.cumsum(arrays["lengths"])[:-1], np.cumsum(arrays["prompt_lengths"])[:-1]
        texts = list(
            zip(np.split(arrays["prompts"], starts), np.split(arrays["ids"], ends), strict=True)
        )
        return cls(texts, np.split(arrays["log_p"], ends), temperature)


def generate(
    target: Decoder,
    prompts: Sequence[np.ndarray],
    sampling: SamplingParams,
    batching: Batching,
    advance: Callable[[int], None],
) -> dict[str, np.ndarray]:
    """Let the target continue R prompts. Return arrays to store: prompts, lengths [R], ids [N] and log_p [N]."""
    texts = generate_batch(
        target, [ids.tolist() for ids in prompts], sampling, batching, advance=advance
    )
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
    """Return for each text the probability that each token is accepted, without the first token, from the prefill.

    offsets: Offsets of a parallel draft, which has a probability for each offset, [n, K].
    """
    was_training, vocab = student.training, int(student.config.get_text_config().vocab_size)
    sampling = SamplingParams(temperature=text.temperature)
    student.eval()
    if offsets is None:
        scored = score_tokens(HFDecoder(student), text.texts, vocab, sampling, memory=memory)
    else:
        count, token = offsets.count, offsets.token
        scored = score_offsets(
            HFDecoder(student), text.texts, vocab, sampling, count, token, memory=memory
        )
    student.train(was_training)
    targets = text.log_p if offsets is None else [log_p[:, None] for log_p in text.log_p]
    return [
        expected.chances(draft.logprobs, target)[1:]
        for draft, target in zip(scored, targets, strict=True)
    ]


def compare_lengths(before: list[np.ndarray], after: list[np.ndarray]) -> list[LengthComparison]:
    """Compare acceptance probabilities of the same texts before and after training, at every K."""
    comparisons = []
    for k in KS if before[0].ndim == 1 else range(1, before[0].shape[1] + 1):
        old, new = tokens_per_pass(before, k), tokens_per_pass(after, k)
        now = ratio(new)
        gain = ratio(np.stack([old[:, 1], new[:, 1]], 1))  # same tokens: ratio of passes
        first = float(old[:, 0].sum() / old[:, 1].sum())
        comparisons.append(
            LengthComparison(
                k=k, before=first, after=now.value, low=now.low, high=now.high, gain_low=gain.low
            )
        )
    return comparisons


def affordable(most: int, operations: float, device: torch.device) -> int:
    """Return how many texts to evaluate on: `most`, or down to a quarter on a CPU if a text needs many operations."""
    return (
        most
        if device.type != "cpu"
        else max(most // 4, min(most, int(CPU_OPERATIONS / operations)))
    )


@dataclass(frozen=True, slots=True)
class TargetTextEvaluator:
    """Evaluates a student on the target's text. state: Directory that stores the probabilities of every evaluation."""

    text: TargetText
    state: Path
    memory: float = 2.0
    offsets: Offsets | None = None

    @classmethod
    def of(
        cls,
        author: Author,
        draft: Path,
        heldout: HeldOut,
        state: Path,
        offsets: Offsets | None = None,
        temperature: float = 0.0,
    ) -> "TargetTextEvaluator | None":
        """Let the target write the texts. Return None if no prompt fits the context, or if every text has one token."""
        context = min(max_model_len(author.target), max_model_len(draft))
        prompt = min(EVALUATED_PROMPT, context // 2)
        sampling = author.sampling(min(EVALUATED_LENGTH, context - prompt), temperature)
        operations = 2 * Weights(author.target).parameters * (prompt + sampling.max_tokens)
        count = affordable(EVALUATED_TEXTS, operations, author.hardware.resolved)
        windows = heldout.starts(count, prompt)
        windows = [ids for ids in windows if len(ids) + sampling.max_tokens <= context]
        if not windows:
            note(
                f"no held-out conversation fits {context} tokens: acceptance length is not measured"
            )
            return None

        def make() -> dict[str, np.ndarray]:
            with progress("the target writes text to evaluate on", len(windows)) as advance:
                return generate(
                    author.model, windows, sampling, author.batching, lambda n: advance(n, "texts")
                )

        arrays = checkpointer.load_or_make(state / "evaluation.pt", make)
        if arrays["lengths"].max(initial=0) < 2:
            note("the target ends every text at once: acceptance length is not measured")
            return None
        return cls(TargetText.of(arrays, temperature), state, author.hardware.memory, offsets)

    def __call__(self, student: PreTrainedModel, step: int) -> float:
        """Return tokens per target pass at K = 4, or at a parallel draft's number of offsets if that is smaller."""
        chances = acceptance_probabilities(student, self.text, self.memory, self.offsets)
        checkpointer.load_or_make(
            self._file(step), lambda: {f"{i:04d}": row for i, row in enumerate(chances)}
        )
        tokens, passes = tokens_per_pass(
            chances, min(4, self.offsets.count if self.offsets else 4)
        ).sum(0)
        return float(tokens / passes)

    def compare(self, before: int, after: int) -> list[LengthComparison]:
        """Compare two evaluated steps at every K."""
        rows: list[list[np.ndarray]] = []
        for step in (before, after):
            chances = checkpointer.load(self._file(step))
            rows.append([chances[name].numpy() for name in sorted(chances)])
        return compare_lengths(*rows)

    def _file(self, step: int) -> Path:
        return self.state / f"acceptance-{step:08d}.pt"
