"""Generations step by step, counters of servers, and the acceptance metrics of both. Torch is not imported.

Metrics have vLLM's names (0.32, per-request speculative metrics). A step is one target pass after the prefill, with the
drafting before it. A step that accepts a tokens emits a + 1 tokens, or fewer if EOS or the length limit cuts the text.
"""

import math
from collections.abc import Callable, Sequence
from operator import eq
from typing import TypeVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from draftlab import intervals
from draftlab.config.base import MAX_K
from draftlab.intervals import Timing
from draftlab.reading import FileModel


class Generation(FileModel):
    """One decoding of a prompt. The prefill emits the first token. The lists have one entry for each later step."""

    prompt: NonNegativeInt  # index of the prompt in the score's prompts
    tokens: PositiveInt  # number of emitted tokens, including the prefill's token
    drafted: list[NonNegativeInt]
    accepted: list[NonNegativeInt]
    emitted: list[NonNegativeInt]
    prefill_seconds: NonNegativeFloat
    draft_seconds: NonNegativeFloat
    verify_seconds: NonNegativeFloat
    host_seconds: NonNegativeFloat
    # number of passes that other work interrupted, and whose time is replaced by a median
    stalled_passes: NonNegativeInt = 0
    # seconds by which the replacement shortened these passes
    stalled_seconds: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _adds_up(self) -> "Generation":
        if self.tokens != 1 + sum(self.emitted):
            raise ValueError(
                f"tokens is {self.tokens}, but the prefill emits 1 token and the steps emit {sum(self.emitted)}"
            )
        return self

    @property
    def decode_seconds(self) -> float:
        """Return the seconds after the prefill. They are measured in the same way in plain and speculative decoding."""
        return self.draft_seconds + self.verify_seconds + self.host_seconds

    @property
    def request(self) -> Timing:
        """Return the number of all tokens, and all seconds, including the prefills of target and draft."""
        return self.tokens, self.prefill_seconds + self.decode_seconds

    @property
    def decoding(self) -> Timing:
        """Return the number of tokens after the first, and the seconds of these tokens."""
        return self.tokens - 1, self.decode_seconds


class ServedGeneration(FileModel):
    """One decoding of a prompt by a server. A server reports neither its steps nor the time of the prefill."""

    prompt: NonNegativeInt
    tokens: NonNegativeInt
    seconds: NonNegativeFloat  # time from request to answer

    @property
    def request(self) -> Timing:
        """Return the number of all tokens, and all seconds, including prefill and transport."""
        return self.tokens, self.seconds


AnyGeneration = Generation | ServedGeneration
G = TypeVar("G", bound=AnyGeneration)
T = TypeVar("T")


class AcceptanceMetrics(FileModel):
    """Acceptance over all steps of some generations. Read acceptance rate and acceptance length together.

    The numbers of steps and tokens are integers if they were counted. If they are expected values, they are floats.
    """

    num_spec_steps: int | float
    num_draft_tokens: int | float
    num_accepted_draft_tokens: int | float
    draft_acceptance_rate: float  # accepted / drafted
    # tokens per target pass, including the target's own token (TAR in Decoding Speculative Decoding)
    mean_acceptance_length: float
    # fraction of steps that accepted at least i tokens, i = 1..K
    per_position_acceptance: list[float]
    # of the steps that drafted token i and accepted all tokens before it, the fraction that accepted token i
    conditional_acceptance: list[float]
    acceptance_histogram: list[int | float]  # number of steps with 0, 1, ..., K accepted tokens
    # number of steps that EOS or the length limit cut; None: servers do not report it
    n_truncated_steps: int | float | None


class Expected(FileModel):
    """What a replay and the time of single passes predict for each of R prompts at one K.

    The counts are expected values, see acceptance/expected.py.

    Args:
        seconds: Seconds of each request, with the prefills of target and draft, [R].
        draft_seconds, verify_seconds, host_seconds: Seconds after the prefill by phase, [R].
        passes: Target passes after the prefill, [R].
        drafted: Drafted tokens, [R].
        reached: In column a, steps that accepted at least a tokens, [R, K + 1].
        examined: In column a, steps that accepted a tokens and drafted one more token inside the text, [R, K].
        truncated: Steps that ended the text with a drafted token, [R].
    """

    seconds: list[NonNegativeFloat]
    draft_seconds: list[NonNegativeFloat]
    verify_seconds: list[NonNegativeFloat]
    host_seconds: list[NonNegativeFloat]
    passes: list[NonNegativeFloat]
    drafted: list[NonNegativeFloat]
    reached: list[list[NonNegativeFloat]]
    examined: list[list[NonNegativeFloat]]
    truncated: list[NonNegativeFloat]

    @property
    def acceptance(self) -> AcceptanceMetrics:
        """Return the acceptance metrics over all prompts together."""
        return acceptance_from_counts(
            reached=[sum(column) for column in zip(*self.reached, strict=True)],
            eligible=[sum(column) for column in zip(*self.examined, strict=True)],
            drafted=sum(self.drafted),
            truncated=sum(self.truncated),
        )

    def only(self, rows: Sequence[int]) -> "Expected":
        """Return the prompts in these rows."""
        return Expected(**{name: [getattr(self, name)[i] for i in rows] for name in Expected.model_fields})


class Counters(FileModel):
    """The growth of a server's counters of speculative decoding over all generations at one K."""

    num_drafts: float = Field(gt=0)
    num_draft_tokens: float = Field(ge=0)
    # number of accepted tokens at positions 1..K; zeros at the end may be left out
    num_accepted_tokens_per_pos: list[NonNegativeFloat]

    @model_validator(mode="after")
    def _adds_up(self) -> "Counters":
        falling = [self.num_drafts, *self.num_accepted_tokens_per_pos]
        if falling != sorted(falling, reverse=True):
            raise ValueError("a position has more accepted tokens than the position before it")
        accepted = sum(self.num_accepted_tokens_per_pos)
        if not accepted <= self.num_draft_tokens <= MAX_K * self.num_drafts:
            raise ValueError(
                f"the counters contradict each other: {self.num_drafts:g} drafts with {self.num_draft_tokens:g} "
                f"tokens, of which {accepted:g} were accepted"
            )
        return self

    @property
    def k(self) -> int:
        return max(
            len(self.num_accepted_tokens_per_pos),
            math.ceil(self.num_draft_tokens / self.num_drafts),
        )

    @property
    def acceptance(self) -> AcceptanceMetrics:
        """Return the acceptance metrics, assuming that every step drafted K tokens."""
        accepted = self.num_accepted_tokens_per_pos
        reached = [self.num_drafts, *accepted, *[0.0] * (self.k - len(accepted))]
        return acceptance_from_counts(
            reached=reached, eligible=reached[:-1], drafted=self.num_draft_tokens, truncated=None
        )


def count_acceptance(generations: list[Generation], k: int) -> AcceptanceMetrics:
    """Return the acceptance metrics of generations. Steps without drafted tokens are not counted.

    Raises:
        ValueError: The numbers of drafted, accepted and emitted tokens in a step contradict each other.
    """
    reached = [0] * (k + 1)
    eligible = [0] * k
    total_drafted = truncated = 0
    for generation in generations:
        steps = zip(generation.drafted, generation.accepted, generation.emitted, strict=True)
        for drafted, accepted, emitted in steps:
            if drafted == 0:
                continue
            if not 0 <= accepted <= drafted <= k or not 1 <= emitted <= accepted + 1:
                raise ValueError(
                    f"a step with {drafted} drafted, {accepted} accepted and {emitted} emitted tokens is impossible "
                    f"at K = {k}"
                )
            for i in range(accepted + 1):
                reached[i] += 1
            for i in range(min(accepted + 1, drafted)):
                eligible[i] += 1
            total_drafted += drafted
            truncated += emitted < accepted + 1
    return acceptance_from_counts(reached=reached, eligible=eligible, drafted=total_drafted, truncated=truncated)


def acceptance_from_counts(
    *, reached: Sequence[float], eligible: Sequence[float], drafted: float, truncated: float | None
) -> AcceptanceMetrics:
    """Return the acceptance metrics from numbers of steps and tokens.

    All arguments are counts over the steps that drafted tokens, or expected values of these counts.

    Args:
        reached: Number of steps that accepted at least i tokens, i = 0..K.
        eligible: Number of steps that drafted token i and accepted all tokens before it, i = 1..K.
        drafted: Number of drafted tokens.
        truncated: Number of steps that the end of the text cut. None if unknown.
    """
    n = reached[0]
    accepted = sum(reached[1:])
    return AcceptanceMetrics(
        num_spec_steps=n,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
        draft_acceptance_rate=accepted / drafted if drafted else 0.0,
        mean_acceptance_length=1 + accepted / n if n else 1.0,
        per_position_acceptance=[r / n if n else 0.0 for r in reached[1:]],
        conditional_acceptance=[r / e if e else 0.0 for r, e in zip(reached[1:], eligible, strict=True)],
        acceptance_histogram=[a - b for a, b in zip(reached, [*reached[1:], 0], strict=True)],
        n_truncated_steps=truncated,
    )


def repeats_by_prompt(generations: Sequence[G], value: Callable[[G], T]) -> list[list[T]]:
    """Return for each prompt the list of `value(generation)` over its repeats, in the order of the prompts."""
    by_prompt: dict[int, list[T]] = {}
    for generation in generations:
        by_prompt.setdefault(generation.prompt, []).append(value(generation))
    return [by_prompt[prompt] for prompt in sorted(by_prompt)]


def request_timings(generations: Sequence[AnyGeneration]) -> list[Timing]:
    """Return the tokens and seconds of each prompt's request, for the repeat with the median time per token."""
    return list(map(intervals.median_repeat, repeats_by_prompt(generations, lambda g: g.request)))


def decode_timings(generations: Sequence[Generation]) -> list[Timing]:
    """Return the number of each prompt's tokens after the first, and their seconds.

    They are those of the repeat with the median time per token.
    """
    return list(map(intervals.median_repeat, repeats_by_prompt(generations, lambda g: g.decoding)))


def share_of_equal_texts(plain: list[list[int]], arms: Sequence[list[list[int]]]) -> float:
    """Return the fraction of texts that equal the text of plain decoding for the same prompt.

    Args:
        plain: Token ids of each prompt's text, by plain decoding.
        arms: Token ids of each prompt's text, for each other way to decode. For example, K = 2 and K = 4 are two ways.
    """
    equal: list[bool] = []
    for texts in arms:
        equal += map(eq, texts, plain)
    return sum(equal) / len(equal)
