"""Every ranking has one baseline, and no number compares two of them except tokens per second of the same load."""

import json
import re

import pytest
from helpers.scores import BUSY, IDLE, Page, change, conditioned, kept, plain, score
from helpers.typed import call

from draftlab.errors import UserError
from draftlab.results.ranking import grouped, overall, rank
from draftlab.results.report import html, json_rows, markdown, overall_lines, ranking_table
from draftlab.results.score import Environment, Score

PROMPTS = 12
# plain decoding of `score` takes 0.6 s for 15 tokens, after a prefill of 0.04 s: 25 tokens/s of whole requests
FLOAT, ROUNDED = 25.0, 37.5


def rounded(name: str = "a@int8", speed: float = 1.4) -> Score:
    """Return the target in int8 alone makes 37.5 tokens/s, 1.5 times the 25 of float32; the draft makes 50 * speed."""
    quick = [plain(i, 0.4) for i in range(PROMPTS)]
    other = {"float32": [plain(i, 0.6) for i in range(PROMPTS)]}
    base = change(score(name, speed=speed), plain=quick, other_plain=other, environment=IDLE)
    return conditioned(base, target_weights="int8")


def local(name: str, speed: float = 1.0, **fields: object) -> Score:
    return conditioned(change(score(name, speed=speed), environment=IDLE), **fields)


def machine(name: str) -> Environment:
    return IDLE.model_copy(update={"processor": name})


APART = [
    {"device": "another GPU"},
    {"threads": 4},
    {"mode": "native"},
    {"dtype": "bfloat16"},
    {"batch": 4},
    {"target_weights": "bfloat16"},
    {"selection": "f" * 64},
    {"temperature": 0.7},
    {"max_tokens": 32},
]


@pytest.mark.parametrize("fields", APART, ids=str)
def test_scores_that_differ_in_what_decides_the_baseline_are_never_ranked_together(fields):
    pair = [local("a"), local("b", **fields)]
    assert [[s.name for s in group.scores] for group in grouped(pair)] == [["a"], ["b"]]
    with pytest.raises(UserError):
        rank(pair)


def test_another_processor_and_another_checkpoint_are_other_groups():
    elsewhere = change(local("b"), environment=machine("q"))
    trained = change(local("b"), target=change(local("b").target, sha256="0" * 64))
    assert len(grouped([local("a"), elsewhere, trained])) == 3


@pytest.mark.parametrize("fields", [{"draft_weights": "int8"}, {"rule": "other"}, {"repeats": 3}, {"context": 9}])
def test_conditions_of_the_draft_alone_leave_one_ranking(fields):
    (group,) = grouped([local("a"), local("b", 0.5, **fields)])
    assert (group.name, group.ranking[1].significant) == ("", True)


def test_a_group_has_a_plain_row_for_each_precision_and_one_baseline():
    whole, both = grouped([local("a"), rounded()])
    assert [(row.name, row.speedup) for row in whole.plain] == [("no draft, float32", 1)]
    assert [row.tokens_per_second for row in both.plain] == pytest.approx([ROUNDED, FLOAT])
    rows = [(row.name, row.speedup) for row in both.plain]
    assert rows == [("no draft, int8", 1), ("no draft, float32", pytest.approx(FLOAT / ROUNDED))]
    assert (whole.baseline, both.baseline) == ("float32", "int8")
    for group in (whole, both):
        names = [row[0] for row in ranking_table(group).rows]
        assert sum(name.startswith("no draft") for name in names) == len(group.plain)
        assert f"Baseline: no draft, {group.baseline}" in ranking_table(group).caption


def test_columns_have_one_order_wherever_the_plain_row_is():
    (first, second) = (ranking_table(*grouped([local("a", speed)])).titles for speed in (1, 0.4))
    assert first == second


def test_int8_whose_fastest_plain_decoding_is_another_has_another_baseline():
    """The target's weights are the same, but the speed-ups of one are over int8."""
    drafted = change(rounded("b"), plain=rounded().other_plain["float32"])
    drafted = change(drafted, other_plain={"int8": rounded().plain})
    drafted = conditioned(drafted, target_weights="float32")
    groups = grouped([local("a"), drafted])
    assert [group.baseline for group in groups] == ["float32", "int8"]


def test_no_output_has_a_ratio_between_groups(tmp_path):
    """By K, a gains 1.20x and 2.00x, and a@int8 1.12x and 1.87x. Between groups: 0.93x, 1.07x, 1.50x and others."""
    pair = [local("a"), rounded()]
    groups = grouped(pair)
    assert [row.ratio_to_fastest for group in groups for row in group.ranking] == [None, None]
    assert [row.choices for group in groups for row in group.ranking] == [1, 1]
    paths = " ".join(map(str, kept(tmp_path, *pair)))
    page = re.sub("<[^>]+>", " ", html(pair, command=""))
    for text in (page, markdown(pair), call(f"report {paths}").stdout):
        shown = set(re.findall(r"\d+\.\d\dx", text))
        assert {"2.00x", "1.87x"} <= shown <= {"2.00x", "1.87x", "1.20x", "1.12x", "1.00x", "0.67x"}
        assert "slower" not in text.replace("Not shown to be slower", "")
    heads = [ranking_table(group).titles for group in groups]
    assert not [titles for titles in heads if "relative to best" in titles]
    # each group has plots of its own, with its own names alone
    assert page.count("speed-up of whole requests, 95% interval") == len(groups)
    assert page.count("Speed-up against K: ") == len(groups)


def test_the_fastest_way_of_all_is_a_plain_row_if_no_draft_is_faster():
    groups = grouped([local("a", 0.6), rounded(speed=0.7)])  # 30 and 35 tokens/s, and 37.5 without a draft
    way = overall(groups).way
    assert way is not None
    assert (way.name, way.k, way.tokens_per_second.value) == (
        "no draft, int8",
        None,
        pytest.approx(ROUNDED),
    )
    (line,) = overall_lines(groups)
    assert "no draft, int8" in line
    assert "37.5 (37.5 to 37.5)" in line
    pair = [local("a", 0.6), rounded(speed=0.7)]
    assert line in Page(html(pair, command="")).text
    assert line in markdown(pair)
    assert overall_lines(grouped([local("a")])) == []


def test_the_fastest_way_of_all_is_a_draft_that_kept_the_output():
    lossy = change(rounded("lossy", speed=3.0), equal_texts=0.5)
    way = overall(grouped([local("a"), lossy, rounded("b", speed=1.4)])).way
    assert way is not None
    assert (way.name, way.k, way.tokens_per_second.value) == ("b", 4, pytest.approx(70))


@pytest.mark.parametrize(
    "other",
    [
        change(local("b"), environment=machine("q")),
        local("b", selection="f" * 64),
        local("b", batch=4),
        local("b", max_tokens=32),
        change(local("b", 3, mode="native"), environment=BUSY),
    ],
    ids=["machine", "prompts", "batch", "length", "doubt"],
)
def test_other_loads_and_doubts_have_no_fastest_way(other, tmp_path):
    groups = grouped([local("a"), other])
    assert len(groups) == 2
    assert overall(groups).way is None
    assert len(overall_lines(groups)) == 1
    paths = " ".join(map(str, kept(tmp_path, local("a"), other)))
    assert json.loads(call(f"report {paths} --json").stdout)["fastest"] is None


def test_cpu_seconds_and_the_clock_have_no_fastest_way():
    """On one thread of the processor CPU seconds are counted, on two the clock."""
    one, two = (local(name, device="p", threads=n) for name, n in (("a", 1), ("b", 2)))
    assert (one.seconds, two.seconds) == ("cpu", "wall")
    assert overall(grouped([one, two])).way is None
    assert overall(grouped([two, local("c", device="p", threads=4)])).way is not None


@pytest.mark.parametrize(("threads", "seconds"), [(1, "cpu"), (2, "wall")])
def test_every_output_says_which_seconds_it_counts(threads, seconds, tmp_path):
    one = local("a", device="p", threads=threads)
    (folder,) = kept(tmp_path, one)
    found = json.loads(call(f"report {folder} --json").stdout)["groups"][0]
    assert (found["seconds"], found["ranking"][0]["seconds"]) == (seconds, seconds)
    assert {row["seconds"] for row in json_rows([one])} == {seconds}
    page = Page(html([one], command="")).text.partition("Terms")[2].partition("CPU seconds")[0]
    texts = {
        "terminal": call(f"report {folder}").stdout,
        "markdown": markdown([one]),
        "page": page,
        "verdict": one.verdict(),
    }
    said = {name: "CPU" in text for name, text in texts.items()}
    assert said == dict.fromkeys(texts, seconds == "cpu")
    heads = ranking_table(grouped([one])[0]).titles
    assert ("tok/s" in heads, "TTFT, ms" in heads) == (seconds == "wall",) * 2


def test_every_ranking_must_reach_the_bar(tmp_path):
    paths = " ".join(map(str, kept(tmp_path, local("a"), rounded())))  # 2.00x and 1.87x
    call(f"report {paths} --min-speedup 1.8")
    missed = call(f"report {paths} --min-speedup 1.9", code=3).stderr
    assert [line for line in missed.splitlines() if "a@int8" in line]
    assert not [line for line in missed.splitlines() if " a:" in line]


def test_groups_in_json_have_their_own_baseline(tmp_path):
    paths = " ".join(map(str, kept(tmp_path, local("a"), rounded())))
    found = json.loads(call(f"report {paths} --json").stdout)
    rows = {group["baseline_weights"]: group for group in found["groups"]}
    assert [len(rows[name]["plain"]) for name in ("float32", "int8")] == [1, 2]
    assert [row["draft"] for name in ("float32", "int8") for row in rows[name]["ranking"]] == [
        "a",
        "a@int8",
    ]
    assert found["fastest"]["name"] == "a@int8"
    assert found["fastest"]["tokens_per_second"]["value"] == pytest.approx(70)


def test_the_fixture_makes_what_this_file_says():
    assert rounded().plain_tps == pytest.approx({"int8": ROUNDED, "float32": FLOAT})


def test_scores_without_a_recorded_selection_of_prompts_are_compared_within_their_run_only():
    """Before 2026-11-28, scores had a hash of the file of prompts and not of the prompts that were taken from it."""
    older, other = ([local(name, selection=None) for name in names] for names in (("a", "b"), ("c",)))
    (alone,) = other
    slower = [change(g, verify_seconds=2 * g.verify_seconds) for g in alone.plain]
    groups = grouped([*older, change(alone, plain=slower), local("new")])
    assert [[row.name for row in group.ranking] for group in groups] == [["a", "b"], ["c"], ["new"]]
    assert overall(groups).way is None
