"""A plan fits its time, names what it leaves out and why, and hands the time on from step to step."""

import math
import shutil
from pathlib import Path
from shutil import _ntuple_diskusage as usage

import pytest
from helpers.builders import save_neox
from helpers.errors import raises_option
from helpers.published_heads import written
from helpers.small_files import write_prompts
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig

from draftlab.commands import AUTO
from draftlab.model.hub import locate
from draftlab.model.size import read_size
from draftlab.searching.plan import (
    STEPS,
    Machine,
    Plan,
    PlannedStep,
    Request,
    make_plan,
    ready_drafts,
    seconds_of_steps,
    served_by,
)
from draftlab.searching.prompts import find_prompts

FAST = Machine(
    device="cpu",
    cores=1,
    dtype="float32",
    tflops=0.1,
    training_dtype="float32",
    training_tflops=0.1,
    gigabytes_per_second=20,
    slowdown=1,
    free_memory=10**10,
    free_disk=10**10,
)
seconds = st.dictionaries(st.sampled_from(list(STEPS)), st.floats(0.1, 100), min_size=1)


def planned(target, tmp_path, minutes=60.0, machine=FAST, server=None, streams=(1,), ready=(), prompts=128):
    directory = locate(str(target), weights=False)
    file = None if target == "tiny" else write_prompts(tmp_path / "prompts.jsonl", prompts)
    request = Request(
        name=str(target),
        target=directory,
        size=read_size(directory),
        server=server,
        streams=list(streams),
        prompts=find_prompts(file, None, "stdlib", directory, streams, trains=not ready),
        temperature=0.0,
        program=None,
        ready=ready,
    )
    return make_plan(request, machine, minutes, {}, {})


@given(seconds, st.floats(0, 1e5), st.dictionaries(st.sampled_from(sorted(STEPS)), st.floats(0, 1e5)))
def test_steps_get_what_they_need_and_all_of_the_time(least, total, most):
    """A step that has a limit gets no more, and the others share what it leaves."""
    got = seconds_of_steps(least, total, {})
    assert all(got[name] >= needed for name, needed in least.items())
    assert sum(got.values()) == pytest.approx(max(total, sum(least.values())))
    limited = seconds_of_steps(least, total, most)
    assert list(limited) == list(least)
    for name, needed in least.items():
        assert needed <= limited[name] * (1 + 1e-9)
        assert limited[name] <= max(needed, most.get(name, math.inf)) * (1 + 1e-9)
    if any(name not in most for name in least):
        assert sum(limited.values()) == pytest.approx(sum(got.values()))


@given(seconds, st.floats(1, 1e4), st.lists(st.floats(0, 1), min_size=12, max_size=12))
def test_what_a_step_leaves_goes_to_the_later_ones(least, more, used):
    """Steps that use a share of what they may take never run over the time; those that use all of it fill it."""
    total = sum(least.values()) + more
    in_order = {name: least[name] for name in STEPS if name in least}
    steps = [
        PlannedStep(name=n, what="", minutes=s / 60, least_minutes=least[n] / 60)
        for n, s in seconds_of_steps(in_order, total, {}).items()
    ]
    plan = Plan(
        settings={},
        target="",
        machine=FAST,
        prompts="",
        candidates=[],
        left_out={},
        layers=[],
        widths=[],
        first_steps=0,
        steps=steps,
    )
    for shares in (used, [1.0] * 12):
        spent = 0.0
        for step, share in zip(steps, shares, strict=False):
            allowed = plan.seconds_for(step.name, spent)
            assert allowed >= 60 * step.minutes * (1 - 1e-9)
            spent += share * allowed
        assert spent <= total * (1 + 1e-9)
    assert spent == pytest.approx(total)


def test_a_plan_names_its_steps_with_time_memory_and_disk(tmp_path):
    plan = planned("tiny", tmp_path)
    assert [step.name for step in plan.steps] == [n for n in STEPS if n not in ("ready", "trimmed")]
    assert plan.minutes == pytest.approx(60)
    assert set(plan.left_out) == {"trimmed"}
    assert len(plan.layers) * len(plan.widths) >= 2
    assert not (tmp_path / "out").exists()


def test_a_disk_too_small_for_the_drafts_is_said_before_anything_runs(tmp_path, monkeypatch):
    new = planned("tiny", tmp_path)
    assert new.disk > 10 * read_size(locate("tiny")).weight_bytes() / 6
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(0, 0, new.disk - 1))
    with raises_option("disk"):
        AUTO(target="tiny", data="stdlib", out=tmp_path / "out", threads=1)
    assert not (tmp_path / "out").exists()


def test_less_time_drops_the_dearest_and_says_the_least(tmp_path):
    slow = FAST.model_copy(update={"tflops": 0.02, "training_tflops": 0.02})
    before: set[str] = set(planned("tiny", tmp_path, 600, slow).candidates)
    for minutes in (8, 3, 1.5):
        plan = planned("tiny", tmp_path, minutes, slow)
        assert {*plan.candidates} <= before
        assert sum(step.least_minutes for step in plan.steps) <= minutes
        before = set(plan.candidates)
    assert "prompt-lookup" in before
    assert not {"trimmed", "eagle", "parallel", "draft"} & before
    words = " ".join(plan.left_out.values()).split()
    (everything,) = {int(word) for word in words if word.isdigit()}
    assert {*planned("tiny", tmp_path, everything, slow).candidates} > before
    assert "draft" in plan.left_out
    with raises_option("--minutes"):
        planned("tiny", tmp_path, 0.2, slow)


@pytest.mark.parametrize("server", ["vllm", "sglang", "llama.cpp", "transformers"])
def test_only_what_a_server_runs_is_tried(tmp_path, server):
    plan = planned("tiny", tmp_path, server=server)
    assert {*plan.candidates} == {*served_by(server)}


@pytest.fixture(scope="module")
def neox(tmp_path_factory, tokenizer_dir):
    return save_neox(tmp_path_factory.mktemp("neox") / "neox", tokenizer_dir, layers=4)


def test_a_target_that_cannot_be_pruned_keeps_lookup_and_heads_and_says_why(neox, tmp_path):
    plan = planned(neox, tmp_path, streams=[1, 2])
    assert plan.candidates == ["eagle", "prompt-lookup", "fallback-eagle"]
    assert {"draft", "parallel"} <= set(plan.left_out)
    assert {step.name for step in plan.steps} == {"answers", "eagle", "score", "final", "export"}


def test_a_mixture_of_experts_is_planned_from_its_config_alone(tokenizer_dir, tmp_path):
    folder = shutil.copytree(tokenizer_dir, tmp_path / "experts")
    sizes = {"vocab_size": 307, "hidden_size": 64, "num_hidden_layers": 4}
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
    Qwen3MoeConfig(**sizes, **experts).save_pretrained(folder)
    plan = planned(folder, tmp_path)
    assert plan.candidates == ["eagle", "prompt-lookup", "fallback-eagle"]
    assert "active" in plan.target
    assert "experts" in plan.left_out["draft"]


def test_ready_drafts_are_measured_before_others_are_trained(family_dirs, tmp_path):
    target, names = family_dirs["llama"], [str(family_dirs["llama"]), str(family_dirs["llama_mha"])]
    ready = ready_drafts(names, target, weights=True)
    assert [draft.kind for draft in ready] == ["draft", "draft"]
    plan = planned(target, tmp_path, ready=ready)
    assert plan.ready == ["llama", "llama_mha"]
    assert {"draft", "eagle"} <= set(plan.candidates)
    assert [step.name for step in plan.steps][:2] == ["ready", "texts"]
    assert "ready" not in [step.name for step in planned(target, tmp_path).steps]


def test_a_pair_that_exists_asks_for_no_text_to_train_on(family_dirs, tmp_path):
    target = family_dirs["llama"]
    ready = ready_drafts([str(family_dirs["llama_mha"])], target, weights=True)
    plan = planned(target, tmp_path, ready=ready, prompts=72)
    assert plan.candidates == ["prompt-lookup"]
    assert {step.name for step in plan.steps} == {"score", "final", "export"}
    assert "add 24 " in plan.left_out["draft"]
    with raises_option("--prompts", 96):
        planned(target, tmp_path, prompts=72)


def test_a_dry_run_needs_no_weights_of_a_ready_draft(family_dirs, tokenizer_dir, tmp_path):
    """The hub's cache is such a place after a dry run has fetched configuration and tokenizer."""
    target = family_dirs["llama"]
    head, neox = written(tmp_path / "head", target), save_neox(tmp_path / "neox", tokenizer_dir)
    ignored = shutil.ignore_patterns("*.safetensors*")
    names = [
        str(shutil.copytree(folder, tmp_path / "bare" / folder.name, ignore=ignored))
        for folder in (family_dirs["qwen3"], neox, head)
    ]
    found = ready_drafts(names, target, weights=False)
    assert [draft.kind for draft in found] == ["draft", "draft", "eagle"]
    plan = planned(target, tmp_path, ready=found)
    assert plan.ready == [Path(name).name for name in names]
    for name in names:
        with raises_option():
            ready_drafts([name], target, weights=True)


def test_two_ready_drafts_of_one_name_are_refused(family_dirs):
    with raises_option("llama"):
        ready_drafts([str(family_dirs["llama"])] * 2, family_dirs["llama"], weights=True)


def test_prompts_are_parted_without_overlap_and_always_alike(family_dirs, tmp_path):
    target, parts = family_dirs["llama"], ("choose", "measure", "train")
    prompts = find_prompts(write_prompts(tmp_path / "prompts.jsonl", 160), None, None, target, [1, 5])
    assert (prompts.choose, prompts.measure, prompts.train) == (50, 25, 85)
    for name in ("a", "b"):
        prompts.write(tmp_path / name, target)
    texts = [[(tmp_path / name / f"{part}.jsonl").read_text() for part in parts] for name in ("a", "b")]
    assert texts[0] == texts[1]
    rows = [set(text.splitlines()) for text in texts[0]]
    assert list(map(len, rows)) == [50, 25, 85]
    assert len(set.union(*rows)) == 160
