"""A server's log: one JSON line per request, with the target's top log-probabilities (docs/formats.md)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
from pydantic import ConfigDict, ValidationError

from draftlab.console import note
from draftlab.errors import UserError, one_line
from draftlab.reading import FileModel, parse_json, read_lines, validation_text
from draftlab.servers.adapters import Completion
from draftlab.target_outputs.outputs import ROUNDING, StoredLogprobs, TargetOutput, with_top
from draftlab.target_outputs.targets import listed, of_completion

ABOVE_ZERO = 1e-3  # nats that rounding may put a log-probability above 0
ABOVE_ONE = 0.01  # by which the probabilities of a list may sum to more than 1
HELD_OUT = 12  # one line of so many is held out


class _Line(FileModel):
    model_config = ConfigDict(strict=True)

    prompt_ids: list[int]
    ids: list[int]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    logprobs: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLog:
    """Lines of a log of which something fits into seq_len tokens. top_logprobs: tokens that all of them list."""

    path: Path
    vocab: int
    seq_len: int
    top_logprobs: int
    starts: list[tuple[int, int]]  # line number, byte

    @classmethod
    def open(cls, path: Path, *, vocab: int, seq_len: int, top_logprobs: int) -> "ServerLog":
        """Check every line. top_logprobs: at most that many of each list are used.

        Raises:
            UserError: no such file, an invalid line, or fewer than two lines with text.
        """
        starts, shortest, empty = [], (top_logprobs, 0), 0
        for number, start, text in read_lines(path):
            line = _checked(text, f"{path}:{number}", vocab)
            if not line.ids or len(line.prompt_ids) > seq_len:
                empty += 1
                continue
            starts.append((number, start))
            shortest = min(shortest, (min(map(len, line.top_ids)), number), key=lambda pair: pair[0])
        if empty:
            note(f"{path}: {empty} lines left out: without text, or with a prompt of more than {seq_len} tokens")
        if len(starts) < 2:
            raise UserError(f"{path}: {len(starts)} lines with text; at least two are needed, one is held out")
        if shortest[0] < top_logprobs:
            note(f"{path}: {shortest[0]} tokens of each list are stored, not {top_logprobs}: see line {shortest[1]}")
        return cls(path=path, vocab=vocab, seq_len=seq_len, top_logprobs=shortest[0], starts=starts)

    def split(self, most: int) -> tuple[list[int], list[int]]:
        """Return the indices of the lines to train on, and of those held out, at most that many."""
        every = range(len(self.starts))
        heldout = list(every[HELD_OUT - 1 :: HELD_OUT][:most]) or [every[-1]]
        return sorted(set(every) - set(heldout)), heldout

    def outputs(self, which: Sequence[int]) -> list[TargetOutput]:
        """Return these lines, cut to seq_len + 1 tokens."""
        written = []
        with self.path.open("rb") as stream:
            for _, start in (self.starts[i] for i in which):
                stream.seek(start)
                written.append(self._cut(_sorted(_Line.model_validate_json(stream.readline()))))
        tokens, own = (np.concatenate([getattr(w, name) for w in written]) for name in ("ids", "logprobs"))
        top = StoredLogprobs.of_lists(*listed(written, self.top_logprobs), own.astype(np.float32), tokens)
        return with_top([of_completion(w, i) for w, i in zip(written, which, strict=True)], top)

    def _cut(self, w: Completion) -> Completion:
        n = self.seq_len + 1 - len(w.prompt_ids)
        return replace(
            w, ids=w.ids[:n], logprobs=w.logprobs[:n], top_ids=w.top_ids[:n], top_logprobs=w.top_logprobs[:n]
        )


def _checked(text: bytes, where: str, vocab: int) -> _Line:
    """Raises UserError: the place and the first error."""
    try:
        line = _Line.model_validate(parse_json(text))
    except ValidationError as error:
        raise UserError(f"{where}: {validation_text(error)}") from None
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({one_line(error)})") from None
    problem = _problem(line, vocab)
    if problem:
        raise UserError(f"{where}: {problem}")
    return line


def _problem(line: _Line, vocab: int) -> str | None:
    n = len(line.ids)
    for name in ("top_ids", "top_logprobs", "logprobs"):
        if len(getattr(line, name)) != n:
            return f"{name} has {len(getattr(line, name))} entries for {n} ids"
    if not line.prompt_ids:
        return "prompt_ids is empty; text starts with at least one token, such as bos"
    foreign = next((i for i in chain(line.prompt_ids, line.ids, *line.top_ids) if not 0 <= i < vocab), None)
    if foreign is not None:
        return f"id {foreign} is not among the tokenizer's {vocab:,}"
    places = zip(line.ids, line.logprobs, line.top_ids, line.top_logprobs, strict=True)
    problems = ((place, _contradiction(*entry)) for place, entry in enumerate(places))
    return next((f"place {place}: {problem}" for place, problem in problems if problem), None)


def _contradiction(token: int, logprob: float, ids: list[int], values: list[float]) -> str | None:
    if len(ids) != len(values) or not ids or len(set(ids)) != len(ids):
        return f"{len(ids)} top_ids, {len(set(ids))} of them different, with {len(values)} top_logprobs"
    bad = next((v for v in (*values, logprob) if not -math.inf < v <= ABOVE_ZERO), None)
    if bad is not None:
        return f"{bad} is not a log-probability, which is at most 0"
    total = sum(map(math.exp, values))
    if total > 1 + ABOVE_ONE:
        return f"the listed probabilities sum to {total:.3f}"
    by_list = dict(zip(ids, values, strict=True)).get(token, min(logprob, *values))
    if abs(by_list - logprob) > ROUNDING:
        return f"token {token} has log-probability {logprob}, and by the list {by_list}"
    return None


def _sorted(line: _Line) -> Completion:
    """Return a line with the most probable tokens first."""
    lists = [
        sorted(zip(values, ids, strict=True), key=lambda pair: -pair[0])
        for values, ids in zip(line.top_logprobs, line.top_ids, strict=True)
    ]
    return Completion(
        prompt_ids=line.prompt_ids, ids=line.ids, logprobs=line.logprobs, top_ids=[[i for _, i in p] for p in lists],
        top_logprobs=[[v for v, _ in p] for p in lists], finish_reason=None,
    )  # fmt: skip
