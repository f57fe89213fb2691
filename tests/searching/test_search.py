"""A search keeps what is promising within its time, goes on where it stopped, and its words are its numbers."""

import json
import time
from pathlib import Path

import pytest
from helpers.scores import rendered
from helpers.typed import call

from draftlab import shipped
from draftlab.commands import COMMANDS
from draftlab.commands.search import _rung_table
from draftlab.intervals import Interval
from draftlab.model.families import presets, shape_name
from draftlab.model.shape import Shape, check, check_within, resolve
from draftlab.results.score import Seconds, read_score
from draftlab.runs import workspace
from draftlab.searching.run import Searcher, default_depths, default_widths
from draftlab.searching.schedule import (
    MAX_PASS_SHARE,
    REPLAYED_TEXTS,
    MeasuredDraft,
    NoCheapShape,
    Rung,
    Search,
    ShapeTrial,
    candidates,
    count_in_time,
    read_search,
    remaining_rejections,
    write_search,
)
from draftlab.target_outputs.store import read_manifest

NAMED = presets(shipped.folder("widths"))
TINY = NAMED["tiny-16x256"]


def trial(name: str, rejection: float = 0.5) -> ShapeTrial:
    return ShapeTrial(
        name=name,
        k=2,
        length=2.0,
        tokens_per_second=100,
        speedup=1.2,
        draft_ms=1.0,
        rejection=rejection,
        promise=100,
    )


def search_of(gain: float = 1.2, changed: tuple[str, ...] = (), seconds: Seconds = "wall") -> Search:
    measured = [
        MeasuredDraft(
            name=name,
            k=2,
            length=2.0,
            tokens_per_second=100 * gain,
            seconds=seconds,
            gain=Interval(value=gain, low=gain - 0.1, high=gain + 0.1, n=8),
            changed=name in changed,
        )
        for name in ("a", "b")
    ]
    rung = Rung(steps=20, trials=[trial("a"), trial("b")])
    shapes = {"a": TINY, "b": TINY}
    return Search(target="t", source="s", shapes=shapes, spent_seconds=60, rungs=[rung], measured=measured)


def pass_ms(shape: Shape) -> float:
    return 0.3 + 0.1 * shape.layers + shape.params() / 1e7


@pytest.mark.parametrize("name", ["tiny-16x256", "llama-3.1-8b"])
def test_candidates_can_be_cut_and_are_cheap_enough(name):
    source = NAMED[name]
    target_ms = pass_ms(source)
    tried = [resolve(source, layers=n, hidden=w) for n in default_depths(source) for w in default_widths(source)]
    found = candidates(source, tried, pass_ms, target_ms, MAX_PASS_SHARE)
    assert len(found) >= 6
    for label, shape in found.items():
        check(shape)
        check_within(shape, source)
        assert label == shape_name(shape)
        assert pass_ms(shape) <= MAX_PASS_SHARE * target_ms


def test_a_target_that_no_draft_is_cheap_beside_is_refused():
    tried = [resolve(TINY, layers=n) for n in (8, 12)]
    with pytest.raises(NoCheapShape):
        candidates(TINY, tried, pass_ms, pass_ms(TINY) / 10, MAX_PASS_SHARE)


def test_drafts_are_measured_on_as_many_prompts_as_the_time_allows(capsys):
    counts = [count_in_time(seconds, 13.0, (4, 16), "on") for seconds in (-5, 100, 10_000)]
    assert counts == [4, 7, 16]
    assert capsys.readouterr().err.count("not on 16") == 2


def test_the_share_of_rejections_that_a_rung_leaves_is_their_median_and_never_above_1():
    cuts = Rung(steps=0, trials=[trial(name) for name in "abc"])
    assert remaining_rejections(None, {"a": 0.4}) == 1
    assert remaining_rejections(cuts, {"a": 0.4, "b": 0.3, "c": 0.45}) == pytest.approx(0.8)
    assert remaining_rejections(cuts, {"a": 0.9, "b": 0.9}) == 1


def test_candidates_of_middling_cost_come_first():
    tried = [resolve(TINY, layers=n) for n in (1, 2, 3, 4, 6)]
    found = candidates(TINY, tried, lambda shape: float(shape.layers), 100, MAX_PASS_SHARE)
    assert [shape.layers for shape in found.values()] == [3, 2, 4, 1, 6]


def test_what_is_written_is_read_back(tmp_path):
    write_search(search_of(), tmp_path)
    assert read_search(tmp_path) == search_of()


@pytest.fixture
def space(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workspace.write(workspace.PRESETS["tiny"])
    return tmp_path


def test_outputs_without_probabilities_cannot_be_searched_with(space):
    answers = {"target": "tiny", "data": "stdlib", "num_prompts": 2, "max_new_tokens": 4}
    COMMANDS["outputs build"](**answers, use="replay", out=Path("told"))
    result = call("search --layers 1,2 --outputs told", code=1)
    assert "error: --outputs: " in result.output
    assert not (space / "runs").exists()


@pytest.mark.parametrize(
    ("gain", "changed", "pays"),
    [(1.2, (), True), (0.85, (), False), (1.2, ("a", "b"), False), (1.2, ("b",), True)],
)
def test_no_draft_is_a_row_and_wins_where_no_draft_is_faster(gain, changed, pays):
    found = search_of(gain, changed)
    assert found.pays == pays
    table = rendered(_rung_table(found), 120)
    assert ("* a " in table, "* no draft" in table) == (pays, not pays)
    assert len(found.explain()) == 1 + (not pays) + bool(changed)


@pytest.mark.parametrize(("seconds", "said"), [("cpu", True), ("wall", False)])
def test_a_search_says_which_seconds_it_counts(seconds, said):
    found = search_of(seconds=seconds)
    texts = [rendered(_rung_table(found), 120), *found.explain()]
    assert ["tokens per CPU second" in text for text in texts] == [said] * 2


@pytest.mark.slow
def test_a_killed_search_resumes_and_makes_nothing_twice(space, monkeypatch):
    sizes = "--layers 1,2 --widths 64,128 --first-steps 2 --k 1-2"
    typed = f"search --minutes 0.1 {sizes} --threads 1 --out found"
    start = time.time()
    with monkeypatch.context() as patched:
        patched.setattr(Searcher, "_measure", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        call(typed, code=130)
    state = space / ".found.state"
    files = state.glob("rung-*/*/model.safetensors")
    made = {file.parent.name: file.stat().st_mtime for file in files}
    assert made
    result = call(f"{typed} --json")
    found = read_search(space / "found")
    ranked = sorted(found.measured, key=lambda each: (each.changed, -each.gain.value))
    assert found.measured == ranked
    assert json.loads(result.stdout)["measured"][0]["name"] == found.winner.name
    assert (space / "found/draft/model.safetensors").stat().st_mtime == made[found.winner.name]
    scores = map(read_score, (space / "found/score").glob("*/"))
    assert {score.conditions.mode for score in scores} == {"native"}
    assert 0 < found.spent_seconds < time.time() - start
    assert read_manifest(space / "found/texts").sequences == REPLAYED_TEXTS[0]
    assert not state.exists()
