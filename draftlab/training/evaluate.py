"""Measure a student's acceptance length (tokens per target pass) on text that the target wrote.

The student makes one pass over each text. This pass gives the acceptance length for every K, the number of drafted
tokens. Shapes: R texts, n generated tokens of a text.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from draftlab.acceptance import expected
from draftlab.acceptance.expected import tokens_per_pass
from draftlab.acceptance.token_logprobs import score_offsets, score_tokens
from draftlab.console import note
from draftlab.data import HeldOut
from draftlab.intervals import Interval, by_conversation, ratio
from draftlab.model.checkpoint import Weights, max_model_len
from draftlab.model.hf_decoder import HFDecoder
from draftlab.sampling import SamplingParams
from draftlab.training import checkpointer
from draftlab.training.objectives import Offsets
from draftlab.training.texts import Author

MOST = 8  # largest number of drafted tokens of an ordinary draft
EVALUATED_TEXTS = 48  # number of texts on which acceptance length is measured
EVALUATED_PROMPT = EVALUATED_LENGTH = 64  # prompt tokens and generated tokens of each text
# most operations of an evaluation on a CPU, about four seconds; they limit the number of texts
CPU_OPERATIONS = 7e11


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthComparison:
    """The tokens per target pass with k drafted tokens, before and after training.

    gain: after / before.
    """

    k: int
    before: float
    after: Interval
    gain: Interval


def affordable(most: int, operations: float, device: torch.device) -> int:
    """Return how many texts to evaluate on, `most` or fewer.

    On a CPU, the number is reduced to what the CPU computes in a few seconds, but not below a quarter of `most`.

    operations: Floating-point operations per text.
    """
    if device.type != "cpu":
        return most
    return max(most // 4, min(most, int(CPU_OPERATIONS / operations)))


@dataclass(frozen=True, slots=True)
class TargetTextEvaluator:
    """A callable that measures the acceptance length of a student on text that the target wrote.

    Attributes:
        prompts: Token ids of the prompt of each text.
        ids: Token ids of the target's continuation of each prompt.
        log_p: The target's log-probabilities of the continuation's tokens, for each text.
        documents: Number of the document from which each prompt is cut. None: each prompt counts for itself.
        temperature: Temperature of the sampling and of log_p. 0 is greedy.
        state: Directory in which the acceptance probabilities of every evaluation are stored.
        memory: Gigabytes for the logits of a pass.
        offsets: Offsets of a parallel draft. None for an ordinary draft.
    """

    prompts: list[list[int]]
    ids: list[list[int]]
    log_p: list[list[float]]
    state: Path
    temperature: float = 0.0
    memory: float = 2.0
    offsets: Offsets | None = None
    documents: list[int] | None = None

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
        """Let the target write the texts to evaluate on, and return the evaluator.

        Return None if no prompt fits in the context, or if every text has only one token.
        """
        context = min(max_model_len(author.target), max_model_len(draft))
        prompt = min(EVALUATED_PROMPT, context // 2)
        sampling = author.sampling(min(EVALUATED_LENGTH, context - prompt), temperature)
        operations = 2 * Weights(author.target).parameters * (prompt + sampling.max_tokens)
        count = affordable(EVALUATED_TEXTS, operations, author.hardware.resolved)
        windows = heldout.starts(count, prompt)
        fitting = [i for i, ids in enumerate(windows) if len(ids) + sampling.max_tokens <= context]
        if not fitting:
            note(
                "the acceptance length is not measured, because no held-out text with its answer fits into the "
                f"context of {context} tokens"
            )
            return None

        def make() -> dict[str, Any]:
            prompts = [windows[i].tolist() for i in fitting]
            texts = author.write(prompts, sampling, "evaluate on")
            return {
                "prompts": prompts,
                "ids": [text.ids.tolist() for text in texts],
                "log_p": [text.logprobs.tolist() for text in texts],
                "documents": heldout.documents and [heldout.documents[i] for i in fitting],
            }

        stored = checkpointer.load_or_make(state, "evaluation.pt", make)
        if max(map(len, stored["ids"])) < 2:
            note("the acceptance length is not measured, because the target ends every text with the first new token")
            return None
        return cls(
            **stored,
            state=state,
            temperature=temperature,
            memory=author.hardware.memory,
            offsets=offsets,
        )

    @property
    def most(self) -> int:
        """Return the largest number of drafted tokens for which the acceptance length is measured."""
        return self.offsets.count if self.offsets else MOST

    def __call__(self, student: PreTrainedModel, step: int) -> float:
        """Return the tokens per target pass at K = 4, or at a lower K if a parallel draft has fewer offsets."""
        chances = self.acceptance_probabilities(student)
        stored = [torch.from_numpy(row) for row in chances]
        checkpointer.load_or_make(self.state, _file(step), lambda: {"chances": stored})
        tokens, passes = tokens_per_pass(chances, min(4, self.most)).sum(0)
        return float(tokens / passes)

    def acceptance_probabilities(self, student: PreTrainedModel) -> list[np.ndarray]:
        """Return for each text the acceptance probabilities of its n generated tokens except the first, [n - 1].

        The first generated token comes from the prefill, so it is never drafted. For a parallel draft with K offsets,
        the result of a text is [n - 1, K], with a column for each offset.
        """
        was_training = student.training
        vocab = int(student.config.get_text_config().vocab_size)
        decoder = HFDecoder(student.eval(), trained=True)
        texts = list(zip(map(np.array, self.prompts), map(np.array, self.ids), strict=True))
        sampling = SamplingParams(temperature=self.temperature)
        targets = [np.array(log_p, np.float32) for log_p in self.log_p]
        if self.offsets is None:
            scored = score_tokens(decoder, texts, vocab, sampling, memory=self.memory)
        else:
            count = self.offsets.count
            token = self.offsets.token
            scored = score_offsets(decoder, texts, vocab, sampling, count, token, memory=self.memory)
            targets = [log_p[:, None] for log_p in targets]
        student.train(was_training)
        return [expected.chances(draft.logprobs, target)[1:] for draft, target in zip(scored, targets, strict=True)]

    def compare(self, before: int, after: int) -> list[LengthComparison]:
        """Compare the evaluations after the training steps `before` and `after`, for every number of drafted tokens."""
        comparisons = []
        chances = [self._stored(step) for step in (before, after)]
        for k in range(1, self.most + 1):
            old, new = (by_conversation(tokens_per_pass(rows, k), self.documents) for rows in chances)
            now = ratio(new)
            # both evaluations have the same tokens, so this is a ratio of passes
            gain = ratio(np.stack([old[:, 1], new[:, 1]], 1))
            first = float(old[:, 0].sum() / old[:, 1].sum())
            comparisons.append(LengthComparison(k=k, before=first, after=now, gain=gain))
        return comparisons

    def _stored(self, step: int) -> list[np.ndarray]:
        return [row.numpy() for row in checkpointer.load(self.state, _file(step))["chances"]]


def _file(step: int) -> str:
    return f"acceptance-{step:08d}.pt"
