"""Expected acceptance of token trees, computed from one draft pass over the target's text."""

import numpy as np

from draftlab.acceptance.expected import Counts, Texts, count


def tree(texts: Texts, ranks: np.ndarray, widths: list[int]) -> Counts:
    """Return the expected counts if every step drafts a full tree.

    In this tree, each node at depth j has the widths[j] most probable tokens as children. The root has depth 0. The
    counts also hold for a target that samples, because the verify rule accepts the target's token if the tree has it.

    R texts, padded to n tokens; D levels of the tree.

    texts: Lengths of the texts, and limits of their drafts. The acceptance probabilities are not used. ranks: Rank of
    each token in the draft's distribution, 0 for the most probable token, [R, n], or [R, n, D] with a column for each
    level of the tree.
    """
    nodes = np.concatenate([[0], np.cumsum(np.cumprod(widths))])
    depth = np.minimum(len(widths), texts.room())
    by_age = ranks[:, :, None] if ranks.ndim == 2 else ranks[:, :, : len(widths)]
    return count(texts.lengths, by_age < np.asarray(widths), depth, nodes[depth], len(widths))
