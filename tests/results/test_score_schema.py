"""Statistics of a score equal hand calculations, and contradictions in its measurements are refused."""

import random

import pytest
from helpers.scores import generation, score
from hypothesis import given, settings
from hypothesis import strategies as st

from draftlab import intervals
from draftlab.results.decoding import Generation, count_acceptance, decode_timings
from draftlab.results.score import Environment, Score


def speedup(fast: list[Generation], slow: list[Generation]) -> intervals.Interval:
    return intervals.speedup(intervals.Timings([decode_timings(fast)], decode_timings(slow)))


def test_acceptance_of_a_hand_counted_run():
    """K = 3. Steps: 3 of 3, 0 of 3, 1 of 3, 2 of 2 (the end was near), and one step without a draft."""
    found = count_acceptance([generation(drafted=[3, 3, 3, 2, 0], accepted=[3, 0, 1, 2, 0])], 3)
    assert (found.num_spec_steps, found.num_draft_tokens) == (4, 11)
    assert found.draft_acceptance_rate == pytest.approx(6 / 11)
    assert found.mean_acceptance_length == pytest.approx(1 + 6 / 4)
    assert found.per_position_acceptance == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert found.conditional_acceptance == pytest.approx([3 / 4, 2 / 3, 1 / 1])
    assert found.acceptance_histogram == [1, 1, 1, 1]
    assert found.n_truncated_steps == 0


steps = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 5)).map(lambda t: (t[0], min(t))),
    min_size=1,
    max_size=30,
)


@given(steps)
@settings(max_examples=60, deadline=None)
def test_self_checks_of_the_metrics_hold(run):
    drafted, accepted = map(list, zip(*run, strict=True))
    found = count_acceptance([generation(drafted=drafted, accepted=accepted)], 5)
    assert 1 <= found.mean_acceptance_length <= 6
    assert found.mean_acceptance_length == pytest.approx(1 + sum(found.per_position_acceptance))
    assert sum(found.acceptance_histogram) == found.num_spec_steps
    assert 0 <= found.draft_acceptance_rate <= 1


def test_a_step_cut_by_the_end_counts_and_is_named():
    found = count_acceptance([generation(drafted=[4], accepted=[4], emitted=[2])], 4)
    assert found.n_truncated_steps == 1
    assert found.mean_acceptance_length == 5


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match=r"3 accepted|more accepted"):
        count_acceptance([generation(drafted=[2], accepted=[3])], 4)


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_of_time_lies_between_0_and_1(share):
    with pytest.raises(ValueError, match="stolen_share"):
        Environment(
            system="s",
            processor="p",
            cores=2,
            busy_cores=0.0,
            governor=None,
            driver=None,
            stolen_share=share,
        )


def test_speed_up_is_a_ratio_of_sums_without_the_prefill():
    """Plain: 4 + 8 tokens after the first in 1 + 3 seconds. Fast: the same tokens in 1 + 1 seconds."""
    slow = [generation(0, [0] * 4, [0] * 4, seconds=1), generation(1, [0] * 8, [0] * 8, seconds=3)]
    fast = [generation(0, [3], [3], seconds=1), generation(1, [3, 3], [3, 3], seconds=1)]
    interval = speedup(fast, slow)
    assert interval.value == pytest.approx((12 / 2) / (12 / 4))
    # without either prompt the speed-up is 1 and 3; t is 12.7 for two prompts, and no speed-up is below 0
    assert (interval.low, interval.n) == (0, 2)
    assert interval.high == pytest.approx(2 + 12.706, rel=1e-4)


def test_a_speed_up_is_that_of_a_k_chosen_on_other_prompts():
    """Two prompts of 10 s without a draft: K = 2 is faster on the second, so the first counts with its 8 s, and the
    second with the 9 s of K = 1; either K alone takes 13 s for both."""
    slow = [(10, 10.0)] * 2
    arms = [[(10, 4.0), (10, 9.0)], [(10, 8.0), (10, 5.0)]]
    assert intervals.speedup(intervals.Timings(arms, slow)).value == pytest.approx(20 / 17)
    assert intervals.speedup(intervals.Timings(arms[:1], slow)).value == pytest.approx(20 / 13)


def test_noise_alone_makes_no_speed_up():
    """Six K that cost what no draft costs: the fastest on the prompts themselves seems a tenth faster."""
    found, itself = [], []
    for seed in range(40):
        rng = random.Random(seed)
        slow = [(10, 10.0)] * 12
        arms = [[(10, rng.uniform(6, 14)) for _ in slow] for _ in range(6)]
        found.append(intervals.speedup(intervals.Timings(arms, slow)))
        best = max(map(intervals.tokens_per_second, arms))
        itself.append(best / intervals.tokens_per_second(slow))
    assert sum(itself) / 40 > 1.08
    assert sum(one.value for one in found) / 40 == pytest.approx(1, abs=0.04)
    assert sum(one.low < 1 < one.high for one in found) >= 35  # with 95 % coverage fewer have a chance of 1 in 60


def test_a_prompt_that_is_answered_with_its_end_says_nothing_about_speed():
    """And one conversation has no interval."""
    slow = [generation(0, [0] * 4, [0] * 4, seconds=2), generation(1, seconds=0)]
    fast = [generation(0, [3], [3], seconds=1), generation(1, seconds=0)]
    found = speedup(fast, slow)
    assert (found.value, found.n, found.decides) == (2, 1, False)


def test_a_score_without_a_timed_token_is_refused():
    base = score().model_dump()
    ended = [generation(0, seconds=0).model_dump()]
    with pytest.raises(ValueError, match="timed"):
        Score.model_validate(base | {"plain": ended, "speculative": {1: ended}})


def test_a_stall_in_one_repeat_is_not_the_drafts():
    """Two of three plain repeats took 4 s, one 40 s; the reviewer's demo made a speed-up of such."""
    slow = [generation(0, [0] * 4, [0] * 4, seconds=s) for s in (4, 40, 4)]
    fast = [generation(0, [3], [3], seconds=2)] * 3
    assert speedup(fast, slow).value == pytest.approx(2)
    assert speedup(fast[:2], slow[:2]).value == pytest.approx(2)
    assert intervals.slowest_over_fastest([g.decoding for g in slow]) == pytest.approx(10)


def test_generations_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="tokens is 9, but"):
        Generation.model_validate(generation(0, [3], [3]).model_dump() | {"tokens": 9})


@pytest.mark.parametrize(
    "changes",
    [
        {"speculative": {10**9: [generation(0, [2], [1]).model_dump()]}},
        {"speculative": {1: [generation(0, [2], [1]).model_dump()]}},
    ],
    ids=["a K without an end", "more drafted than K"],
)
def test_a_score_that_no_report_could_show_is_refused(changes):
    base = score().model_dump() | {"plain": [generation(0, [0], [0]).model_dump()]}
    whole = {"speculative": {2: [generation(0, [2], [1]).model_dump()]}, "prompts": []}
    Score.model_validate(base | whole)
    with pytest.raises(ValueError, match=r"1000|impossible at K"):
        Score.model_validate(base | whole | changes)
