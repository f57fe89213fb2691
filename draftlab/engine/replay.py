"""Acceptance of every K from one teacher-forced pass over what the target wrote. No model here: arithmetic on chances.

Given the target's own text, the events that its tokens are accepted are independent: token t is kept with chance
min(1, q(x_t) / p(x_t)) when both sample, and 0 or 1 when both are greedy. What is rejected is replaced by that very
token. So the expected number of target passes follows by recursion from the end, exactly, without decoding.
"""

import numpy as np


def expected_passes(chances: np.ndarray, k: int) -> float:
    """Target passes needed to emit len(chances) tokens, [n] chances in [0, 1], with k drafted per pass."""
    n = len(chances)
    ahead = np.zeros(n + k + 2)  # ahead[i]: passes from token i on
    for i in range(n - 1, -1, -1):
        kept, total = 1.0, 1.0
        for j in range(i, min(i + k, n)):
            total += kept * (1 - chances[j]) * ahead[j + 1]
            kept *= chances[j]
        ahead[i] = total + kept * ahead[i + k + 1]  # all kept: the target adds one more
    return float(ahead[0])


def tokens_per_pass(chances: list[np.ndarray], k: int) -> np.ndarray:
    """Of each text its tokens and expected passes: [texts, 2]. Their ratio of sums is the acceptance length."""
    return np.array([[len(c), expected_passes(c, k)] for c in chances if len(c)])


def ratio_interval(pairs: np.ndarray, draws: int = 1000, seed: int = 0) -> tuple[float, float, float]:
    """Sum of the first column over sum of the second, and its 95 % bootstrap interval over rows."""
    rng = np.random.default_rng(seed)
    sums = pairs[rng.integers(0, len(pairs), (draws, len(pairs)))].sum(1)  # [draws, 2]
    low, high = np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5])
    return float(pairs[:, 0].sum() / pairs[:, 1].sum()), float(low), float(high)
