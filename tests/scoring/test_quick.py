"""A quick score predicts what it does not time: its counts are those of live decoding, and its winner was timed."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import made_fixture, refused, space_fixture  # noqa: F401
from helpers.scores import generation, prediction
from helpers.small_files import write_rows
from helpers.typed import call

from draftlab import intervals
from draftlab.engine.generate import Step
from draftlab.results.ranking import rank
from draftlab.results.score import read_score
from draftlab.scoring.journal import Journal, Memo
from draftlab.scoring.prediction import finalists, gains, k_without
from draftlab.scoring.quick import QuickTiming
from draftlab.scoring.throughput import PLAIN, Run, TimedStep

pytestmark = pytest.mark.usefixtures("space")
WORDS = [f"{start}{end}" for start in ("al", "be", "ga", "de") for end in ("pha", "ta", "mma", "lta")]
DRAFTERS = "--drafter latest-lookup --drafter prompt-lookup"


@pytest.fixture
def asked(space, made):
    prompts = [{"prompt": " ".join(WORDS[i : i + 4] * 3)} for i in range(10)]
    write_rows(space / "prompts.jsonl", prompts)
    draft = made / "runs/prune-2x32"
    return (
        f"score --draft {draft} {DRAFTERS} --prompt-file prompts.jsonl --max-new-tokens 24 "
        "--k 1-3 --mode eager --dtype float32 --threads 1"
    )


def scores(out: str) -> dict:
    return {path.parent.name: read_score(path) for path in sorted(Path(out).rglob("score.json"))}


def test_predicted_counts_are_those_of_live_decoding(asked):
    call(f"{asked} --out quick")
    call(f"{asked} --exhaustive --repeats 1 --out whole")
    quick, whole = scores("quick"), scores("whole")
    assert quick.keys() == whole.keys()
    for name, each in quick.items():
        assert each.ks == whole[name].ks == [1, 2, 3]
        for k in each.ks:
            live, expected = whole[name].acceptance(k), each.acceptance(k)
            assert expected.acceptance_histogram == pytest.approx(live.acceptance_histogram)
            assert expected.num_draft_tokens == pytest.approx(live.num_draft_tokens)
            assert each.tokens_per_pass(k) == pytest.approx(whole[name].tokens_per_pass(k))


def test_a_parallel_draft_is_predicted_at_once_and_a_token_at_a_time(asked, made):
    training = "--steps 2 --batch-size 2 --seq-len 16 --training-dtype float32"
    draft = made / "runs/prune-2x32"
    call(f"distill --student parallel:tokens=3 --draft {draft} {training} --out at-once")
    drafters = "--draft at-once --drafter model:draft=at-once"
    call(f"{asked} {drafters} --out quick")
    call(f"{asked} {drafters} --exhaustive --repeats 1 --out whole")
    quick, whole = scores("quick"), scores("whole")
    assert {"at-once", "model:draft=at-once"} < set(quick)
    for name, each in quick.items():
        for k in each.ks:
            live, expected = whole[name].acceptance(k), each.acceptance(k)
            assert expected.acceptance_histogram == pytest.approx(live.acceptance_histogram)


@pytest.mark.parametrize("rule", ["", "--rule match"])
def test_sampled_texts_are_predicted_and_timed_too(asked, rule):
    """The target's text is likelier to be accepted than a text that it would not write."""
    call(f"{asked} --temperature 0.8 {rule} --out quick")
    for each in scores("quick").values():
        assert each.equal_texts is None
        for k in each.ks:
            found = each.acceptance(k)
            assert 0 <= found.draft_acceptance_rate <= 1
            assert found.num_spec_steps <= sum(each.prediction.tokens)
        assert each.prediction.error is not None


def test_a_row_without_a_time_never_wins_and_says_so(asked):
    found = call(f"{asked} --out quick")
    quick = scores("quick")
    first, *others = rank(list(quick.values()))
    assert first.score.timed
    assert first.score.identical
    for each in quick.values():
        assert set(each.ks) == {1, 2, 3}
        assert each.timed == any(each.speculative.values())
        assert each.is_timed(each.best_k) == each.timed
        # each conversation was timed at one K
        if each.timed:
            prompts = [run.prompt for runs in each.speculative.values() for run in runs]
            assert sorted(prompts) == sorted(run.prompt for run in each.plain)
    rows = json.loads(call("report quick --json").stdout)
    assert rows["groups"][0]["ranking"][0]["timed"]
    if not all(each.timed for each in quick.values()):
        assert "not timed" in found.stdout
        assert not others[-1].score.timed
        assert others[-1].ratio_to_fastest is None


def test_min_speedup_times_every_draft(asked):
    call(f"{asked} --min-speedup 1000 --out quick", code=3)
    assert all(each.timed for each in scores("quick").values())


def test_an_interrupted_score_goes_on_from_what_it_timed(asked, space):
    """The state of the interrupted run is made here: a score whose last lines are taken away."""
    from draftlab.runs.atomic import state_directory
    from draftlab.scoring import run

    asked += " --num-prompts 8"  # a single look
    kept = space / "kept"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "remove_state", lambda state: state.rename(kept))
        call(f"{asked} --out first")
    first = scores("first")["latest-lookup"]
    state = state_directory(space / "first")
    (space / "first").rename(space / "before")
    kept.rename(state)
    lines = (state / "timed-b1.jsonl").read_text().splitlines()
    (state / "timed-b1.jsonl").write_text("\n".join(lines[:-3]) + '\n{"place": ["", 0')
    with pytest.MonkeyPatch.context() as patch:  # its predictions are not made again
        patch.setattr(QuickTiming, "_predictions", None)
        said = call(f"{asked} --out first").stderr
    again = scores("first")["latest-lookup"]
    assert "going on" in said
    assert not state.exists()
    assert again.conversations == first.conversations
    same = [a == b for a, b in zip(first.plain, again.plain, strict=True)]
    assert sum(same) >= len(same) - 3  # those that were complete keep their times
    assert not all(same)


def test_a_time_that_is_too_short_for_the_texts_names_what_they_need(asked):
    assert "--minutes" in refused(f"{asked} --minutes 0.0001 --out short")
    assert not Path("short").exists()


def test_a_time_that_ends_early_keeps_what_was_timed(asked, monkeypatch):
    monkeypatch.setattr(QuickTiming, "_time_is_over", property(lambda self: True))
    said = call(f"{asked} --minutes 60 --out ended").stderr
    found = next(each for each in scores("ended").values() if each.timed)
    assert found.conversations == 1
    assert "time is over" in said
    assert found.undecided is not None


def test_k_is_chosen_on_other_conversations_and_near_drafts_are_timed():
    found = prediction(k1=[1.0, 0.9, 0.9], k2=[0.2, 1.0, 1.0])
    assert found.best_k == 2
    assert k_without(found, [True, False, False]) == 1
    assert k_without(found, [False, True, False]) == 2
    assert k_without(found, [True, True, True]) == 2  # no other conversation is left
    many = {
        "fast": prediction(k1=[0.5] * 4),
        "near": prediction(k1=[0.56] * 4),
        "far": prediction(k1=[0.6] * 4),
    }
    assert finalists(gains(many, [0, 1, 2, 3])) == ["fast", "near"]


def test_a_swap_is_the_ratio_of_predicted_seconds_at_the_two_k(asked):
    """Without conversation 0, K = 1 is faster for all others; the score timed the others at K = 2."""
    call(f"{asked} --out quick")
    score = next(each for each in scores("quick").values() if each.timed)
    n = len(score.prompts)
    one, two = [1.0] + [0.9] * (n - 1), [0.05] + [0.95] * (n - 1)
    runs = [generation(prompt=i, drafted=[1], accepted=[1]) for i in range(n)]
    known = prediction(k1=one, k2=two)
    changed = score.model_copy(
        update={
            "plain": runs,
            "other_plain": {},
            "speculative": {1: runs[:1], 2: runs[1:]},
            "prediction": known,
            "prompts": [p.model_copy(update={"conversation": i}) for i, p in enumerate(score.prompts)],
        }
    )
    swaps = changed.timings([1, 2]).swaps
    assert swaps is not None
    others = swaps[0, 0, 1:]
    assert others == pytest.approx(np.full(n - 1, 0.9 / 0.95))
    assert swaps[0, 1, 2:] == pytest.approx(np.ones(n - 2))
    assert changed.best_k_speedup.n == n
    assert isinstance(changed.best_k_speedup, intervals.Interval)


def run_of(prompt: int) -> Run:
    step = Step(
        row=0,
        drafted=1,
        accepted=1,
        tokens=[5, 6],
        draft_seconds=0.1,
        verify_seconds=0.2,
        host_seconds=0.3,
    )
    return Run(prompt, TimedStep(step, 1), [TimedStep(step, 2, 0.5)])


def test_a_journal_of_another_machine_or_build_is_left_and_named(tmp_path, capsys):
    file, here = tmp_path / "timed.jsonl", {"processor": "this", "torch": "2.13"}
    journal = Journal(file, here)
    journal[PLAIN, 0, 3] = [run_of(3)]
    journal[("draft", 2), 0, 3] = [run_of(3)]
    again = Journal(file, here)
    assert dict(again) == dict(journal)
    other = Journal(file, here | {"torch": "2.15"})
    assert not other
    assert "torch" in capsys.readouterr().err
    other[PLAIN, 0, 1] = [run_of(1)]
    assert dict(Journal(file, here | {"torch": "2.15"})) == dict(other)
    assert not Journal(tmp_path / "none.jsonl", here)


def test_a_memo_counts_only_on_its_machine_and_whole(tmp_path):
    file, here = tmp_path / "memo.json", {"processor": "this"}
    memo = Memo(file, here)
    assert memo.read() is None
    memo.write([1, {"a": 2}])
    assert Memo(file, here).read() == [1, {"a": 2}]
    assert Memo(file, {"processor": "other"}).read() is None
    file.write_text(file.read_text()[:-5])
    assert Memo(file, here).read() is None
