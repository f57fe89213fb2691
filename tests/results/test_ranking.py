"""A ranking says what its numbers allow: paired where prompts are the same, and told apart only where that holds."""

import json

import pytest
from helpers.latencies import latency
from helpers.scores import (
    BUSY,
    IDLE,
    PROMPTS,
    UNEVEN,
    at,
    board,
    change,
    conditioned,
    kept,
    later,
    model,
    plain,
    rendered,
    score,
    speculative,
    without_host,
)
from helpers.typed import call

from draftlab.errors import UserError
from draftlab.results.decoding import Counters, ServedGeneration
from draftlab.results.ranking import (
    category_rows,
    grouped,
    rank,
    read_scores,
    score_warnings,
    speedup_ratio,
)
from draftlab.results.report import html, json_rows
from draftlab.results.score import PromptRecord, Score


def test_drafts_that_differ_by_the_same_share_everywhere_are_told_apart_by_pairing(tmp_path):
    """Prompts differ threefold, the drafts by a twentieth: their intervals overlap, the ratio's is a point."""
    seconds = [0.1 + 0.05 * i for i in range(PROMPTS)]
    fast, slow = at("fast", seconds), at("slow", [1.05 * s for s in seconds])
    places = rank(read_scores(kept(tmp_path, slow, fast)))
    assert [p.name for p in places] == ["fast", "slow"]
    (behind,) = [p.ratio_to_fastest for p in places if p.ratio_to_fastest is not None]
    assert behind.value == pytest.approx(1 / 1.05)
    assert (behind.low, behind.high) == pytest.approx((1 / 1.05, 1 / 1.05))
    assert slow.speedup(4).high > fast.speedup(4).low
    assert (places[0].choices, places[1].significant) == (2, True)


def test_a_difference_that_prompts_do_not_agree_on_is_not_told_apart(tmp_path):
    fast, noisy = at("even", [0.2] * PROMPTS), at("noisy", [0.12, 0.3] * (PROMPTS // 2))
    places = rank(read_scores(kept(tmp_path, fast, noisy)))
    assert places[1].significant is False
    assert "~ noisy" in rendered(board(fast, noisy), 80)


def test_plain_decoding_of_two_runs_is_taken_out():
    """The second run's machine was twice as slow, with the draft and without."""
    one, slower = [0.2] * PROMPTS, [0.4] * PROMPTS
    here, there = at("a", one), at("b", slower)
    doubled = [plain(g.prompt, 2 * g.decode_seconds) for g in UNEVEN]
    assert speedup_ratio(here, change(there, plain=doubled)).value == pytest.approx(1)


def test_a_draft_that_changes_the_output_is_last_and_not_called_the_fastest(tmp_path):
    lossy = change(at("lossy", [0.05] * PROMPTS), equal_texts=0.5)
    places = rank(read_scores(kept(tmp_path, lossy, at("right", [0.2] * PROMPTS))))
    assert [p.name for p in places] == ["right", "lossy"]
    assert places[1].as_dict()["identical"] is False


def test_drafts_of_different_targets_do_not_compare(tmp_path):
    other = change(score("b"), target=model("other", 12, 20.0, []))
    with pytest.raises(UserError):
        rank(read_scores(kept(tmp_path, score("a"), other)))


def test_the_command_ranks_and_keeps_the_bar(tmp_path):
    kinds = [PromptRecord(tokens=9, category="code" if i % 2 else "chat") for i in range(PROMPTS)]
    paths = kept(tmp_path, score("slow", speed=0.5), change(score("fast"), prompts=kinds))
    typed = f"report {' '.join(map(str, paths))}"
    (group,) = json.loads(call(f"{typed} --json").stdout)["groups"]
    found = group["ranking"]
    assert [row["draft"] for row in found] == ["fast", "slow"]
    kinds = [(row["category"], row["prompts"]) for row in found[0]["categories"]]
    assert kinds == [("chat", PROMPTS // 2), ("code", PROMPTS // 2)]
    assert found[0]["categories"][0]["speedup"] == pytest.approx(2.0)
    missed = call(f"{typed} --min-speedup 2.5 --min-acceptance-length 2", code=3)
    assert "2.00 (2.00 to 2.00)" in missed.stderr
    assert "--min-speedup" in missed.stderr


def test_a_served_score_stands_beside_a_local_one(tmp_path):
    whole, fast = (
        [ServedGeneration(prompt=i, tokens=16, seconds=seconds) for i in range(PROMPTS)] for seconds in (0.6, 0.3)
    )
    accepted = {"num_accepted_tokens_per_pos": [32, 24, 16, 8]}
    counters = {4: Counters(num_drafts=40, num_draft_tokens=160, **accepted)}
    served = change(score("served"), plain=whole, speculative={4: fast}, counters=counters)
    assert Score.model_validate_json(served.model_dump_json()) == served
    length = served.acceptance(4).mean_acceptance_length
    assert (served.speedup(4).value, length) == (pytest.approx(2), 3.0)
    groups = grouped(read_scores(kept(tmp_path, served, score("a", speed=0.9))))
    # another baseline: a server has other overheads than the engine
    assert [[s.name for s in group.scores] for group in groups] == [["served"], ["a"]]
    assert html([served, score("a")], "")
    assert json_rows([served])[0]["draft_share"] is None


def test_a_kind_of_prompt_that_is_answered_with_its_end_gains_nothing(tmp_path):
    base = at("draft", [0.2] * PROMPTS)
    kinds = [PromptRecord(tokens=9, category="a" if i else "b", conversation=i) for i in range(PROMPTS)]
    ended = change(speculative(0, [], 0, 0), prefill_seconds=0.1)
    runs = {
        "plain": [ended, *base.plain[1:]],
        "speculative": {4: [ended, *base.speculative[4][1:]]},
    }
    one = change(base, prompts=kinds, **runs)
    of_others, of_ended = category_rows(one)
    # 0.1 s of prefill, either way
    assert (of_ended["speedup"], of_ended["tpot_speedup"]) == (pytest.approx(1), None)
    assert (of_others["speedup"], of_others["tpot_speedup"]) == pytest.approx((4.5, 4.5))
    assert of_ended["output_tps"] == pytest.approx(10)
    assert len(score_warnings([one])) == len(score_warnings([base])) + 1


def test_a_parallel_draft_implies_one_pass_over_the_last_steps_tokens_and_the_mask_tokens():
    """Steps accept 4, 2, 0, 3 and 1 tokens, so the draft reads 1, 5, 3, 1 and 4 tokens: 2.8 on average."""
    base = without_host(at("draft", [0.2] * PROMPTS))
    k = base.best_k
    width = 2.8 + k - 1
    target = base.target.model_copy(
        update={"latency": [latency(1, 1.1), latency(k + 1, 2.0)], "following": [later(1.0)]}
    )
    passes = [latency(n, 0.1 * n) for n in (1, k + 1, 99)]
    wide = change(base.draft, parallel=True, latency=passes)
    found = change(base, target=target, draft=wide).implied_speedup(k)
    assert found == pytest.approx(base.tokens_per_pass(k) / (0.1 * width + 2.0))


@pytest.mark.parametrize(
    ("seen", "device", "threads", "doubted"),
    [
        ({"busy_cores": 1.5}, "p", 2, True),
        ({"stolen_share": 0.1}, "p", 2, False),
        ({"stolen_share": 0.2}, "p", 2, True),
        ({"waited_share": 0.25}, "p", 2, True),
        ({"waited_share": 0.25}, "p", 1, False),
        ({"pressure": 0.6}, "p", 2, True),
        ({"pressure": 0.6}, "p", 1, False),  # CPU seconds are counted, without waits
        ({"pressure": 1.0}, "H100", 1, False),
    ],
)
def test_other_work_of_the_machine_is_doubt(seen, device, threads, doubted):
    one = change(at("draft", [0.2] * PROMPTS), environment=IDLE.model_copy(update=seen))
    assert (conditioned(one, device=device, threads=threads).doubt is not None) == doubted


@pytest.mark.parametrize(("share", "doubted"), [(0.05, False), (0.8, True)])
def test_stalled_passes_are_doubt(share, doubted):
    base = at("draft", [0.2] * PROMPTS)
    stalled = [
        g.model_copy(update={"stalled_passes": round(share * len(g.drafted))}) for g in base.generations(base.best_k)
    ]
    assert (change(base, speculative={base.best_k: stalled}).doubt is not None) == doubted


@pytest.mark.parametrize(("factor", "doubted"), [(1.0, False), (1.2, False), (1.3, True), (0.7, True)])
def test_passes_that_imply_another_speed_up_are_doubt(factor, doubted):
    base = without_host(at("draft", [0.2] * PROMPTS))
    k = base.best_k
    # a step of these passes gives what was measured, times the factor
    drafting = 0.05 + (k - 1) * 0.01
    passes = {1: 9.9, k + 1: base.tokens_per_pass(k) / base.speedup_value(k) / factor - drafting}
    timed = [latency(width, ms) for width, ms in passes.items()]
    target = base.target.model_copy(update={"latency": timed, "following": [later(1.0)]})
    passes = {"latency": [latency(1, 0.05)], "following": [later(0.01)]}
    draft = base.draft.model_copy(update=passes)
    one = change(base, target=target, draft=draft)
    assert one.implied_speedup(k) == pytest.approx(factor * base.speedup_value(k))
    assert (one.doubt is not None) == doubted
    lookup_first = change(one, draft=draft.model_copy(update={"sha256": None}))
    assert lookup_first.implied_speedup(k) is None


@pytest.mark.parametrize(("uneven", "doubted"), [(4, False), (5, True)])
def test_uneven_repeats_are_doubt_where_times_are_wall_clock(uneven, doubted):
    base = at("draft", [0.2] * PROMPTS)
    again = [plain(g.prompt, (2 if g.prompt < uneven else 1) * (0.3 + 0.1 * g.prompt)) for g in base.plain]
    one = change(base, plain=[*base.plain, *again], environment=IDLE)
    for threads in (1, 2):
        doubt = conditioned(one, device="p", threads=threads).doubt
        assert (doubt is not None) == (doubted and threads == 2)


def test_a_doubtful_score_is_not_called_the_fastest_and_reaches_no_bar(tmp_path):
    doubtful = change(at("loud", [0.1] * PROMPTS), environment=BUSY)
    sound = change(at("right", [0.2] * PROMPTS), environment=IDLE)
    places = rank(read_scores(kept(tmp_path, sound, doubtful)))
    assert [place.as_dict()["doubt"] for place in places] == [doubtful.doubt, None]
    assert "* " not in rendered(board(sound, doubtful), 80).partition("* Fastest")[0]
    assert json_rows([doubtful, sound])[0]["doubt"] == doubtful.doubt
    assert {row["doubt"] for row in json_rows([sound])} == {None}
    alone = call(f"report {tmp_path}/loud --min-speedup 1.01", code=3)
    assert "--min-speedup" in alone.stderr


def test_a_timing_that_ended_early_is_compared_on_the_requests_that_both_timed():
    whole, other = score("wide"), score("deep", speed=0.9)
    prompts = {generation.prompt for generation in other.plain}
    early = other.subset(sorted(prompts)[: len(prompts) - 4])
    assert early.conversations < whole.conversations
    first, second = rank([whole, early])
    part = whole.subset({generation.prompt for generation in early.plain})
    assert first.name == "wide"
    assert second.ratio_to_fastest == rank([part, early])[1].ratio_to_fastest
    assert second.ratio_to_fastest is not None
    assert second.ratio_to_fastest.n == early.conversations
