"""Stalls are taken out of timings, and nothing else is."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from helpers.builders import build

from draftlab import intervals
from draftlab.drafters.parallel import model_drafter
from draftlab.engine.generate import Step
from draftlab.latency import machine_state
from draftlab.latency.machine_state import WARM_UPS
from draftlab.model import llama, modes
from draftlab.results.decoding import Generation, decode_timings
from draftlab.sampling import SamplingParams
from draftlab.scoring import throughput
from draftlab.scoring.throughput import (
    PLAIN,
    TimedArms,
    TimedStep,
    measure_throughput,
    without_stalls,
)

PROMPTS = [[1 + i, 2, 3 + i] for i in range(8)]
ARMS = [PLAIN, ("draft", 1), ("draft", 3)]


@pytest.fixture(autouse=True, scope="module")
def warm_ups_of_users() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_state, "WARM_UPS", WARM_UPS)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("stalls")
    for name, seed, layers in (("target", 1, 2), ("draft", 2, 1)):
        build("llama", seed, num_hidden_layers=layers).save_pretrained(root / name)
    loaded = (llama.load(root / name, torch.float32) for name in ("target", "draft"))
    return [modes.in_native_mode(model, torch.float32) for model in loaded]


def measured(models, share: float, factor: tuple[float, float]) -> TimedArms:
    """Decode on a clock that advances by about one tick per reading, and by many in a share of them."""
    rng, now = random.Random(0), 0.0

    def clock() -> float:
        nonlocal now
        stalled = rng.random() < share / 3  # three readings a pass advance the clock
        now += rng.uniform(0.95, 1.05) * (3 * rng.uniform(*factor) if stalled else 1)
        return now

    return measured_on(models, clock)


def measured_on(models, clock: Callable[[], float], prompts: int = 8, tokens: int = 41, repeats: int = 2) -> TimedArms:
    target, draft = models
    drafters = {"draft": (model_drafter(draft, target.vocab), [1, 3])}
    sampling, advance = SamplingParams(max_tokens=tokens), lambda done: None
    return measure_throughput(
        target,
        drafters,
        PROMPTS[:prompts],
        sampling=sampling,
        repeats=repeats,
        advance=advance,
        clock=clock,
    )


def stalling(at: range, seconds: int) -> tuple[Callable[[], float], list[float]]:
    """Return a clock that ticks with each reading, and stalls at some, and the times that it told."""
    told = [0.0]

    def clock() -> float:
        told.append(told[-1] + (seconds if len(told) in at else 1))
        return told[-1]

    return clock, told


@pytest.fixture(scope="module")
def quiet(models) -> TimedArms:
    return measured(models, 0, (1, 1))


def test_a_run_full_of_stalls_is_repeated_and_one_that_stays_so_is_not_for_ever(models, monkeypatch):
    def in_a_storm(storm: range) -> tuple[list[Generation], int]:
        clock, told = stalling(storm, 100)
        found = measured_on(models, clock)
        return [g for arm in ARMS for g in found.generations[arm]], len(told) - 1

    def full_of_stalls(runs: list[Generation]) -> int:
        return sum(g.stalled_passes > throughput.MANY_STALLED * len(g.drafted) for g in runs)

    quiet, readings = in_a_storm(range(0))
    storm = range(readings // 2, readings // 2 + readings // 20)  # of about two runs in the middle
    calm, more = in_a_storm(storm)
    assert (full_of_stalls(quiet), full_of_stalls(calm)) == (0, 0)
    assert 1.02 * readings < more < 1.3 * readings
    assert [g.tokens for g in calm] == [g.tokens for g in quiet]
    monkeypatch.setattr(throughput, "TRIES", 0)
    stormy, same = in_a_storm(storm)
    assert full_of_stalls(stormy) > 0
    assert same == readings


@pytest.mark.parametrize(("share", "factor"), [(0.01, (10, 10)), (0.1, (10, 1000))])
def test_the_estimate_stands_and_its_interval_covers_the_truth_whatever_stalls(models, quiet, share, factor):
    noisy = measured(models, share, factor)
    for arm in ARMS:
        clean, found = (decode_timings(m.generations[arm]) for m in (quiet, noisy))
        rate = intervals.tokens_per_second(clean)
        assert intervals.tokens_per_second(found) == pytest.approx(rate, rel=0.03)
        assert sum(g.stalled_passes for g in noisy.generations[arm]) > 0
        raw = [(g.tokens - 1, g.decode_seconds + g.stalled_seconds) for g in noisy.generations[arm]]
        assert intervals.tokens_per_second(raw) < 0.97 * rate  # what a mean would say
    plain = [decode_timings(m.generations[PLAIN]) for m in (quiet, noisy)]
    for arm in ARMS[1:]:
        drafted = [decode_timings(m.generations[arm]) for m in (quiet, noisy)]
        truth = intervals.tokens_per_second(drafted[0]) / intervals.tokens_per_second(plain[0])
        speedup = intervals.speedup(intervals.Timings([drafted[1]], plain[1]))
        assert speedup.low - 0.03 * truth <= truth <= speedup.high + 0.03 * truth
    assert all(g.stalled_passes == 0 for arm in ARMS for g in quiet.generations[arm])


def prefills(models, stalled: range) -> tuple[list[list[float]], int, int]:
    """Return the prefills' seconds by arm where some readings of the clock stall, the stalled passes and readings."""
    clock, told = stalling(stalled, 1000)
    found = measured_on(models, clock, prompts=2, tokens=9, repeats=1)
    runs = [found.generations[arm] for arm in ARMS]
    passes = sum(g.stalled_passes for arm in runs for g in arm)
    return [[g.prefill_seconds for g in arm] for arm in runs], passes, len(told) - 1


def test_a_stalled_prefill_counts_as_those_of_the_same_prompt_even_if_it_was_read_once(models, monkeypatch):
    quiet, none, readings = prefills(models, range(0))
    assert none == 0
    # the draft reads the prompt, too: longer, and no stall
    assert quiet[0][0] < quiet[1][0] == quiet[2][0]
    later = range(readings // 2, readings, 9)  # after the warm-up
    stalled = [prefills(models, range(at, at + 1)) for at in later]
    for seconds, *_ in stalled:
        # a tick of a plain prefill is for drafting nothing
        assert np.array(seconds) == pytest.approx(np.array(quiet), abs=1)
    assert any(passes for _, passes, _ in stalled)
    monkeypatch.setattr(throughput, "FACTOR", float("inf"))
    assert any(np.max(prefills(models, range(at, at + 1))[0]) > 1000 for at in later)


def test_steps_of_another_kind_are_no_stalls():
    """Two drafters that take turns, wider drafts and fewer rows cost more, and are left as they are."""

    def step(drafted: int, seconds: float, rows: int = 1) -> TimedStep:
        parts = {"draft_seconds": seconds / 2, "verify_seconds": seconds / 2, "host_seconds": 0.0}
        return TimedStep(Step(row=0, drafted=drafted, accepted=0, tokens=[1], **parts), rows)

    turns = [step(3, 1.0)] * 30 + [step(3, 4.0)] * 20
    wide = [step(12, 9.0)] * 12
    last = [step(3, 7.0, rows=4)] * 10
    assert without_stalls([turns, wide, last]) == [turns, wide, last]
    (mended,) = without_stalls([[*turns, step(3, 50.0)]])
    assert mended[:-1] == turns
    assert mended[-1].stall == pytest.approx(49.0)
    assert without_stalls([[]]) == [[]]
