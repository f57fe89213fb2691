"""Statistics of a score equal hand calculations, and contradictions in its measurements are refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftlab.errors import UserError
from draftlab.record import Generation, Score, acceptance, bootstrap_speedup, read_score


def generation(prompt=0, drafted=(), accepted=(), emitted=None, seconds=1.0) -> Generation:
    emitted = [a + 1 for a in accepted] if emitted is None else emitted
    return Generation(
        prompt=prompt,
        tokens=1 + sum(emitted),
        drafted=list(drafted),
        accepted=list(accepted),
        emitted=list(emitted),
        prefill_seconds=0.5,
        draft_seconds=0.25 * seconds,
        verify_seconds=0.5 * seconds,
        host_seconds=0.25 * seconds,
    )


def test_acceptance_of_a_hand_counted_run():
    """K = 3. Steps: 3 of 3, 0 of 3, 1 of 3, 2 of 2 (the end was near), and one step without a draft."""
    found = acceptance([generation(drafted=[3, 3, 3, 2, 0], accepted=[3, 0, 1, 2, 0])], 3)
    assert found.num_spec_steps == 4
    assert found.num_draft_tokens == 11
    assert found.num_accepted_draft_tokens == 6
    assert found.draft_acceptance_rate == pytest.approx(6 / 11)
    assert found.mean_acceptance_length == pytest.approx(1 + 6 / 4)
    assert found.per_position_acceptance == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert found.conditional_acceptance == pytest.approx([3 / 4, 2 / 3, 1 / 1])
    assert found.acceptance_histogram == [1, 1, 1, 1]
    assert found.n_truncated_steps == 0


steps = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)).map(lambda t: (t[0], min(t))), min_size=1, max_size=30)


@given(steps)
@settings(max_examples=60, deadline=None)
def test_self_checks_of_the_metrics_hold(run):
    found = acceptance([generation(drafted=[d for d, _ in run], accepted=[a for _, a in run])], 5)
    assert 1 <= found.mean_acceptance_length <= 6
    assert found.mean_acceptance_length == pytest.approx(1 + sum(found.per_position_acceptance))
    assert sum(found.acceptance_histogram) == found.num_spec_steps
    assert 0 <= found.draft_acceptance_rate <= 1


def test_a_step_cut_by_the_end_counts_and_is_named():
    found = acceptance([generation(drafted=[4], accepted=[4], emitted=[2])], 4)
    assert found.n_truncated_steps == 1
    assert found.mean_acceptance_length == 5


@pytest.mark.parametrize(("drafted", "accepted"), [([2], [3]), ([5], [0])])
def test_contradictions_are_refused(drafted, accepted):
    with pytest.raises(ValueError, match="accepted > drafted"):
        acceptance([generation(drafted=drafted, accepted=accepted)], 4)


def test_speed_up_is_a_ratio_of_sums_without_the_prefill():
    """Plain: 4 + 8 tokens after the first in 1 + 3 seconds. Fast: the same tokens in 1 + 1 seconds."""
    slow = [generation(0, [0] * 4, [0] * 4, seconds=1), generation(1, [0] * 8, [0] * 8, seconds=3)]
    fast = [generation(0, [3], [3], seconds=1), generation(1, [3, 3], [3, 3], seconds=1)]
    interval = bootstrap_speedup(fast, slow)
    assert interval.value == pytest.approx((12 / 2) / (12 / 4))
    assert interval.low == pytest.approx(1.0)  # both draws are the first prompt
    assert interval.high == pytest.approx(3.0)
    assert interval.n == 2


def test_an_interval_narrows_with_prompts():
    def width(n: int) -> float:
        slow = [generation(i, [0] * 4, [0] * 4, seconds=4) for i in range(n)]
        fast = [generation(i, [3], [i % 4]) for i in range(n)]
        found = bootstrap_speedup(fast, slow)
        return found.high - found.low

    assert width(64) < 0.5 * width(8)


def test_what_is_not_a_score_is_refused(tmp_path):
    (tmp_path / "score.json").write_text('{"version": 1}')
    with pytest.raises(UserError, match="is not a score"):
        read_score(tmp_path)
    with pytest.raises(UserError, match="No such file"):
        read_score(tmp_path / "other.json")
    assert set(Score.model_fields) >= {"plain", "speculative", "conditions"}


def test_generations_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="9 tokens are not the prefill's and 4"):
        Generation.model_validate(generation(0, [3], [3]).model_dump() | {"tokens": 9})
    with pytest.raises(ValueError, match="one entry per step"):
        Generation.model_validate(generation(0, [3], [3]).model_dump() | {"drafted": [3, 3]})
