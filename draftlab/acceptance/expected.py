"""Expected acceptance at every K, computed from one teacher-forced pass over the target's text.

The text was written by the target, so its tokens x_t are accepted independently of each other. If target and draft
sample, token t is accepted with probability min(1, q(x_t) / p(x_t)). If both are greedy, the probability is 0 or 1.
After a rejection the target emits the same token x_t. A recursion from the first token therefore gives, exactly and
without decoding, the probability that a step begins at each token. From these probabilities follow the expected values
of all counts of speculative decoding.

R texts, padded to n tokens; D largest number of tokens that a step drafts. A step has age a at token i if it began at
token i - a and has accepted all a tokens since then.
"""

from dataclasses import dataclass, replace

import numpy as np

from draftlab.results.decoding import AcceptanceMetrics, acceptance_from_counts

ROWS = 1024  # texts per recursion, so that its arrays stay in the processor's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Expected counts of speculative decoding for each of R texts.

    A step is a target pass with a draft. The pass that emits the last token before the length limit has no draft. If
    all acceptance probabilities are 0 or 1, the counts are integers.
    """

    starts: np.ndarray  # [R, n] target passes that begin at each token
    tokens: np.ndarray  # [R] tokens of the text
    passes: np.ndarray  # [R] target passes
    steps: np.ndarray  # [R] target passes with a draft
    drafted: np.ndarray  # [R] drafted tokens
    reached: np.ndarray  # [R, D + 1] in column a, steps that accepted at least a tokens
    # [R, D] in column a, steps that accepted a tokens and drafted one more token inside the text
    examined: np.ndarray
    # [R] steps that ended the text with a drafted token, so that the target's next token was dropped
    truncated: np.ndarray

    @property
    def accepted(self) -> np.ndarray:
        return self.reached[:, 1:].sum(1)

    def acceptance(self) -> AcceptanceMetrics:
        """Return the acceptance metrics over all texts together."""
        return acceptance_from_counts(
            reached=self.reached.sum(0).tolist(),
            eligible=self.examined.sum(0).tolist(),
            drafted=float(self.drafted.sum()),
            truncated=float(self.truncated.sum()),
        )

    def rows(self, indices: np.ndarray) -> "Counts":
        """Return the counts of the texts at these indices."""
        return Counts(**{name: getattr(self, name)[indices] for name in Counts.__slots__})


@dataclass(frozen=True, slots=True)
class Texts:
    """R texts, padded to n tokens, with the acceptance probabilities of their tokens.

    lengths, limits: Length of each text, and the length at which decoding must stop, [R].
    """

    # acceptance probability of each token, [R, n], or [R, n, D] if it depends on the token's position in the draft, or
    # [R, n, D, D] if it also depends on K, the number of tokens that a step may draft; the last index is K - 1
    chances: np.ndarray
    lengths: np.ndarray
    limits: np.ndarray
    # length of the drafter's longest draft after each token, [R, n], or [R, n, D] by K; None: there is no limit
    drafted: np.ndarray | None = None
    # whether the draft model drafts in a step that begins at each token, [R, n]; None: in every step, or in none
    modelled: np.ndarray | None = None

    def at(self, k: int) -> "Texts":
        """Return the texts with the drafts of steps that draft at most k tokens: `drafted` is [R, n] or None."""
        if self.chances.ndim < 4:
            return self
        drafted = None if self.drafted is None else self.drafted[:, :, k - 1]
        return replace(self, chances=self.chances[:, :, :k, k - 1], drafted=drafted)

    def room(self) -> np.ndarray:
        """Return the largest number of tokens that a step may draft, by the token at which it begins, [R, n].

        The draft and one token of the target must fit before the length limit. The drafter may also limit the draft.
        """
        room = np.clip(self.limits[:, None] - np.arange(self.chances.shape[1]) - 1, 0, None)
        return room if self.drafted is None else np.minimum(room, self.drafted)


def chances(log_q: np.ndarray, log_p: np.ndarray) -> np.ndarray:
    """Return the probability that each of the target's tokens is accepted: min(1, q / p) (Leviathan et al.).

    With log_p = 0 the result is q. This is right for a greedy target, and for the rule "match", which accepts a drafted
    token if it equals the target's own sample. A greedy draft has q = 0 or 1.
    """
    return np.exp(np.minimum(0.0, np.asarray(log_q, dtype=np.float64) - log_p))


def padded(rows: list[np.ndarray]) -> np.ndarray:
    """Return the rows, [n, ...] each, as one array [R, n, ...], padded with zeros."""
    inner = rows[0].shape[1:] if rows else ()
    out = np.zeros((len(rows), max(map(len, rows), default=0), *inner))
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = row
    return out


def texts_of(
    chances: list[np.ndarray],
    limits: np.ndarray | None = None,
    drafted: list[np.ndarray] | None = None,
    modelled: list[np.ndarray] | None = None,
) -> Texts:
    """Pad the acceptance probabilities of each text's tokens to the same length, and return them as Texts.

    limits: Largest length of each text in decoding. Default: the text's length. drafted, modelled: See Texts.
    """
    lengths = np.array([len(c) for c in chances], dtype=np.int64)
    return Texts(
        padded(chances),
        lengths,
        lengths if limits is None else limits,
        None if drafted is None else padded(drafted).astype(int),
        None if modelled is None else padded(modelled).astype(bool),
    )


def chain(texts: Texts, k: int) -> Counts:
    """Return the expected counts if every step drafts a chain of k tokens, by a recursion from each first token."""
    texts = texts.at(k)
    drafted = np.minimum(k, texts.room())
    by_age = texts.chances[:, :, None] if texts.chances.ndim == 2 else texts.chances[:, :, :k]
    parts: list[Counts] = []
    for at in range(0, max(1, len(drafted)), ROWS):
        rows = slice(at, at + ROWS)
        parts.append(_walk(texts.lengths[rows], by_age[rows], drafted[rows], k))
    arrays: dict[str, np.ndarray] = {}
    for name in Counts.__slots__:
        arrays[name] = np.concatenate([getattr(part, name) for part in parts])
    return Counts(**arrays)


def tokens_per_pass(chances: list[np.ndarray], k: int) -> np.ndarray:
    """Return the number of tokens and the expected number of target passes of each text, if steps draft k tokens.

    The result is [R, 2] for R texts. Texts without tokens are left out. The sum of all tokens divided by the sum of all
    passes is the acceptance length.
    """
    counts = chain(texts_of([c for c in chances if len(c)]), k)
    return np.stack([counts.tokens, counts.passes], 1)


def _walk(lengths: np.ndarray, by_age: np.ndarray, drafted: np.ndarray, k: int) -> Counts:
    """Return the counts of some texts. drafted: Number of tokens of the draft that begins at each token, [R, n]."""
    rows, n = drafted.shape
    chances = np.ascontiguousarray(by_age.transpose(1, 2, 0))  # [n, 1 or D, R]
    # row k + i has the length of the drafts that begin at token i
    depths = np.concatenate([np.zeros((k, rows), dtype=drafted.dtype), drafted.T])
    ages = np.arange(k + 1)[:, None]
    now = np.zeros((k + 1, rows))  # expected steps of each age at token i
    now[0] = 1
    starts = np.zeros((n, rows))
    examined = np.zeros((k, rows))
    reached = np.zeros((k + 1, rows))
    steps = np.zeros(rows)
    truncated = np.zeros(rows)
    for i in range(n + 1):
        inside = i < lengths
        reached[1:] += now[1:]
        truncated += np.where(inside, 0.0, now[1:].sum(0))
        now *= inside
        if i == n:
            break
        starts[i] = now[0]
        # expected steps of each age that drafted a token at this position
        drafting = now * (depths[i : i + k + 1][::-1] > ages)
        steps += drafting[0]
        examined += drafting[:-1]
        accepted = drafting[:-1] * chances[i]
        now[:-1] -= accepted
        now[0] = now.sum(0)
        now[1:] = accepted
    reached[0] = steps
    return Counts(
        starts=starts.T,
        tokens=lengths.astype(np.float64),
        passes=starts.sum(0),
        steps=steps,
        drafted=(starts.T * drafted).sum(1),
        reached=reached.T,
        examined=examined.T,
        truncated=truncated,
    )
