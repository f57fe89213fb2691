"""Answers of servers in token ids, checked against the request. No torch.

n tokens, k top tokens. An answer that lacks something raises KeyError, TypeError and the like.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator
from typing_extensions import Self

LARGEST_ID = 1 << 24

Answer = Any  # parsed JSON
TokenId = Annotated[int, Field(strict=True, ge=0, le=LARGEST_ID)]
Logprob = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TopLogprobs = tuple[list[int], list[float]]  # k ids and log-probabilities, the most probable first
TOKEN_IDS = TypeAdapter(list[TokenId])


class PromptLogprobs(BaseModel):
    """Log-probabilities that a server gives to the tokens of a text after the first, and its k top tokens there."""

    model_config = ConfigDict(frozen=True)

    logprobs: list[Logprob]
    top_ids: list[list[TokenId]]  # [n][k], the most probable first; [] for k = 0
    top_logprobs: list[list[Logprob]]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if len(self.top_ids) not in (0, len(self.logprobs)):
            raise ValueError(
                f"{len(self.logprobs)} tokens with {len(self.top_ids)} lists of top tokens"
            )
        return self


class ServedCompletion(PromptLogprobs):
    """The n tokens that a server generated after a prompt, eos included, with their log-probabilities."""

    prompt_ids: list[int]
    ids: list[TokenId]
    # stop: eos; length: max_tokens; None: a log does not tell
    finish_reason: Literal["stop", "length"] | None

    @model_validator(mode="after")
    def _has_a_logprob_for_each_token(self) -> Self:
        if len(self.ids) != len(self.logprobs):
            raise ValueError(f"{len(self.ids)} tokens with {len(self.logprobs)} log-probabilities")
        return self

    def as_json(self) -> str:
        """Return one line of a traffic file (docs/formats.md)."""
        return self.model_dump_json(exclude={"finish_reason"})


def top_k(entries: Iterable[tuple[int, float]], k: int) -> TopLogprobs:
    """Return the k most probable entries; servers list the actual token too, whatever its rank."""
    top = sorted(entries, key=lambda entry: -entry[1])[:k]
    if len(top) < k:
        raise ValueError(f"{len(top)} top tokens instead of {k}")
    return [i for i, _ in top], [value for _, value in top]


def completion(
    prompt: list[int],
    ids: list[int],
    logprobs: list[float],
    tops: Sequence[TopLogprobs],
    reason: Any,
) -> ServedCompletion:
    """Return a checked completion. Raises ValueError: values are missing, or are no ids or not finite."""
    top_ids, top_logprobs = _columns(tops)
    return ServedCompletion(
        prompt_ids=prompt,
        ids=ids,
        logprobs=logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        finish_reason=reason,
    )


def prompt_logprobs(tops: Sequence[TopLogprobs], actual: list[float]) -> PromptLogprobs:
    """Return checked log-probabilities of a text. Raises ValueError: The errors of completion."""
    top_ids, top_logprobs = _columns(tops)
    return PromptLogprobs(logprobs=actual, top_ids=top_ids, top_logprobs=top_logprobs)


def _columns(tops: Sequence[TopLogprobs]) -> tuple[list[list[int]], list[list[float]]]:
    return [ids for ids, _ in tops], [values for _, values in tops]
