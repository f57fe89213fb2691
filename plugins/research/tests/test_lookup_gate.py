"""The gate of fallback: what is replayed, and that no other gate would be faster."""

import itertools

import numpy as np
import pytest

from draftlab.engine.drafters.ngram import MATCH_KINDS
from draftlab_research.lookup_gate import Positions, learn_gate, replay_matches


def test_what_a_copy_gets_right_and_what_a_model_would():
    text = (np.array([7, 8]), np.array([1, 7, 8, 1, 7, 9]))
    found = replay_matches([text], [np.array([0.5, 1.0, 0.5, 0.25, 0.5, 0.5])], longest=4, k=3)
    assert found.length.tolist() == [0, 1, 2, 3, 4]  # before 7, 8, 1, 7, 9
    assert {MATCH_KINDS[i] for i in found.kind} == {"once"}
    assert found.copied.tolist() == [
        0,
        3,
        2,
        1,
        0,
    ]  # 8 1 7, then 1 7, then 7: a 9 follows, and not the 8
    np.testing.assert_allclose(found.modelled[0], [1.0, 1.5, 1.625])
    np.testing.assert_allclose(found.modelled[3], [0.5, 0.75, 0.75])  # the text ends


def test_a_parallel_drafts_later_tokens_have_the_chances_of_their_own_offset():
    text = (np.array([7, 8]), np.array([1, 2, 3, 4]))
    by_age = np.array([[0.9, 0.0], [0.8, 0.5], [0.7, 0.4], [0.6, 0.3]])
    found = replay_matches([text], [by_age], longest=4, k=2)
    np.testing.assert_allclose(
        found.modelled, [[0.8, 0.8 + 0.8 * 0.4], [0.7, 0.7 + 0.7 * 0.3], [0.6, 0.6]]
    )


@pytest.mark.parametrize("seed", range(4))
def test_no_gate_is_faster(seed):
    rng, n, longest = np.random.default_rng(seed), 400, 3
    length, kind = rng.integers(0, longest + 1, n), rng.integers(0, 3, n)
    copied = rng.binomial(4, np.clip(0.1 + 0.2 * length * (kind + 1) / 3, 0, 1)) * (length > 0)
    modelled = np.cumsum(rng.uniform(0.3, 0.9, (n, 4)).cumprod(1), 1)
    positions, verify = (
        Positions(length, kind, copied, modelled),
        {k + 1: 10 + k for k in range(1, 5)},
    )
    gate = learn_gate(positions, [2, 4], longest, lambda k: 0.4 * k, verify.__getitem__)

    def speed(min_match: tuple[int, ...], k: int, drafted: int) -> float:
        tokens = milliseconds = 0.0
        for i in range(n):
            copies = length[i] > 0 and length[i] >= min_match[kind[i]]
            tokens += 1 + (min(copied[i], k) if copies else modelled[i, drafted - 1])
            milliseconds += verify[k + 1] if copies else verify[drafted + 1] + 0.4 * drafted
        return tokens / milliseconds

    gates = itertools.product(
        itertools.product(range(1, longest + 2), repeat=3), [(2, 2), (4, 2), (4, 4)]
    )
    every = {(min_match, pair): speed(min_match, *pair) for min_match, pair in gates}
    found = (gate.k, gate.draft_tokens)
    assert gate.speed == pytest.approx(max(every.values()))
    assert gate.speed == pytest.approx(every[gate.min_match, found])
    assert gate.ungated_speed == pytest.approx(every[(1, 1, 1), found])
    assert gate.model_speed == pytest.approx(every[(4, 4, 4), found])
    assert gate.speed > max(gate.ungated_speed, gate.model_speed)


def test_a_draft_is_shorter_than_a_copy_where_its_tokens_are_seldom_right():
    """Copies are always right; of drafts only the first token ever is."""
    length, kind = np.tile([0, 1], 200), np.zeros(400, dtype=int)
    positions = Positions(length, kind, np.tile([0, 4], 200), np.full((400, 4), 0.9))
    gate = learn_gate(positions, [1, 2, 4], 1, lambda k: 0.5 * k, lambda width: 10 + width)
    assert (gate.min_match[0], gate.k, gate.draft_tokens) == (1, 4, 1)
