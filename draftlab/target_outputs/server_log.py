"""A server's log as text with what the target thought of it: one JSON line per request (docs/formats.md)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from draftlab.console import note
from draftlab.errors import UserError
from draftlab.files import validation_text
from draftlab.servers.adapters import Completion
from draftlab.target_outputs.logprob_sources import ROUNDING, Kept, kept_rows

ABOVE_ZERO = 1e-3  # nats that rounding may put a log-probability above 0
ABOVE_ONE = 0.01  # what a list's probabilities may sum to above 1
HELD_OUT = 12  # of so many lines one is held out


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompt_ids: list[int]
    ids: list[int]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    logprobs: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Where in the file the lines start of which something fits into seq_len tokens, and k, what all of them list."""

    path: Path
    vocab: int
    seq_len: int
    k: int
    starts: list[tuple[int, int]]  # line number, byte

    @classmethod
    def open(cls, path: Path, *, vocab: int, seq_len: int, k: int) -> "Traffic":
        """Check every line. k: of each list no more than that is kept.

        Raises:
            UserError: no such file, a line that is not as it should be, or fewer than two lines with anything to keep.
        """
        starts, shortest, empty = [], (k, 0), 0
        for number, start, text in _lines(path):
            line = _checked(text, f"{path}:{number}", vocab)
            if not line.ids or len(line.prompt_ids) > seq_len:
                empty += 1
                continue
            starts.append((number, start))
            shortest = min(shortest, (min(map(len, line.top_ids)), number), key=lambda found: found[0])
        if empty:
            note(f"{path}: {empty} lines left out: nothing written, or a prompt of more than {seq_len} tokens")
        if len(starts) < 2:
            raise UserError(f"{path}: {len(starts)} lines with text to keep; at least two are needed, one is held out")
        if shortest[0] < k:
            note(f"{path}: {shortest[0]} tokens are kept of each list, not {k}: line {shortest[1]} has no more")
        return cls(path=path, vocab=vocab, seq_len=seq_len, k=shortest[0], starts=starts)

    def split(self, most: int) -> tuple[list[int], list[int]]:
        """Indices of the lines to train on, and of those held out, at most that many."""
        every = range(len(self.starts))
        held = list(every[HELD_OUT - 1 :: HELD_OUT][:most]) or [every[-1]]
        return sorted(set(every) - set(held)), held

    def rows(self, which: Sequence[int]) -> Kept:
        found = []
        with self.path.open("rb") as stream:
            for _, start in (self.starts[i] for i in which):
                stream.seek(start)
                found.append(_sorted(_Line.model_validate_json(stream.readline())))
        return kept_rows(found, self.seq_len, self.k)


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, first byte and text of every line; blank ones are passed over."""
    start = 0
    try:
        with path.open("rb") as stream:
            for number, text in enumerate(stream, 1):
                if text.strip():
                    yield number, start, text
                start += len(text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _checked(text: bytes, where: str, vocab: int) -> _Line:
    """Raises UserError: where, and the first thing that is wrong."""
    try:
        line = _Line.model_validate_json(text)
    except ValidationError as error:
        raise UserError(f"{where}: {validation_text(error)[:300]}") from None
    problem = _problem(line, vocab)
    if problem:
        raise UserError(f"{where}: {problem}")
    return line


def _problem(line: _Line, vocab: int) -> str | None:
    n = len(line.ids)
    for name, found in (("top_ids", line.top_ids), ("top_logprobs", line.top_logprobs), ("logprobs", line.logprobs)):
        if len(found) != n:
            return f"{name} has {len(found)} entries for {n} ids"
    if not line.prompt_ids:
        return "prompt_ids is empty; text starts with at least one token, such as bos"
    strange = next((i for i in chain(line.prompt_ids, line.ids, *line.top_ids) if not 0 <= i < vocab), None)
    if strange is not None:
        return f"id {strange} is not among the tokenizer's {vocab:,}"
    places = zip(line.ids, line.logprobs, line.top_ids, line.top_logprobs, strict=True)
    problems = ((place, _contradiction(*found)) for place, found in enumerate(places))
    return next((f"place {place}: {problem}" for place, problem in problems if problem), None)


def _contradiction(came: int, logprob: float, ids: list[int], values: list[float]) -> str | None:
    if len(ids) != len(values) or not ids or len(set(ids)) != len(ids):
        return f"{len(ids)} top_ids, {len(set(ids))} of them different, with {len(values)} top_logprobs"
    bad = next((v for v in (*values, logprob) if not -math.inf < v <= ABOVE_ZERO), None)
    if bad is not None:
        return f"{bad} is not a log-probability, which is at most 0"
    total = sum(map(math.exp, values))
    if total > 1 + ABOVE_ONE:
        return f"the listed probabilities sum to {total:.3f}"
    listed = dict(zip(ids, values, strict=True)).get(came, min(logprob, *values))
    if abs(listed - logprob) > ROUNDING:
        return f"token {came} has log-probability {logprob}, and by the list {listed}"
    return None


def _sorted(line: _Line) -> Completion:
    """The most probable first."""
    pairs = [
        sorted(zip(values, ids, strict=True), key=lambda pair: -pair[0])
        for values, ids in zip(line.top_logprobs, line.top_ids, strict=True)
    ]
    return Completion(
        prompt_ids=line.prompt_ids, ids=line.ids, logprobs=line.logprobs, top_ids=[[i for _, i in p] for p in pairs],
        top_logprobs=[[v for v, _ in p] for p in pairs], finish_reason=None,
    )  # fmt: skip
