"""A step is the sum of its passes: the first draft pass after the target's, later ones after the draft's own."""

import pytest
from helpers.latencies import latency
from helpers.scores import PROMPTS, at, change, later, speculative, without_host
from hypothesis import given
from hypothesis import strategies as st

from draftlab.results.step_costs import StepCosts

FIRST = {1: 0.7, 2: 0.9}
FOLLOWING = {1: 0.3, 2: 0.25, 3: 0.2}
VERIFY = {1: 5.0, 3: 6.0, 5: 8.0}
ALONE = 4.0


def costs(*, parallel: bool = False) -> StepCosts:
    return StepCosts(
        alone=ALONE,
        verify=[latency(*each) for each in VERIFY.items()],
        first=[latency(*each) for each in FIRST.items()],
        following=FOLLOWING,
        parallel=parallel,
    )


def test_each_pass_costs_what_it_costs_at_its_place():
    assert costs().drafting(0, 1) == []
    assert costs().drafting(1, 2) == [0.9]
    # after more passes than were timed, a pass costs what the last one does
    assert costs().drafting(6, 1) == [0.7, 0.3, 0.25, 0.2, 0.2, 0.2]
    assert costs(parallel=True).drafting(2, 1) == [0.9]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_steps_add_up_and_a_draft_reads_two_tokens_after_it_was_accepted_whole(accepted):
    """Steps of 4 drafted tokens, counted pass by pass."""
    run, passes = speculative(0, accepted, 4, 1.0), 0.0
    for before, _ in zip([0, *accepted], accepted, strict=False):
        passes += (0.9 if before == 4 else 0.7) + 0.3 + 0.25 + 0.2 + 8.0
    assert costs().total_ms([run], 0) == pytest.approx(passes)
    assert costs().total_ms([run], 0.1) == pytest.approx(passes + 0.1 * len(accepted))


def test_a_score_implies_the_sum_of_its_passes_and_its_host():
    """5 steps accept 4, 2, 0, 3, 1 of 4 tokens and emit 15; the first of two unread tokens follows the first step."""
    base = without_host(at("draft", [0.2] * PROMPTS))
    target = change(base.target, latency=costs().verify, following=[later(ALONE, 2)])
    draft = change(base.draft, latency=costs().first, following=[later(ms, n) for n, ms in FOLLOWING.items()])
    one = change(base, target=target, draft=draft)
    decoding = 5 * (0.7 + 0.3 + 0.25 + 0.2 + 8.0) + 0.2
    assert one.implied_tpot_ms(4) == pytest.approx(decoding / 15)
    assert one.implied_tpot_ms(0) == pytest.approx(ALONE)
    assert one.implied_speedup(4) == pytest.approx(15 * ALONE / decoding)
    assert one.implied_request_ms(4) == pytest.approx(one.ttft_ms(4).value + decoding)
    assert one.draft_ms == pytest.approx((0.7 + 0.3 + 0.25 + 0.2) / 4)
    assert one.cost_ratio == pytest.approx(one.draft_ms / ALONE)
    # 0.1 ms on the host in each step with the draft; drafting takes it the 0.01 ms of a step without
    hosted = change(
        one,
        plain=[change(g, host_seconds=1e-5 * len(g.drafted)) for g in one.plain],
        speculative={4: [change(g, host_seconds=5e-4) for g in one.speculative[4]]},
    )
    with_host = decoding + 5 * (0.1 + 0.01)
    assert hosted.implied_tpot_ms(4) == pytest.approx(with_host / 15)


def test_a_score_with_passes_of_unknown_place_implies_nothing():
    """Before 2026-11-28, `latency` mixed passes after the target's and after the draft's own."""
    base = without_host(at("draft", [0.2] * PROMPTS))
    timed = change(base.target, latency=[latency(1, 0.03), latency(5, 0.03)])
    new, old = (change(base, target=change(timed, following=kept)) for kept in (timed.following, []))
    assert new.implied_speedup(4) is not None
    assert (old.implied_speedup(4), old.cost_ratio, old.doubt) == (None, None, None)
