"""A server's log: one JSON line per request, with the target's top log-probabilities (docs/formats.md)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, NonNegativeInt, model_validator

from draftlab.console import note
from draftlab.errors import UserError
from draftlab.reading import FileModel, parse_json, read_lines, reading
from draftlab.servers.answers import ServedCompletion
from draftlab.target_outputs.outputs import ROUNDING, TargetOutput
from draftlab.target_outputs.store import ABOVE_ZERO
from draftlab.target_outputs.targets import outputs_of

ABOVE_ONE = 0.01  # excess over 1 that rounding may give the sum of a list's probabilities
HELD_OUT = 12  # every 12th line is held out
Logprob = Annotated[float, Field(le=ABOVE_ZERO, allow_inf_nan=False)]


class _Line(FileModel):
    """A request: its tokens, and at each of them the most probable tokens in any order."""

    model_config = ConfigDict(strict=True)

    # text starts with at least one token, such as bos
    prompt_ids: list[NonNegativeInt] = Field(min_length=1)
    ids: list[NonNegativeInt]
    top_ids: list[list[NonNegativeInt]]
    top_logprobs: list[list[Logprob]]
    logprobs: list[Logprob]

    @model_validator(mode="after")
    def _fits_together(self) -> "_Line":
        if not len(self.ids) == len(self.top_ids) == len(self.top_logprobs) == len(self.logprobs):
            raise ValueError(
                "ids, top_ids, top_logprobs and logprobs differ in their number of entries"
            )
        places = zip(self.ids, self.logprobs, self.top_ids, self.top_logprobs, strict=True)
        for place, (token, logprob, ids, values) in enumerate(places):
            listed = dict(zip(ids, values, strict=False))
            if not len(ids) == len(values) == len(listed) > 0:
                raise ValueError(
                    f"place {place}: top_ids and top_logprobs differ in length, or list a token twice"
                )
            if (total := sum(map(math.exp, values))) > 1 + ABOVE_ONE:
                raise ValueError(f"place {place}: the listed probabilities sum to {total:.3f}")
            by_list = listed.get(token, min(logprob, *values))
            if abs(by_list - logprob) > ROUNDING:
                raise ValueError(
                    f"place {place}: token {token} has log-probability {logprob}, and by the list {by_list}"
                )
        return self

    def completion(self) -> ServedCompletion:
        """Return the request with the most probable tokens first."""
        top_ids, top_logprobs = [], []
        for ids, values in zip(self.top_ids, self.top_logprobs, strict=True):
            order = sorted(range(len(ids)), key=lambda i, values=values: -values[i])
            top_ids.append([ids[i] for i in order])
            top_logprobs.append([values[i] for i in order])
        return ServedCompletion(
            prompt_ids=self.prompt_ids,
            ids=self.ids,
            logprobs=self.logprobs,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            finish_reason=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLog:
    """Lines of a log that have text within seq_len tokens. Every line lists at least top_logprobs tokens."""

    path: Path
    vocab: int
    seq_len: int
    top_logprobs: int
    starts: list[tuple[int, int]]  # line number, byte

    @classmethod
    def open(cls, path: Path, *, vocab: int, seq_len: int, top_logprobs: int) -> "ServerLog":
        """Check every line.

        Args:
            top_logprobs: Largest number of tokens of each list to use.

        Raises:
            UserError: There is no such file, a line is invalid, or fewer than two lines have text.
        """
        starts, shortest, empty = [], (top_logprobs, 0), 0
        for number, start, text in read_lines(path):
            line = _checked(text, f"{path}:{number}", vocab)
            if not line.ids or len(line.prompt_ids) > seq_len:
                empty += 1
                continue
            starts.append((number, start))
            shortest = min(
                shortest, (min(map(len, line.top_ids)), number), key=lambda pair: pair[0]
            )
        if empty:
            note(
                f"{path}: {empty} lines left out: without text, or with a prompt of more than {seq_len} tokens"
            )
        if len(starts) < 2:
            raise UserError(
                f"{path}: {len(starts)} lines with text; at least two are needed, one is held out"
            )
        if shortest[0] < top_logprobs:
            note(
                f"{path}: {shortest[0]} tokens of each list are stored, not {top_logprobs}: see line {shortest[1]}"
            )
        return cls(path=path, vocab=vocab, seq_len=seq_len, top_logprobs=shortest[0], starts=starts)

    def split(self, most: int) -> tuple[list[int], list[int]]:
        """Return the indices of the lines to train on, and of at most `most` lines to hold out."""
        every = range(len(self.starts))
        heldout = list(every[HELD_OUT - 1 :: HELD_OUT][:most]) or [every[-1]]
        return sorted(set(every) - set(heldout)), heldout

    def outputs(self, which: Sequence[int]) -> list[TargetOutput]:
        """Return these lines, cut to seq_len + 1 tokens."""
        written = []
        with self.path.open("rb") as stream:
            for _, start in (self.starts[i] for i in which):
                stream.seek(start)
                written.append(self._cut(_Line.model_validate_json(stream.readline()).completion()))
        return outputs_of(written, which, self.top_logprobs)

    def _cut(self, w: ServedCompletion) -> ServedCompletion:
        n = self.seq_len + 1 - len(w.prompt_ids)
        cut = {
            name: getattr(w, name)[:n] for name in ("ids", "logprobs", "top_ids", "top_logprobs")
        }
        return w.model_copy(update=cut)


def _checked(text: bytes, where: str, vocab: int) -> _Line:
    """Raises UserError: the place and the first error."""
    with reading(where):
        line = _Line.model_validate(parse_json(text))
    largest = max(chain(line.prompt_ids, line.ids, *line.top_ids))
    if largest >= vocab:
        raise UserError(f"{where}: id {largest} is not among the tokenizer's {vocab:,}")
    return line
