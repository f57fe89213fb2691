"""Sequences in memory that a target wrote or read, with the target's log-probabilities.

R sequences, n tokens of a sequence after its prompt, T tokens of a row, k listed tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import numpy as np

from draftlab.data import Batch, grouped_holdout
from draftlab.errors import UserError
from draftlab.sampling import FinishReason

# distillation temperatures; their log-normalisers are stored
TEMPERATURES = (0.6, 0.8, 1.0, 1.5, 2.0)
# Largest difference, in nats, between a token's log-probability and its entry in the list of the same server answer.
# The probabilities in a list may sum to at most 1 + ROUNDING.
ROUNDING = 0.01
LEAST_LOGPROB = -1e4  # replaces -inf, and is finite in float16
# smallest probability of all unlisted tokens together, because rounding could make it 0 or negative
LEAST_REST = 1e-7


@dataclass(frozen=True, slots=True)
class StoredLogprobs:
    """The k most probable tokens at each of n positions, in the target's distribution at temperature 1."""

    ids: np.ndarray  # [n, k], the most probable first
    logprobs: np.ndarray  # [n, k], never renormalised
    rest: np.ndarray  # [n] log-probability of all other tokens together
    token: np.ndarray  # [n] log-probability of the token that follows in the text
    # [n, temperatures]; at temperature t, the log-probability is logprob / t - normalizer
    normalizers: np.ndarray

    @classmethod
    def joined(cls, parts: "Sequence[StoredLogprobs]") -> "StoredLogprobs":
        columns = zip(*map(attrgetter(*cls.__slots__), parts), strict=True)
        return cls(*map(np.concatenate, columns))

    @classmethod
    def of_lists(
        cls, ids: np.ndarray, logprobs: np.ndarray, token_logprobs: np.ndarray, tokens: np.ndarray
    ) -> "StoredLogprobs":
        """Convert the lists of a server's answer. The result can only be used at temperature 1.

        Args:
            ids: The most probable tokens at each position, [n, k].
            logprobs: Log-probabilities of these tokens, [n, k].
            token_logprobs: Log-probability of the next token at each position, [n].
            tokens: Next token at each position, [n].

        Raises:
            ValueError: Probabilities sum to more than 1, or a next token's log-probability contradicts the list.
        """
        logprobs = np.maximum(logprobs, LEAST_LOGPROB)
        token_logprobs = np.maximum(token_logprobs, LEAST_LOGPROB)
        total = np.exp(logprobs.astype(np.float64)).sum(1).max(initial=0.0)
        if total > 1 + ROUNDING:
            raise ValueError(f"the listed probabilities sum to {total:.3f}, more than 1")
        inside = ids == tokens[:, None]  # [n, k]
        listed = np.where(inside, logprobs, 0).sum(1)
        by_list = np.where(inside.any(1), listed, np.minimum(token_logprobs, logprobs[:, -1]))
        wrong = np.flatnonzero(np.abs(by_list - token_logprobs) > ROUNDING)
        if len(wrong):
            i = wrong[0]
            raise ValueError(
                f"token {tokens[i]} at position {i} has log-probability {token_logprobs[i]:.4f}, but "
                f"{by_list[i]:.4f} in the list of most probable tokens there"
            )
        return cls(ids, logprobs, log_rest(logprobs), by_list, np.zeros((len(ids), 1), np.float32))

    def at(self, temperature: float, temperatures: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        """Return log-probabilities at a temperature: of listed tokens, [n, k], and of all other tokens together, [n].

        temperatures: Temperatures of the columns of `normalizers`.
        """
        if temperature == 1:
            return self.logprobs, self.rest
        normalizers = self.normalizers[:, list(temperatures).index(temperature)]
        logprobs = self.logprobs / np.float32(temperature) - normalizers[:, None]
        listed = np.exp(np.logaddexp.reduce(logprobs, axis=-1))
        return logprobs, np.log(np.clip(1 - listed, 1e-30, None)).astype(np.float32)

    def parts(self, counts: Iterable[float]) -> "list[StoredLogprobs]":
        """Split the positions into consecutive parts. counts: Number of positions in each part."""
        ends = np.cumsum([0, *map(int, counts)]).tolist()
        return [self[start:end] for start, end in pairwise(ends)]

    def __getitem__(self, rows: slice) -> "StoredLogprobs":
        return StoredLogprobs(*(getattr(self, name)[rows] for name in self.__slots__))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutput:
    """A prompt and the n tokens after it. The target wrote these tokens. In a store with text="data", it read them."""

    number: int  # position of the prompt in its file or data
    category: str = ""
    # number of the conversation of which the prompt is a turn; None in stores that were built before this field
    conversation: int | None = None
    prompt: np.ndarray  # never empty
    ids: np.ndarray  # [n]
    finish_reason: FinishReason = "length"
    logprobs: np.ndarray | None = None  # [n], in the distribution that Manifest.logprobs names
    top: StoredLogprobs | None = None  # the most probable tokens at each counted position
    # [n] bool, True for the tokens to train on, which are counted; None: all tokens are counted
    counted: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.ids)

    @property
    def key(self) -> str:
        """Return the prompt, or the whole text if the prompt is a single token, as in data (see data.split_key)."""
        alone = len(self.prompt) == 1
        return str((np.concatenate([self.prompt, self.ids]) if alone else self.prompt).tolist())


def heldout_numbers(outputs: "Sequence[TargetOutput]", share: float) -> list[int]:
    """Return the indices of the outputs to hold out from a store without held-out texts. A hash of the prompts decides.

    Raises:
        UserError: All outputs have the same prompt.
    """
    keys = [output.key for output in outputs]
    chosen = grouped_holdout(keys, None, max(1, round(share * len(keys))))
    if not chosen:
        raise UserError(
            f"the {len(keys)} stored texts have the same prompt, so none can be held out; store answers to other "
            "prompts, too"
        )
    return chosen


def log_rest(logprobs: np.ndarray) -> np.ndarray:
    """Return the log-probability of all unlisted tokens together, [n].

    logprobs: Log-probabilities of the listed tokens, [n, k].
    """
    listed = np.logaddexp.reduce(logprobs.astype(np.float64), axis=-1)
    return np.log(-np.expm1(np.minimum(listed, -LEAST_REST))).astype(np.float32)


def padded(outputs: Sequence[TargetOutput], seq_len: int | None = None) -> Batch:
    """Return a batch with a row for each output, cut or padded to seq_len + 1 tokens.

    Without seq_len, rows have the length of the longest output. The mask selects the tokens after the prompt. If an
    output has `counted`, the mask selects only the tokens where it is True.
    """
    width = max(map(len, outputs)) if seq_len is None else seq_len + 1
    ids = np.zeros((len(outputs), width), np.int64)
    mask = np.zeros((len(outputs), width - 1), np.float32)
    for row, counted, output in zip(ids, mask, outputs, strict=True):
        whole = np.concatenate([output.prompt, output.ids])[:width]
        row[: len(whole)] = whole
        marks = np.ones(len(output.ids), bool) if output.counted is None else output.counted
        counted[len(output.prompt) - 1 : len(whole) - 1] = marks[: len(whole) - len(output.prompt)]
    return Batch(ids, mask)


def split(batch: Batch, top: StoredLogprobs, first: int) -> list[TargetOutput]:
    """Convert a batch of data to outputs with the numbers first, first + 1, ...

    Each output is cut after its last token in the mask.

    top: The most probable tokens at all positions in the mask, row by row.
    """
    outputs = []
    rows = zip(batch.ids, batch.mask > 0, batch.lengths, top.parts(batch.mask.sum(1)), strict=True)
    for number, (row, mask, length, part) in enumerate(rows, first):
        counted = mask[:length]
        outputs.append(
            TargetOutput(
                number=number,
                prompt=row[:1],
                ids=row[1 : length + 1],
                top=part,
                counted=None if counted.all() else counted,
            )
        )
    return outputs
