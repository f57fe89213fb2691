"""Speed-ups are of whole requests, over the fastest plain decoding; TPOT and TTFT stand next to them."""

from pathlib import Path

import numpy as np
import pytest
from helpers.scores import CONDITIONS, change, model, score, speculative, without_host
from scipy.stats import t as student

from draftlab.results.decoding import Generation, share_of_equal_texts
from draftlab.results.ranking import category_rows, missed_thresholds, rank, verdict_lines
from draftlab.results.score import Latency, PromptRecord, Score
from draftlab.searching.verdict import Arm, ranking

PROMPTS = 12
TOKENS = 21


def answer(prompt: int, prefill: float, decoding: float, k: int = 0) -> Generation:
    """21 tokens; with k of each step all accepted, in 20 / (k + 1) steps."""
    steps = (TOKENS - 1) // (k + 1)
    return change(speculative(prompt, [k] * steps, k, decoding), prefill_seconds=prefill)


def arm(prefill: float, decoding: float, k: int = 0) -> list[Generation]:
    return [answer(i, prefill, decoding, k) for i in range(PROMPTS)]


def drafted(name: str, prefill: float, decoding: dict[int, float], **fields: object) -> Score:
    """Return a draft of a target that answers in 1 s after a prefill of 0.5 s."""
    speculative = {k: arm(prefill, seconds, k) for k, seconds in decoding.items()}
    return change(score(name), plain=arm(0.5, 1.0), speculative=speculative, **fields)


def test_a_request_is_its_prefill_and_its_decoding():
    """1.5 s for 21 tokens against 0.75 s + 0.25 s; of the tokens after the first 1 s against 0.25 s."""
    one = drafted("d", 0.75, {4: 0.25})
    assert one.speedup(4).value == one.best_k_speedup.value == pytest.approx(1.5)
    assert one.output_tps(0) == pytest.approx(21 / 1.5)
    assert one.output_tps(4) == pytest.approx(21)
    assert one.tpot_speedup(4).value == pytest.approx(4)
    assert [one.ttft_ms(k).value for k in (4, 0)] == pytest.approx([750, 500])
    assert [one.request_ms(k).value for k in (4, 0)] == pytest.approx([1000, 1500])
    assert one.break_even_length(4) == pytest.approx(5 / 4)  # steps of 5 tokens: decoding alone


def test_intervals_of_requests_and_of_tpot_leave_out_the_same_prompts():
    """Half of the prompts gain 2 in requests and 4 in decoding, the others neither."""
    gains = [0.25 if i % 2 else 1.0 for i in range(PROMPTS)]
    mixed = [answer(i, 0.5, seconds, 4) for i, seconds in enumerate(gains)]
    one = change(drafted("d", 0.5, {4: 0.25}), speculative={4: mixed})
    for found, prefill in ((one.best_k_speedup, 0.5), (one.best_k_tpot_speedup, 0.0)):
        assert found is not None

        def gain(without: int | None, prefill: float = prefill) -> float:
            kept = [seconds for i, seconds in enumerate(gains) if i != without]
            return len(kept) * (prefill + 1) / sum(prefill + seconds for seconds in kept)

        left = np.array([gain(i) for i in range(PROMPTS)])
        error = np.sqrt((PROMPTS - 1) * left.var())
        half = student.ppf(0.975, PROMPTS - 1) * error
        assert found.value == pytest.approx(gain(None))
        assert (found.low, found.high) == pytest.approx((gain(None) - half, gain(None) + half))


def test_ttft_is_the_median_repeat_of_each_prompt():
    repeats = [answer(i, prefill, 0.25, 4) for i in range(PROMPTS) for prefill in (0.3, 5.0, 0.2)]
    one = change(drafted("d", 0.5, {4: 0.25}), speculative={4: repeats}, plain=arm(0.5, 1.0) * 3)
    ttft = one.ttft_ms(4)
    assert (ttft.value, ttft.low, ttft.high) == pytest.approx((300, 300, 300))


def test_k_and_the_verdict_are_chosen_by_requests_where_decoding_alone_says_otherwise():
    """The draft reads the prompt for 0.7 s: its tokens come 4 times as fast, and its requests 0.97 times.

    Prompt lookup costs nothing to prefill and decodes 1.25 times as fast: 1.15 in requests.
    """
    model_draft, lookup = drafted("draft", 1.3, {4: 0.25}), drafted("lookup", 0.5, {4: 0.8})
    places = rank([model_draft, lookup])
    assert [place.name for place in places] == ["lookup", "draft"]
    assert missed_thresholds(places[1], 1.1, None)
    assert not missed_thresholds(places[0], 1.1, None)
    candidates = [Arm(kind="draft", draft=Path("draft")), Arm(kind="draft", draft=Path("lookup"))]
    by_auto = ranking(candidates, {1: {"draft": model_draft, "lookup": lookup}})
    assert [choice.name for choice in by_auto] == ["lookup", "draft"]
    assert by_auto[0].speedup == pytest.approx(1.5 / 1.3)


def test_a_speed_up_is_over_the_fastest_plain_decoding():
    """Requests take 1.5 s with bfloat16 weights, 1.0 s with int8, and 0.8 s with the draft, verified in bfloat16."""
    slow, fast = arm(0.5, 1.0), arm(0.4, 0.6)
    precise = CONDITIONS.model_copy(update={"target_weights": "bfloat16", "draft_weights": "int8"})
    one = drafted("d", 0.4, {4: 0.4}, conditions=precise, other_plain={"int8": fast})
    assert one.plain_tps == {"bfloat16": pytest.approx(14), "int8": pytest.approx(21)}
    assert (one.baseline_weights, one.baseline) == ("int8", fast)
    assert one.speedup(4).value == pytest.approx(1 / 0.8)
    assert one.tpot_speedup_value(4) == pytest.approx(0.6 / 0.4)
    alone = change(one, other_plain={})
    assert alone.speedup(4).value == pytest.approx(1.5 / 0.8)
    assert change(one, plain=fast, other_plain={"int8": slow}).baseline_weights == "bfloat16"


@pytest.mark.parametrize(("int8_seconds", "advises"), [(0.2, True), (0.38, False), (1.0, False)])
def test_another_precision_is_advised_only_where_it_is_shown_to_be_faster_alone(int8_seconds, advises):
    """Requests take 0.8 s with the draft; with int8 weights alone they take 0.6 s, 0.78 s with spread, or 1.4 s."""
    precise = CONDITIONS.model_copy(update={"target_weights": "bfloat16", "draft_weights": "int8"})
    alone = [answer(i, 0.4, int8_seconds * (1 + 0.4 * (-1) ** i)) for i in range(PROMPTS)]
    one = drafted("d", 0.4, {4: 0.4}, conditions=precise, other_plain={"int8": alone})
    fastest = one.output_tps(0), one.output_tps(4)
    for text in (one.verdict(), verdict_lines(rank([one]))[0]):
        named = [f"{speed:#.3g} tokens/s" in text or f"({speed:#.3g})" in text for speed in fastest]
        assert all(named) == advises
    if advises:
        assert fastest == pytest.approx((21 / 0.6, 21 / 0.8))
        same = change(one, plain=alone, other_plain={})
        assert same.precision_first(same.best_k_speedup) is None


def test_categories_are_over_the_precision_that_is_fastest_on_all_prompts():
    """int8 is faster in all, and slower in the first prompt, whose category still counts over it."""
    int8 = [answer(0, 0.5, 1.5), *arm(0.4, 0.6)[1:]]
    prompts = [PromptRecord(tokens=5, category="b" if i else "a") for i in range(PROMPTS)]
    one = drafted("d", 0.5, {4: 0.5}, other_plain={"int8": int8}, prompts=prompts)
    gains = {row["category"]: row["speedup"] for row in category_rows(one)}
    assert gains == {"a": pytest.approx(2.0), "b": pytest.approx(1.0)}


def test_what_latencies_imply_is_compared_with_tpot_over_the_same_weights():
    """Steps of 5 tokens for 20 ms + 4 x 2.5 ms: 5 x 20 / 30 over bfloat16, which is 0.6 of that over int8."""
    target = model("target", 12, 20.0, [])
    wide = Latency(width=5, median_ms=20, low_ms=20, high_ms=20, n=30)
    target = target.model_copy(update={"latency": [*target.latency, wide]})
    one = without_host(drafted("d", 0.5, {4: 0.3}, target=target))
    assert one.implied_speedup(4) == pytest.approx(10 / 3)
    assert one.doubt is None  # 1 / 0.3 was measured in decoding, and 1.875 in requests
    over_int8 = change(one, other_plain={"int8": arm(0.4, 0.6)})
    assert over_int8.implied_speedup(4) == pytest.approx(2)
    assert over_int8.doubt is None
    torn = without_host(drafted("d", 0.5, {4: 0.6}, target=target))
    assert torn.doubt is not None


def test_an_uneven_prefill_raises_doubt_even_where_prompts_were_decoded_once():
    """Every K of a draft reads the same prompt: a prefill of 2 s at one and of 0.2 s at the other was no draft's."""
    sound = drafted("d", 0.2, {1: 0.5, 4: 0.5})
    assert sound.doubt is None
    torn = change(sound, speculative={1: arm(2.0, 0.5, 1), 4: arm(0.2, 0.5, 4)})
    assert torn.uneven_prompts == (PROMPTS, pytest.approx(1 + 1.8 / 0.7))
    assert torn.doubt is not None


def test_identical_follows_from_the_equal_texts():
    for share, identical in ((1.0, True), (0.99, False), (None, None)):
        assert change(score(), equal_texts=share).identical is identical
    plain = [[1, 2], [3], [4, 5]]
    assert share_of_equal_texts(plain, [plain, [[1, 2], [9], [4]]]) == pytest.approx(4 / 6)
