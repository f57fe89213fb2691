"""The policy of the drafter adaptive: how many tokens a step copies or drafts. It is learnt from recorded steps.

S recorded steps, K largest number of drafted tokens. A step copies tokens from earlier text, drafts tokens, or does
neither. One more token pays if its probability of being accepted is larger than the number of tokens that the policy
emits on average in the time that this token costs. This module does not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from draftlab.drafters.lookup import MATCH_KINDS

EDGES = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97])  # edges of confidence bins
LENGTHS = 4  # in tokens; longer matches count as matches of this length
PRIOR = 4.0  # tokens, accepted at the rate of all groups, that are added to each group
ROUNDS = 50  # largest number of updates of the policy's speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Recorded steps that drafted K tokens each. The match is that of prompt lookup at the end of the text.

    Args:
        kind: Kind of the match, an index of MATCH_KINDS, [S]. Without a match, 0.
        length: Length of the match in tokens, 0 without a match, [S].
        copied: Number of right tokens before the first wrong token in a copy of K tokens, [S].
        confidence: Draft's largest probability at each drafted token, at temperature 1, [S, K].
        accepted: Number of drafted tokens that the target accepted, [S].
    """

    kind: np.ndarray
    length: np.ndarray
    copied: np.ndarray
    confidence: np.ndarray
    accepted: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How many tokens a step copies or drafts, learnt from recorded steps.

    Args:
        speed: Tokens per millisecond of decoding with this policy.
        verify_ms: Milliseconds of a target pass over 1 to K + 1 tokens, [K + 1].
        draft_ms: Milliseconds to draft a token.
        copies: Probability that a copied token is accepted, given that all copied tokens before it are accepted. It
            depends on the kind and length of the match and on the position in the copy, [3, LENGTHS, K].
        chance: Probability that a drafted token is accepted, given that all drafted tokens before it are accepted, by
            bin of the token's confidence, [bins].
        next_chance: Probability that the token after an accepted drafted token is also accepted, by bin of the accepted
            token's confidence, [bins].
        draft_gain: Mean number of accepted tokens of a draft, minus the number of tokens that the policy emits on
            average in the extra time for drafting and verifying. If it is not positive, the policy never drafts.
    """

    speed: float
    verify_ms: np.ndarray
    draft_ms: float
    copies: np.ndarray
    chance: np.ndarray
    next_chance: np.ndarray
    draft_gain: float = 0.0

    def copied_tokens(self, kind: int, length: int, most: int) -> int:
        """Return how many tokens to copy from a match, at most `most`; 0 if a draft pays more, or neither pays."""
        if length == 0:
            return 0
        accepted = np.cumprod(self.copies[kind, min(length, LENGTHS) - 1, :most]).cumsum()
        gain = accepted - self.speed * (self.verify_ms[1 : len(accepted) + 1] - self.verify_ms[0])
        best = int(gain.argmax())
        return best + 1 if gain[best] > max(0.0, self.draft_gain) else 0

    def chance_of(self, confidence: np.ndarray) -> np.ndarray:
        """Return the probability that a drafted token of each confidence [...] is accepted, [...]. See `chance`."""
        return self.chance[bins(confidence)]

    def goes_on(self, alive: np.ndarray, confidence: np.ndarray, drafted: int) -> np.ndarray:
        """Return whether one more drafted token pays, [...]. After K drafted tokens, the result is False.

        alive: Probability that all drafted tokens so far are accepted, [...]. confidence: Confidence of the last
        drafted token, [...]. drafted: Number of drafted tokens so far.
        """
        if drafted == len(self.verify_ms) - 1:
            return np.zeros(alive.shape, dtype=bool)
        cost = self.draft_ms + self.verify_ms[drafted + 1] - self.verify_ms[drafted]
        return alive * self.next_chance[bins(confidence)] > self.speed * cost

    def drafted_tokens(self, confidence: np.ndarray) -> np.ndarray:
        """Return how many tokens the policy drafts in each step, 1 to K, [S]. confidence: See Steps, [S, K]."""
        alive = np.cumprod(self.chance_of(confidence), 1)
        going, counts = np.ones(len(confidence), dtype=bool), np.ones(len(confidence), dtype=int)
        for drafted in range(1, confidence.shape[1]):
            going &= self.goes_on(alive[:, drafted - 1], confidence[:, drafted - 1], drafted)
            counts += going
        return counts

    def describe(self, steps: Steps) -> str:
        copies = _copies(self, steps) > 0
        drafts = self.drafted_tokens(steps.confidence)[~copies]
        share, length = float(copies.mean()), float(drafts.mean()) if len(drafts) else 0.0
        text = f"copies from the text in {share:.0%} of the calibration steps"
        text += (
            f", drafts {length:.1f} tokens on average in the other steps"
            if self.draft_gain > 0
            else " and never drafts"
        )
        return f"{text}; predicted speed-up of decoding {self.speed * self.verify_ms[0]:.2f}"


def bins(confidence: np.ndarray) -> np.ndarray:
    return np.digitize(confidence, EDGES)


def learn(steps: Steps, verify_ms: Sequence[float], draft_ms: float) -> Policy:
    """Return the policy of highest speed, by Dinkelbach's algorithm (1967) in at most ROUNDS updates.

    In each update, time costs as many tokens as the previous policy emits in it. The updates end when the speed stays
    the same.

    verify_ms: Milliseconds of a target pass over 1 to K + 1 tokens, [K + 1]. draft_ms: Milliseconds to draft a token.
    """
    ms = np.array(verify_ms)
    chance, next_chance = _by_confidence(steps)
    policy = Policy(
        speed=1 / ms[0],
        verify_ms=ms,
        draft_ms=draft_ms,
        copies=_by_match(steps, len(ms) - 1),
        chance=chance,
        next_chance=next_chance,
    )
    for _ in range(ROUNDS):
        drafted = policy.drafted_tokens(steps.confidence)
        right = np.minimum(steps.accepted, drafted)
        time = drafted * draft_ms + ms[drafted]
        gain = float((right - policy.speed * (time - ms[0])).mean())
        policy = replace(policy, draft_gain=gain)
        copied = _copies(policy, steps)
        drafts = gain > 0
        tokens = np.where(copied > 0, np.minimum(steps.copied, copied), right * drafts)
        spent = np.where(copied > 0, ms[copied], time if drafts else ms[0])
        speed = float((1 + tokens).sum() / spent.sum())
        if speed == policy.speed:
            break
        policy = replace(policy, speed=speed)
    return policy


def _copies(policy: Policy, steps: Steps) -> np.ndarray:
    """Return how many tokens the policy copies in each step, [S]."""
    most = len(policy.verify_ms) - 1
    pairs = zip(steps.kind.tolist(), steps.length.tolist(), strict=True)
    return np.array([policy.copied_tokens(kind, length, most) for kind, length in pairs])


def _by_confidence(steps: Steps) -> tuple[np.ndarray, np.ndarray]:
    """Return `chance` and `next_chance` of a Policy, [bins] each."""
    count, k = len(EDGES) + 1, steps.confidence.shape[1]
    place, accepted = np.arange(k), steps.accepted[:, None]
    own, right, tried = bins(steps.confidence), place < accepted, place <= accepted
    followed = right[:, :-1]
    return (
        _rates(own[tried], right[tried], count),
        _rates(own[:, :-1][followed], right[:, 1:][followed], count),
    )


def _by_match(steps: Steps, k: int) -> np.ndarray:
    """Return `copies` of a Policy, [3, LENGTHS, K]."""
    found = np.zeros((len(MATCH_KINDS), LENGTHS, k))
    for place in range(k):
        tried = (steps.length > 0) & (steps.copied >= place)
        right = steps.copied[tried] > place
        groups = steps.kind[tried] * LENGTHS + np.minimum(steps.length[tried], LENGTHS) - 1
        found[..., place] = _rates(groups, right, found[..., 0].size).reshape(found.shape[:2])
    return found


def _rates(group: np.ndarray, right: np.ndarray, groups: int) -> np.ndarray:
    """Return the share of right tokens in each group, [groups].

    PRIOR tokens with the share of all groups are added to each group, so a group with few tokens gets a similar share.

    group: Group of each token, an index, [n]. right: Whether each token is right, [n].
    """
    whole = right.mean() if len(right) else 0.0
    hits, tried = (np.bincount(group, w, groups) for w in (right.astype(float), None))
    return (hits + PRIOR * whole) / (tried + PRIOR)
