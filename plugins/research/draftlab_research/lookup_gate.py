"""Learn the gate of the drafter fallback: the match length from which a copy by prompt lookup beats the draft model.

The gate is learnt from texts of the target. At every position, the accepted tokens of a copy are compared with the
expected accepted tokens of the draft model. P positions, K drafted tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from draftlab.acceptance.token_logprobs import Text
from draftlab.engine.drafters.ngram import MATCH_KINDS, latest_match

ROUNDS = 20  # most iterations until the gate no longer changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A rule that decides between copying a match and the draft model, with its speed in tokens per millisecond.

    Args:
        min_match: Match length from which a match is copied, for each of MATCH_KINDS. A length above that of all
            matches means that nothing is copied.
        k: Number of tokens of a copy.
        draft_tokens: Number of tokens that the draft model drafts, at most k.
        speed: Predicted speed with this rule.
        ungated_speed: Predicted speed if every match is copied.
        model_speed: Predicted speed of the draft model alone.
    """

    min_match: tuple[int, ...]
    k: int
    draft_tokens: int
    speed: float
    ungated_speed: float
    model_speed: float


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions at which a draft may begin, with the tokens of a copy and of the draft model that are accepted there.

    length: Length of the match before the position, or 0 without a match, [P]. kind: Index of the match's kind in
    MATCH_KINDS, [P]. copied: Number of accepted tokens of a copy, at most the largest K, [P]. modelled: Expected number
    of accepted tokens of the draft model for each K, [P, K].
    """

    length: np.ndarray
    kind: np.ndarray
    copied: np.ndarray
    modelled: np.ndarray


def replay_matches(
    texts: Sequence[Text], chances: Sequence[np.ndarray], longest: int, k: int
) -> Positions:
    """Return all positions of the texts at which a draft may begin, with matches and accepted tokens.

    The first token of a completion is left out, because the prefill emits it.

    chances: For each text, the probability that the draft model's token is accepted, [n]. For a parallel draft [n, K],
    with a column for each place in the draft. longest: Longest match. k: Largest K.
    """
    rows: list[tuple[int, int, int]] = []
    modelled: list[np.ndarray] = []
    for (prompt, ids), accepted in zip(texts, chances, strict=True):
        text, start = np.concatenate([prompt, ids]).astype(np.int64), len(prompt)
        by_age = accepted if accepted.ndim == 2 else np.repeat(accepted[:, None], k, 1)
        runs, ages = np.concatenate([by_age, np.zeros((k, k))]), np.arange(k)
        for at in range(start + 1, len(text)):
            match = latest_match(text[:at], longest)
            copied = 0
            while match and copied < k and at + copied < len(text):
                copied += 1
                if text[match.start + (copied - 1) % (at - match.start)] != text[at + copied - 1]:
                    copied -= 1
                    break
            rows.append(
                (match.length, MATCH_KINDS.index(match.kind), copied) if match else (0, 0, 0)
            )
            modelled.append(np.cumprod(runs[at - start + ages, ages]).cumsum())
    length, kind, right = np.array(rows).T
    return Positions(length, kind, right, np.array(modelled))


def learn_gate(
    positions: Positions,
    ks: Sequence[int],
    longest: int,
    draft_ms: Callable[[int], float],
    verify_ms: Callable[[int], float],
) -> Gate:
    """Return the gate, and how many tokens to copy and to draft, with the most tokens per millisecond.

    A copy pays if it adds more tokens than the gate's speed would give in the additional time of the copy. That speed
    is a fixed point (Dinkelbach 1967).

    draft_ms: Function from K to the milliseconds of drafting K tokens. verify_ms: Function from a number of tokens to
    the milliseconds of a target pass over these.
    """
    pairs = [(k, drafted) for k in ks for drafted in ks if drafted <= k]
    gates = [_at(positions, *pair, longest, draft_ms, verify_ms) for pair in pairs]
    return max(gates, key=lambda gate: gate.speed)


def _at(
    positions: Positions,
    k: int,
    draft_tokens: int,
    longest: int,
    draft_ms: Callable[[int], float],
    verify_ms: Callable[[int], float],
) -> Gate:
    copied, modelled = np.minimum(positions.copied, k), positions.modelled[:, draft_tokens - 1]
    copying_ms, modelling_ms = (
        verify_ms(k + 1),
        draft_ms(draft_tokens) + verify_ms(draft_tokens + 1),
    )

    def speed(copies: np.ndarray) -> float:
        tokens = 1 + np.where(copies, copied, modelled)
        return float(tokens.sum() / np.where(copies, copying_ms, modelling_ms).sum())

    never = np.zeros(len(copied), dtype=bool)
    copies, min_match = never, (longest + 1,) * len(MATCH_KINDS)
    for _ in range(ROUNDS):
        gain = copied - modelled + speed(copies) * (modelling_ms - copying_ms)
        better = tuple(
            _shortest(positions, number, gain, longest) for number in range(len(MATCH_KINDS))
        )
        if better == min_match:
            break
        min_match = better
        copies = (positions.length > 0) & (positions.length >= np.array(min_match)[positions.kind])
    return Gate(
        min_match=min_match,
        k=k,
        draft_tokens=draft_tokens,
        speed=speed(copies),
        ungated_speed=speed(positions.length > 0),
        model_speed=speed(never),
    )


def _shortest(positions: Positions, kind: int, gain: np.ndarray, longest: int) -> int:
    """Return the match length from which copying matches of a kind has the largest total gain.

    gain: Gain of a copy at each position, in tokens, [P].
    """
    own = (positions.kind == kind) & (positions.length > 0)
    totals = [
        gain[own & (positions.length >= shortest)].sum() for shortest in range(1, longest + 2)
    ]
    return 1 + int(np.argmax(totals))
