"""A search keeps what is promising within its time, goes on where it stopped, and its words are its numbers."""

import json
import math
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_report import rendered
from typer.testing import CliRunner

from draftlab import workspace
from draftlab.cli import app
from draftlab.commands import COMMANDS
from draftlab.commands.search import _rung_table
from draftlab.errors import UserError
from draftlab.intervals import Interval
from draftlab.model import eagle, hub
from draftlab.model.families import presets, shape_name, widths_folder
from draftlab.model.shape import Shape, check, check_within, resolve
from draftlab.results.score import read_score
from draftlab.searching.run import Searcher, default_depths, default_widths
from draftlab.searching.schedule import (
    MAX_PASS_SHARE,
    Measured,
    Rung,
    Search,
    Trial,
    affordable_steps,
    candidates,
    read_search,
    write_search,
)

NAMED = presets(widths_folder())
TINY = NAMED["tiny-16x256"]


def trial(name: str, rate: float, *, seconds: float = 10, step_seconds: float = 0.1, rejection: float = 0.5) -> Trial:
    return Trial(
        name=name, k=2, length=2.0, tokens_per_second=rate, speedup=rate / 100, draft_ms=1.0, seconds=seconds,
        step_seconds=step_seconds, rejection=rejection,
    )  # fmt: skip


def search_of(rates: dict[str, float], given: tuple[str, ...] = ()) -> Search:
    rung = Rung(steps=20, names=list(rates), trials=[trial(name, rate) for name, rate in rates.items()])
    return Search(target="t", source="s", shapes=dict.fromkeys(rates, TINY), named=list(given), rungs=[rung])


def pass_ms(shape: Shape) -> float:
    return 0.3 + 0.1 * shape.layers + shape.params() / 1e7


@pytest.mark.parametrize("name", ["tiny-16x256", "llama-7b", "llama-3.1-8b"])
def test_candidates_can_be_cut_and_are_cheap_enough(name):
    source = NAMED[name]
    target_ms = pass_ms(source)
    tried = [resolve(source, layers=n, hidden=w) for n in default_depths(source) for w in default_widths(source)]
    found = candidates(source, tried, pass_ms, target_ms)
    assert len(found) >= 6
    for label, shape in found.items():
        check(shape)
        check_within(shape, source)
        assert label == shape_name(shape)
        assert pass_ms(shape) <= MAX_PASS_SHARE * target_ms


def test_a_target_that_no_draft_is_cheap_beside_is_refused():
    with pytest.raises(UserError, match=r"0 of 2 shapes .* 40%.*fastest 576%"):
        candidates(TINY, [resolve(TINY, layers=n) for n in (8, 12)], pass_ms, pass_ms(TINY) / 10)


def test_the_best_go_on_and_the_given_stay():
    found = search_of({"a": 90, "b": 120, "c": 110, "given": 10}, given=("given",))
    assert [t.name for t in found.best(1)] == ["b", "given"]
    assert [t.name for t in found.best(2)] == ["b", "c", "given"]
    after = found.next_rung(60, found.best(1))
    assert after.rungs[-1].names == ["b", "given"]
    assert after.rungs[-1].left == ["b", "given"]
    assert after.with_trial(trial("b", 130), 5.0).rungs[-1].left == ["given"]


def test_the_share_of_rejections_that_a_rung_leaves_is_measured_and_ranks_its_candidates():
    cuts = search_of({"a": 50, "b": 60, "c": 40})
    assert cuts.remaining_rejections() == 1
    rung = cuts.next_rung(30, cuts.rungs[0].best_first())
    for name, rejection in (("a", 0.4), ("b", 0.3), ("c", 0.45)):  # 0.5 each before
        rung = rung.with_trial(trial(name, 100, rejection=rejection), 1.0)
    assert rung.remaining_rejections() == pytest.approx(0.8)
    ranked = rung.with_promises({"a": 2.4, "b": 0.8, "c": 1.6})
    assert [t.name for t in ranked.best(2)] == ["a", "c"]
    assert [t.promise for t in ranked.rungs[-1].best_first()] == pytest.approx([2.4, 1.6, 0.8])
    worse = rung.with_trial(trial("a", 100, rejection=0.9), 1.0).with_trial(trial("b", 100, rejection=0.9), 1.0)
    assert worse.remaining_rejections() <= 1  # nothing is expected to get worse


def test_a_head_stays_to_the_end_and_is_not_trained():
    found = search_of({"a": 50, "b": 60, "head": 55}, given=("head",)).model_copy(update={"heads": {"head": 1000}})
    rung = found.next_rung(30, found.rungs[0].best_first())
    assert rung.rungs[-1].left == ["b", "a"]
    for name in ("a", "b"):
        rung = rung.with_trial(trial(name, 100, rejection=0.3), 1.0)
    assert rung.remaining_rejections() == pytest.approx(0.6)  # of a and b; the head's 1 is no sign of learning
    assert [t.name for t in rung.best(1)] == ["a", "head"]


def test_what_is_late_is_left_out_but_never_the_named_nor_the_fewest():
    tried = search_of({"a": 50, "b": 60, "c": 40, "d": 30, "given": 10}, given=("given",))
    rung = tried.next_rung(30, tried.rungs[0].best_first())
    assert rung.rungs[-1].left == ["b", "a", "c", "d", "given"]
    assert rung.without_late(2).rungs[-1].left == ["b", "a", "given"]
    for name in ("b", "a", "c"):
        rung = rung.with_trial(trial(name, 100), 1.0)
    late = rung.without_late(2)
    assert (late.rungs[-1].names, late.rungs[-1].left) == (["b", "a", "c", "given"], ["given"])
    assert late.without_late(2) == late
    assert [t.name for t in late.with_only(["a"]).best(3)] == ["a"]
    assert len(late.with_only(["a"]).rungs[-1].trials) == 3  # what the others got is still shown


def test_candidates_of_middling_cost_come_first():
    tried = [resolve(TINY, layers=n) for n in (1, 2, 3, 4, 6)]
    found = candidates(TINY, tried, lambda shape: float(shape.layers), 100)
    assert [shape.layers for shape in found.values()] == [3, 2, 4, 1, 6]


@given(
    left=st.floats(0, 1e4), besides=st.floats(0, 100), per_step=st.floats(1e-3, 10), count=st.integers(1, 9),
    fewest=st.integers(1, 30), span=st.integers(0, 1000),
)  # fmt: skip
def test_steps_fill_the_time_that_is_left_and_no_more(left, besides, per_step, count, fewest, span):
    done = 20
    trials = [trial(str(i), 1, seconds=besides + done * per_step, step_seconds=per_step) for i in range(count)]
    steps = affordable_steps(left, trials, done, fewest=fewest, most=fewest + span)
    assert fewest <= steps <= fewest + span
    if fewest < steps:
        assert count * (steps * per_step + besides) <= left + 1e-6 * max(1, left)
    if steps < fewest + span and steps > fewest:
        assert count * ((steps + 1) * per_step + besides) >= left - 1e-6 * max(1, left)


def test_what_is_written_is_read_back(tmp_path):
    found = search_of({"a": 90.0, "b": math.pi})
    write_search(found, tmp_path)
    assert read_search(tmp_path) == found
    assert [p.name for p in tmp_path.iterdir()] == ["search.json"]


def test_a_broken_file_is_said_in_a_line(tmp_path):
    (tmp_path / "search.json").write_text("{}")
    with pytest.raises(UserError, match="target: field required"):
        read_search(tmp_path)


@pytest.fixture
def space(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workspace.write(workspace.PRESETS["tiny"])
    return tmp_path


def test_a_dry_run_says_what_would_be_tried(space):
    result = CliRunner().invoke(
        app, ["search", "--layers", "1,2", "--widths", "128", "--against", "tiny-3x256", "--dry-run"]
    )
    assert result.exit_code == 0, result.output
    assert "1 x 128, 2 x 128" in result.stdout
    assert not (space / "runs").exists()


def write_head(folder: Path, target: Path, vocab: int) -> None:
    config = eagle.head_config(target, None, vocab)
    weights = {name: 0.02 * torch.randn(size) for name, size in config.sizes().items()}
    folder.mkdir()
    head = eagle.Head(config=config, weights=weights, ids=torch.arange(vocab), embedding=None)
    eagle.write(folder, head, "native", target=target, k=3)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("--against head", "--against: "),  # of another target
        ("--against nowhere", "--against: "),
        ("--outputs told", "--outputs: "),  # without probabilities
        ("--outputs nowhere", "--outputs: "),
        ("--prompt-file nowhere", "--prompt-file: "),
        ("--data nowhere", "--data: "),
        ("--source nowhere", "--source: "),
        ("--target nowhere", "--target: "),
        ("--layers 99", "--layers 99"),
        ("--vocab 9999", "--vocab 9999"),
        ("--minutes 0", "--minutes 0"),
        ("--parallel --k 1", "--parallel"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_is_claimed(space, family_dirs, words, option):
    write_head(space / "head", family_dirs["llama"], 307)
    if "told" in words:
        answers = {"use": "replay", "target": "tiny", "data": "stdlib", "num_prompts": 2, "max_new_tokens": 4}
        COMMANDS["outputs build"](**answers, out=Path("told"))
    result = CliRunner().invoke(app, ["search", "--layers", "1,2", *words.split()])
    assert result.exit_code == 1
    assert f"error: {option}" in result.output
    assert not (space / "runs").exists()


@pytest.mark.parametrize(("gain", "changed", "pays"), [(1.2, False, True), (0.85, False, False), (1.2, True, False)])
def test_no_draft_is_a_row_and_wins_where_no_draft_is_faster(gain, changed, pays):
    found = search_of({"a": 120, "b": 110})
    spread = Interval(value=gain, low=gain, high=gain, n=8)
    measured = [
        Measured(name=name, k=2, length=2.0, tokens_per_second=100 * gain, gain=spread, changed=changed)
        for name in ("a", "b")
    ]
    found = found.model_copy(update={"measured": measured})
    assert found.explain()[0].startswith("No draft is faster") != pays
    table = rendered(_rung_table(found), 120)
    assert ("* a " in table, "* no draft" in table) == (pays, not pays)
    assert "1.00x, 100 tokens/s" in table


def test_a_draft_that_changes_what_is_written_is_named():
    found = search_of({"a": 120, "b": 110})
    gain = Interval(value=1.2, low=1.1, high=1.3, n=8)
    measured = [
        Measured(name=name, k=2, length=2.0, tokens_per_second=rate, gain=gain, changed=name == "a")
        for name, rate in (("b", 110), ("a", 121))
    ]
    text = found.model_copy(update={"measured": measured}).explain()
    assert text[-1].endswith("do not count: a.") or text[-1].endswith("does not count: a.")


@pytest.mark.slow
def test_a_killed_search_goes_on_and_ends_with_a_draft(space, monkeypatch):
    words = (
        "search --minutes 0.1 --layers 1,2 --widths 64,128 --against tiny-3x256 --first-steps 2 --k 1-2 --threads 1 "
        "--out found --json --against head"
    )
    write_head(space / "head", hub.locate("tiny"), 4096)
    arguments = words.split()
    start = time.time()
    with monkeypatch.context() as patched:
        patched.setattr(Searcher, "measure", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert CliRunner().invoke(app, arguments).exit_code == 130
    state = space / ".found.state"
    made = {file: file.stat().st_mtime_ns for file in state.glob("rung-*/*/model.safetensors")}
    assert made
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = read_search(space / "found")
    assert {one.name for one in found.measured} >= {"tiny-3x256", "eagle:heads=head"}
    trials = [trial for rung in found.rungs for trial in rung.trials if trial.name == "eagle:heads=head"]
    assert all(t.model_copy(update={"promise": trials[0].promise}) == trials[0] for t in trials)  # replayed once
    assert len(trials) == len(found.rungs)
    assert found.measured == sorted(found.measured, key=lambda one: (one.changed, -one.gain.value))
    assert [one.ratio_to_fastest is None for one in found.measured] == [i == 0 for i in range(len(found.measured))]
    assert json.loads(result.stdout)["measured"][0]["name"] == found.winner.name
    assert (space / "found" / "draft" / "config.json").exists()
    assert {read_score(score).conditions.mode for score in (space / "found" / "score").glob("*/")} == {"native"}
    assert 0 < found.spent_seconds < time.time() - start
    assert not state.exists()
