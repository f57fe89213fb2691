"""Repetition in generated text: loops flatter every draft."""

from collections.abc import Sequence

LOOP = 0.5  # a text with a smaller share of distinct 4-grams is mostly a loop


def distinct_ngrams(texts: Sequence[Sequence[int]], n: int) -> float:
    """Return the distinct n-grams of each text over all its n-grams, sums over texts; 1 if nothing repeats."""
    distinct = total = 0
    for tokens in texts:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        distinct += len(set(grams))
        total += len(grams)
    return distinct / total if total else 1.0
