"""The gate of fallback: how long a match must be for prompt lookup to be faster than the draft model.

Learnt from what the target wrote: at every token, what a copy would have got right, and what the draft model would. P
positions, K drafted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from draftlab.acceptance.token_logprobs import Text
from draftlab.engine.drafters.ngram import MATCH_KINDS, latest_match

ROUNDS = 20  # until the gate and the speed that it is judged by agree


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """min_match: length from which a match is copied, by MATCH_KINDS; longer than any match: never.

    draft_tokens: of the draft model, at most the k that are copied. Speeds are tokens per millisecond: with this gate,
    with every match copied, and of the draft model alone.
    """

    min_match: tuple[int, ...]
    k: int
    draft_tokens: int
    speed: float
    ungated_speed: float
    model_speed: float


@dataclass(frozen=True, slots=True)
class Positions:
    """Tokens to draft: the length of the match before each, 0 if none, its kind, and how many tokens are accepted.

    copied: of the copy, at most the largest K, [P]. modelled: expected, of the draft model by K, [P, K].
    """

    length: np.ndarray
    kind: np.ndarray
    copied: np.ndarray
    modelled: np.ndarray


def replay_matches(
    texts: Sequence[Text], chances: Sequence[np.ndarray], longest: int, k: int
) -> Positions:
    """Return all positions of texts but the first, which is not drafted.

    chances: that a model's token is accepted, [n]; of a parallel draft [n, K], by how long ago its step began.
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
    """Return the gate with the most tokens per millisecond, and how many to copy and to draft for them.

    draft_ms: of K drafted tokens, by K. verify_ms: of a target pass by its width. A copy is worth it where its tokens
    gain more than the run's speed makes of the time: the fixed point of that speed (Dinkelbach 1967).
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
    """Return the length from which matches of a kind gain most together."""
    own = (positions.kind == kind) & (positions.length > 0)
    totals = [
        gain[own & (positions.length >= shortest)].sum() for shortest in range(1, longest + 2)
    ]
    return 1 + int(np.argmax(totals))
