"""A plan fits its time, names what it leaves out and why, and hands the time on from step to step."""

import json
import shutil
from shutil import _ntuple_diskusage as usage

import pytest
from builders import save_neox
from errors import raises_option
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tiny_target import train_tokenizer
from draftlab.commands.auto import auto
from draftlab.errors import UserError
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
    device="cpu", cores=1, dtype="float32", tflops=0.1, training_dtype="float32", training_tflops=0.1,
    gigabytes_per_second=20, slowdown=1, free_memory=10**10, free_disk=10**10,
)  # fmt: skip
seconds = st.dictionaries(st.sampled_from(list(STEPS)), st.floats(0.1, 100), min_size=1)


def prompt_file(folder, count):
    file = folder / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"def parse{i}(line):"}) + "\n" for i in range(count))
    )
    return file


def planned(target, tmp_path, minutes=60.0, machine=FAST, server=None, streams=(1,), **given):
    directory = locate(str(target))
    file = None if target == "tiny" else prompt_file(tmp_path, 128)
    request = Request(
        name=str(target), target=directory, size=read_size(directory), server=server, streams=list(streams),
        prompts=find_prompts(file, None, "stdlib", directory, streams), temperature=0.0, program=None,
        **given,
    )  # fmt: skip
    return make_plan(request, machine, minutes, {})


@given(seconds, st.floats(0, 1e5))
def test_steps_get_what_they_need_and_all_of_the_time(least, total):
    got = seconds_of_steps(least, total)
    assert all(got[name] >= needed for name, needed in least.items())
    assert sum(got.values()) == pytest.approx(max(total, sum(least.values())))


@given(seconds, st.floats(1, 1e4), st.lists(st.floats(0, 1), min_size=12, max_size=12))
def test_what_a_step_leaves_goes_to_the_later_ones(least, more, used):
    """Steps that use a share of what they may take never run over the time; those that use all of it fill it."""
    total = sum(least.values()) + more
    steps = [
        PlannedStep(name=n, what="", minutes=s / 60, least_minutes=least[n] / 60)
        for n, s in seconds_of_steps(
            {name: least[name] for name in STEPS if name in least}, total
        ).items()
    ]
    plan = Plan(
        settings={}, target="", machine=FAST, prompts="", candidates=[], left_out={}, layers=[], widths=[],
        first_steps=0, steps=steps,
    )  # fmt: skip
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
    assert [step.name for step in plan.steps] == [name for name in STEPS if name != "trimmed"]
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
        auto(target="tiny", data="stdlib", out=tmp_path / "out", threads=1)
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
    (everything,) = {
        int(word) for reason in plan.left_out.values() for word in reason.split() if word.isdigit()
    }
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


def test_with_ready_drafts_nothing_is_trained_unless_it_is_asked_for(family_dirs, tmp_path):
    target, names = family_dirs["llama"], [str(family_dirs["llama"]), str(family_dirs["llama_mha"])]
    ready = ready_drafts(names, target, weights=True)
    assert [draft.kind for draft in ready] == ["draft", "draft"]
    plan = planned(target, tmp_path, ready=ready, trains=False)
    assert (plan.ready, plan.candidates) == (["llama", "llama_mha"], ["prompt-lookup"])
    assert {step.name for step in plan.steps} == {"score", "final", "export"}
    trained = planned(target, tmp_path, ready=ready)
    assert trained.ready == plan.ready
    assert {"draft", "eagle"} <= set(trained.candidates)
    fewer = prompt_file(tmp_path, 72)
    assert find_prompts(fewer, None, None, target, [1], trains=False).train == 0
    with raises_option("--prompts", 96):
        find_prompts(fewer, None, None, target, [1])


def test_a_ready_draft_with_other_words_is_refused(family_dirs, tmp_path):
    train_tokenizer(
        ["other words entirely " * 50],
        307,
        shutil.copytree(family_dirs["llama"], tmp_path / "other"),
    )
    with raises_option(kind=UserError):
        ready_drafts([str(tmp_path / "other")], family_dirs["llama"], weights=True)
    with raises_option("llama"):
        ready_drafts([str(family_dirs["llama"])] * 2, family_dirs["llama"], weights=True)


def test_prompts_are_parted_without_overlap_and_always_alike(family_dirs, tmp_path):
    target, parts = family_dirs["llama"], ("choose", "measure", "train")
    prompts = find_prompts(prompt_file(tmp_path, 160), None, None, target, [1, 5])
    assert (prompts.choose, prompts.measure, prompts.train) == (50, 25, 85)
    for name in ("a", "b"):
        prompts.write(tmp_path / name, target)
    texts = [
        [(tmp_path / name / f"{part}.jsonl").read_text() for part in parts] for name in ("a", "b")
    ]
    assert texts[0] == texts[1]
    rows = [set(text.splitlines()) for text in texts[0]]
    assert list(map(len, rows)) == [50, 25, 85]
    assert len(set.union(*rows)) == 160


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"prompt_file": 90}, "--prompts: "),
        ({"data": "stdlib", "prompt_file": 96}, "--data: "),
        ({"prompt_file": 96, "verify_with": "vllm"}, "--verify-with: "),
        ({"prompt_file": 96, "server": "transformers", "streams": "1,4"}, "--streams: "),
    ],
)
def test_what_cannot_be_planned_is_refused_by_its_option(
    family_dirs, tmp_path, monkeypatch, settings, option
):
    monkeypatch.chdir(tmp_path)
    files = (
        {"prompt_file": prompt_file(tmp_path, settings["prompt_file"])}
        if "prompt_file" in settings
        else {}
    )
    with pytest.raises(UserError, match=option):
        auto(target=str(family_dirs["llama"]), **settings | files, dry_run=True)
