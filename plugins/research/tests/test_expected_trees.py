"""The expected acceptance of a token tree equals the acceptance that a walk through the tree counts."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from draftlab.acceptance.expected import chain, texts_of
from draftlab_research.expected_trees import tree


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=30),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
@settings(max_examples=80, deadline=None)
def test_a_tree_by_rank_is_what_walking_it_gives(ranks, widths):
    n, at = len(ranks), 0
    nodes = [
        sum(int(np.prod(widths[: j + 1])) for j in range(depth)) for depth in range(len(widths) + 1)
    ]
    passes, drafted, accepted = 0, 0, []
    while at < n:
        depth, kept = min(len(widths), n - at - 1), 0
        while kept < depth and ranks[at + kept] < widths[kept]:
            kept += 1
        passes, drafted, at = passes + 1, drafted + nodes[depth], at + kept + 1
        accepted += [kept] if depth else []
    counts = tree(texts_of([np.zeros(n)]), np.array([ranks]), widths)
    assert (counts.passes[0], counts.drafted[0], counts.steps[0]) == (
        passes,
        drafted,
        len(accepted),
    )
    assert counts.reached[0].tolist() == [
        sum(a >= depth for a in accepted) for depth in range(len(widths) + 1)
    ]


def test_a_tree_of_width_one_is_the_chain():
    ranks = np.random.default_rng(0).integers(0, 2, (3, 40))
    texts = texts_of(list((ranks == 0).astype(float)))
    assert tree(texts, ranks, [1, 1, 1]).acceptance() == chain(texts, 3).acceptance()
