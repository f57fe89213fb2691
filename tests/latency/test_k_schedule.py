"""K by batch size: none where nothing is accepted or passes are bound by compute; in the form that vLLM reads."""

import json
import os
import runpy
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from errors import raises_option
from pydantic import ValidationError
from test_cost_model import latency, profile_of
from typed import call

from draftlab.acceptance.expected import texts_of
from draftlab.latency.cost_model import CostModel, write_profile
from draftlab.latency.k_schedule import (
    Ranges,
    Schedule,
    ranges,
    read_schedule,
    schedule,
    schedule_of,
)
from draftlab.latency.steps import expected_time, plain_ms, step_costs, steps, total_ms
from draftlab.latency.workload import Workload, constant_workload

BATCHES, WIDTHS, KS = (1, 2, 4, 8, 16, 32), range(1, 9), range(1, 7)
BUSY = 12  # tokens from which on a pass takes longer for more


def roofline(name: str, ms: float, busy: float, context_ms: float = 0.0) -> CostModel:
    """A model whose passes take ms up to busy tokens, and beyond in proportion."""
    return costs(name, lambda w, b, c, _: ms * max(1, w * b / busy) + context_ms * c * b)


def costs(name: str, ms: Callable[[int, int, int, int], float]) -> CostModel:
    free = [latency(1, 0.0), latency(8, 0.0)]
    grid = {"widths": WIDTHS, "batches": BATCHES, "contexts": (0, 100)}
    return CostModel.of(profile_of(ms, name=name, **grid, host=free))


def constant(alpha: float) -> Workload:
    return constant_workload(alpha, tokens=40, prompt_tokens=10)


def by_rule(found: Ranges, batch: int) -> int:
    """vLLM's rule in its own words: inclusive ranges; gaps and what lies beyond inherit the K before."""
    return [k for low, _, k in found if low <= batch][-1]


def found(draft: CostModel, target: CostModel, alpha: float) -> tuple[list[int], int]:
    """Return the K of each number of streams from 1 to 32, and up to how many streams a draft pays."""
    made = schedule(draft, target, [constant(alpha)], KS, 32, "vllm")
    return [by_rule(made.ranges, batch) for batch in range(1, 33)], made.pays_up_to


def test_a_draft_can_pay_from_some_streams_on():
    """Up to 8 tokens, a pass of a mixture of experts reads more experts for every token."""
    experts = costs("t", lambda w, b, c, _: float(min(w * b, 8)))
    made = schedule(roofline("d", 0.05, BUSY), experts, [constant(0.6)], KS, 32, "vllm")
    assert (made.ranges[0][2], made.ranges[-1][2] > 0) == (0, True)
    assert (made.pays_from, made.pays_up_to) == (made.ranges[0][1] + 1, 32)
    with_a_gap = schedule_of({1: 4, 4: 0, 8: 2})
    assert (with_a_gap.pays_from, with_a_gap.pays_up_to) == (1, 3)


@pytest.mark.parametrize(
    ("ranges", "pays_up_to"), [([(1, 4, 3), (3, 2, 5)], 2), ([(2, 4, 3)], 4), ([(1, 4, 3)], 99)]
)
def test_a_schedule_has_each_batch_size_once(ranges, pays_up_to):
    with pytest.raises(ValidationError):
        Schedule(ranges=ranges, pays_up_to=pays_up_to)


def test_nothing_is_drafted_where_nothing_is_accepted_or_every_token_costs_its_own_time():
    """K tokens more cost K passes more, of which at most K are saved."""
    cheap, dear = roofline("d", 0.01, BUSY), roofline("d", 1e-6, 1e-3)
    assert found(cheap, roofline("t", 1.0, BUSY), 0.0) == ([0] * 32, 0)
    assert found(dear, roofline("t", 1.0, 1e-3), 0.95) == ([0] * 32, 0)


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_k_does_not_rise_with_the_streams_and_ends_at_none(alpha):
    ks, pays_up_to = found(roofline("d", 1e-9, BUSY), roofline("t", 1.0, BUSY), alpha)
    assert ks == sorted(ks, reverse=True)
    assert ks[0] > 1
    assert ks[-1] == 0
    assert pays_up_to == ks.index(0)


def test_a_dear_target_verifies_fewer_the_more_streams_there_are_and_a_longer_context_brings_them_back():
    """vllm#48627: where keys and values are most of a pass, more streams do not make it bound by compute."""
    targets = (roofline("t", 1.0, BUSY, each) for each in (0.0, 0.5))
    short, long = (found(roofline("d", 0.01, BUSY), target, 0.8)[0] for target in targets)
    assert short[-1] == 0 < long[-1]


def test_ranges_are_the_ks_that_they_were_made_of():
    rng = np.random.default_rng(0)
    for _ in range(50):
        ks = rng.integers(0, 4, rng.integers(1, 40)).tolist()
        made = ranges(ks)
        assert [by_rule(made, batch) for batch in range(1, len(ks) + 1)] == ks
        assert (made[0][0], made[-1][1]) == (1, len(ks))
        assert all(b[0] == a[1] + 1 and a[2] != b[2] for a, b in pairwise(made))


def test_a_step_of_vllm_is_its_passes():
    """Against a walk over texts with known outcomes: target K + 1, draft K + 2 and K - 1 times 1; no draft: 1."""
    rng, k, prompt = np.random.default_rng(1), 3, 7
    hits = [(rng.random(length) < 0.7).astype(float) for length in (40, 23, 2)]
    work = Workload(texts=texts_of(hits), prompt_tokens=np.array([prompt] * 3))
    draft, target = roofline("d", 0.2, 6, 0.001), roofline("t", 1.0, 6, 0.01)
    batch, total, plain, paused = 4, 0.0, 0.0, 0.0
    for row in hits:
        at = 0
        while at < len(row):
            context = np.array(prompt + at)
            # vLLM drafts k tokens in the last step, too
            total += float(target.forward_ms(k + 1, batch, context))
            total += float(draft.forward_ms(k + 2, batch, context))
            total += sum(float(draft.steady_ms(batch, context + i)) for i in range(1, k))
            at += next((i for i, hit in enumerate(row[at : at + k]) if not hit), k) + 1
        for at in range(len(row)):
            plain += float(target.steady_ms(batch, np.array(prompt + at)))
            paused += float(draft.forward_ms(2, batch, np.array(prompt + at)))
    by_n = {n: steps(work, n, "vllm") for n in (0, k)}
    alone, by_k = total_ms(draft, target, work, by_n, batch, "vllm")
    assert set(by_n[k].drafted[by_n[k].starts > 0]) == {k}
    # the first pass counts at the context of the step
    assert by_k[k] == pytest.approx(total, rel=0.01)
    assert alone == pytest.approx(plain)
    assert by_k[0] == pytest.approx(plain + paused)
    own = step_costs(draft, target, work, k, batch)
    # draftlab's engine
    assert expected_time(own, work.prompt_tokens, steps(work, k)).total.sum() < 0.98 * total
    assert plain_ms(own, work).sum() == pytest.approx(plain)


def written(folder: Path, arguments: str) -> Path:
    for name, model in (("d", roofline("d", 0.05, BUSY)), ("t", roofline("t", 1.0, BUSY))):
        write_profile(model.profile, folder / f"{name}.yaml")
    profiles = f"--draft-profile {folder}/d.yaml --target-profile {folder}/t.yaml"
    typed = f"predict {profiles} --max-new-tokens 20 --context 10 --k 1-6 {arguments} --json"
    (folder / "prediction.json").write_text(call(typed).stdout)
    return folder / "prediction.json"


def test_a_prediction_has_the_schedule_and_no_draft_as_a_candidate(tmp_path):
    file = written(tmp_path, "--acceptance 0.6 --for vllm --batch 1,8,32")
    made = json.loads(file.read_text())["predictions"][0]
    read = read_schedule(file, "d", None)
    assert [list(each) for each in read.ranges] == made["schedule"]["ranges"]
    assert {best["batch"]: best["k"] for best in made["best_ks"]}[32] == 0


@pytest.mark.parametrize(
    ("arguments", "draft"),
    [
        ("--acceptance 0.6 --batch 1,8", ("d", None)),
        ("--acceptance 0 --batch 1,8 --for vllm", ("d", None)),
        ("--acceptance 0.6 --batch 1,8 --for vllm", ("mine", "0" * 64)),
    ],
)
def test_predictions_without_a_schedule_of_this_draft_are_refused(tmp_path, arguments, draft):
    file = written(tmp_path, arguments)
    with raises_option(file):
        read_schedule(file, *draft)


@pytest.mark.vllm
def test_vllm_reads_the_ranges_as_they_are_meant(tmp_path):
    """By its own module, which imports nothing."""
    program = os.environ.get("DRAFTLAB_TEST_VLLM")
    if program is None:
        pytest.skip("DRAFTLAB_TEST_VLLM does not name a vllm binary")
    find = "import importlib.util; print(importlib.util.find_spec('vllm').submodule_search_locations[0])"
    python = Path(program).absolute().parent / "python"
    place = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True).stdout
    module = runpy.run_path(f"{place.strip()}/v1/spec_decode/dynamic/utils.py")
    ks = [4, 4, 3, 1, 1, 0, 0]
    as_read = json.loads(json.dumps(ranges(ks)))
    dense = module["build_dynamic_sd_schedule_lookup"](as_read, 9, max(ks))
    assert dense[1:] == [*ks, 0, 0]
