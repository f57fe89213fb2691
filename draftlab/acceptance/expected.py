"""Acceptance of every K from one teacher-forced pass over what the target wrote. No model here: arithmetic on chances.

Given the target's own text, the events that its tokens are accepted are independent: token t is kept with chance
min(1, q(x_t) / p(x_t)) when both sample, and 0 or 1 when both are greedy. What is rejected is replaced by that very
token. So where the steps begin follows by recursion from the first token, exactly, without decoding, and with it every
count that live speculation keeps, in expectation.

R texts, padded to n tokens, D deepest draft. Age a of a step at token i: it began at i - a and all since was accepted.
"""

from dataclasses import dataclass

import numpy as np

from draftlab.results.decoding import Acceptance, acceptance_from_counts

ROWS = 1024  # texts walked at once: what is worked on stays in the processor's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Expected counts over the steps of each of R texts; exact integers where all chances are 0 or 1.

    A step without a draft (the last token before the length limit, or an unsure draft) is a pass, but no step.
    """

    tokens: np.ndarray  # [R]
    passes: np.ndarray  # [R] target passes
    steps: np.ndarray  # [R] passes that had a draft to verify
    drafted: np.ndarray  # [R]
    reached: np.ndarray  # [R, D + 1] steps that accepted at least a tokens
    examined: np.ndarray  # [R, D] steps that drafted a (a+1)th token and reached it, inside the text
    truncated: np.ndarray  # [R] steps that ended the text with a drafted token, so that the target's own was dropped

    @property
    def accepted(self) -> np.ndarray:
        return self.reached[:, 1:].sum(1)

    def acceptance(self) -> Acceptance:
        """Over all texts."""
        return acceptance_from_counts(
            reached=self.reached.sum(0).tolist(),
            eligible=self.examined.sum(0).tolist(),
            drafted=float(self.drafted.sum()),
            truncated=float(self.truncated.sum()),
        )

    def rows(self, which: np.ndarray) -> "Counts":
        """Of the texts at these indices."""
        return Counts(**{name: getattr(self, name)[which] for name in Counts.__slots__})


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts padded to n tokens: how many count, and at how many the decoding would have stopped, [R] each."""

    chances: np.ndarray  # [R, n]
    lengths: np.ndarray
    limits: np.ndarray

    def room(self) -> np.ndarray:
        """Most that a step can draft which begins at each token, [R, n]: the target itself adds one more."""
        return np.clip(self.limits[:, None] - np.arange(self.chances.shape[1]) - 1, 0, None)


def chances(log_q: np.ndarray, log_p: np.ndarray) -> np.ndarray:
    """Of each token that the target wrote, the chance that it came from the draft: min(1, q / p) (Leviathan et al.).

    Under a rule that keeps the draft's token where it is the target's own sample, it is q: log_p = 0. The same holds
    for a greedy target; and a greedy draft's q is 0 or 1.
    """
    return np.exp(np.minimum(0.0, np.asarray(log_q, dtype=np.float64) - log_p))


def padded(rows: list[np.ndarray]) -> np.ndarray:
    """[R, n], zero behind the end of each row."""
    out = np.zeros((len(rows), max(map(len, rows), default=0)))
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = row
    return out


def texts_of(chances: list[np.ndarray], limits: np.ndarray | None = None) -> Texts:
    """limits: tokens at which decoding would have stopped; left out: the length limit is what ended each text."""
    lengths = np.array([len(c) for c in chances], dtype=np.int64)
    return Texts(padded(chances), lengths, lengths if limits is None else limits)


def visits(chances: np.ndarray, k: int | np.ndarray) -> np.ndarray:
    """Expected number of steps that begin at each token, [n], or [R, n] of padded texts; their sum is the passes.

    k: drafted per step, fewer only where the text ends; or by a step that begins there, of the shape of chances. What
    stands behind a token does not matter to it, so any padding will do.
    """
    rows = np.atleast_2d(np.asarray(chances, dtype=np.float64))
    lengths = np.full(len(rows), rows.shape[1])
    found = _walk(rows[:, :, None], np.broadcast_to(k, rows.shape), lengths, int(np.max(k))).visits
    return found.reshape(np.shape(chances))


def chain(texts: Texts, k: int | np.ndarray) -> Counts:
    """k tokens drafted one after the other; k may say how many a step drafts that begins at a token, [R, n]."""
    depth = np.minimum(k, texts.room())
    return _count(texts, texts.chances[:, :, None], depth, depth, int(np.max(k)))


def tree(texts: Texts, ranks: np.ndarray, widths: list[int]) -> Counts:
    """A full tree: each node at depth j has the widths[j] most probable tokens as children, all verified in one pass.

    ranks: of each token in the draft's distribution, 0 the most probable, [R, n]. texts.chances is not looked at. The
    rule is to take the target's own token where the tree has it, so it holds for a target that samples, too.
    """
    nodes = np.concatenate([[0], np.cumsum(np.cumprod(widths))])
    depth = np.minimum(len(widths), texts.room())
    return _count(texts, ranks[:, :, None] < np.asarray(widths), depth, nodes[depth], len(widths))


def confident(top: np.ndarray, threshold: float, k: int, keep_unsure: bool = True) -> np.ndarray:
    """Tokens drafted, at most k, by a step that begins at each token, if drafting ends with an unsure token: [R, n].

    top: the draft's largest probability in the place of each token, [R, n]. The first place where it is below the
    threshold ends the draft: with its token (transformers, older llama.cpp), or without it (llama.cpp).
    What is accepted follows exactly, for until then the draft's path is the text. How much it would have drafted
    behind a token that is rejected cannot be known from the text; it counts as if it had gone on as sure as it is on
    the text. Between ``examined`` tokens and k for every step is where the true count lies.
    """
    n = top.shape[1]
    distance = np.full(top.shape, k)
    for i in range(n - 1, -1, -1):
        ahead = distance[:, i + 1] if i + 1 < n else k
        distance[:, i] = np.where(top[:, i] < threshold, 0, ahead + 1)  # tokens until the first unsure one
    return np.minimum(distance + keep_unsure, k)


def tokens_per_pass(chances: list[np.ndarray], k: int) -> np.ndarray:
    """Of each text its tokens and expected passes: [texts, 2]. Their ratio of sums is the tokens per target pass."""
    counts = chain(texts_of([c for c in chances if len(c)]), k)
    return np.stack([counts.tokens, counts.passes], 1)


@dataclass(frozen=True, slots=True)
class _Walked:
    visits: np.ndarray  # [R, n]
    drafting: np.ndarray  # [R] steps with a draft
    reached: np.ndarray  # [R, D + 1]; its first column counts steps without a draft, too
    examined: np.ndarray  # [R, D]
    truncated: np.ndarray  # [R]


def _count(texts: Texts, kept: np.ndarray, depth: np.ndarray, drafted: np.ndarray, deepest: int) -> Counts:
    """kept: [R, n, 1 or D] by token and age; depth, drafted: of a step that begins at each token, [R, n]."""
    found = [
        _walk(kept[at : at + ROWS], depth[at : at + ROWS], texts.lengths[at : at + ROWS], deepest)
        for at in range(0, len(kept), ROWS)
    ]
    columns = (np.concatenate([getattr(f, name) for f in found]) for name in _Walked.__slots__)
    seen, drafting, reached, examined, truncated = columns
    reached[:, 0] = drafting
    return Counts(
        tokens=texts.lengths.astype(np.float64),
        passes=seen.sum(1),
        steps=drafting,
        drafted=(seen * drafted).sum(1),
        reached=reached,
        examined=examined,
        truncated=truncated,
    )


def _walk(kept: np.ndarray, depth: np.ndarray, lengths: np.ndarray, deepest: int) -> _Walked:
    rows, n = depth.shape
    chances = np.ascontiguousarray(kept.transpose(1, 2, 0))  # [n, 1 or D, R]
    began = np.concatenate([np.zeros((deepest, rows), dtype=depth.dtype), depth.T])  # depth of the step of each age
    ages = np.arange(deepest + 1)[:, None]
    now = np.zeros((deepest + 1, rows))  # expected steps of each age at token i
    now[0] = 1
    seen, examined, reached = np.zeros((n, rows)), np.zeros((deepest, rows)), np.zeros((deepest + 1, rows))
    drafting, truncated = np.zeros(rows), np.zeros(rows)
    for i in range(n + 1):
        inside = i < lengths
        reached[1:] += now[1:]
        truncated += np.where(inside, 0.0, now[1:].sum(0))
        now *= inside
        if i == n:
            break
        reached[0] += now[0]
        seen[i] = now[0]
        here = now * (began[i : i + deepest + 1][::-1] > ages)  # drafted a token in this place
        drafting += here[0]
        examined += here[:-1]
        through = here[:-1] * chances[i]
        now[:-1] -= through
        now[0] = now.sum(0)
        now[1:] = through
    return _Walked(seen.T, drafting, reached.T, examined.T, truncated)
