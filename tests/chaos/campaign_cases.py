"""A short part of the campaign of faults, and its controls: it notices damage, left-overs and other files."""

import json
from pathlib import Path

import pytest
from campaign import (
    COMMANDS,
    MEASURED,
    PRINTING,
    UNFELT,
    UNTRIED,
    WITHOUT_OUT,
    Campaign,
    Result,
    judged,
    preload,
    table,
)
from faults import CRASHED, Fault, digest, left_overs, run


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> Campaign:
    preload()
    return Campaign(tmp_path_factory.mktemp("chaos"), ["prune", "distill"])


@pytest.mark.parametrize("kind", ["crash", "full"])
def test_distill_survives_a_fault_in_its_middle(campaign, kind):
    middle = campaign.changes["distill"] // 2
    assert campaign.attempt("distill", Fault(kind, middle, 100)) == "passed"


@pytest.mark.parametrize(("kind", "n"), [("pair", 10), ("kill", 500)])
def test_a_rival_and_a_kill_change_no_output(campaign, kind, n):
    assert judged(campaign, 0, "prune", kind, n, 0).failures == 0


@pytest.mark.parametrize("number", range(4))
def test_a_damaged_input_is_refused_in_one_line_or_harmless(campaign, number):
    assert campaign.damaged("distill" if number % 4 == 0 else "prune", number, 0) == "passed"


def test_left_overs_and_other_files_are_seen(campaign, monkeypatch):
    with campaign.room() as room:
        ended = run(
            campaign.arguments("prune"), room, Fault("crash", campaign.changes["prune"] - 2)
        )
        assert ended.code == CRASHED
        assert left_overs(room)
    monkeypatch.setitem(campaign.wholes, "prune", {})
    assert campaign.attempt("prune", Fault("crash", 1)).startswith("other files")


def test_digests_leave_out_times_only(tmp_path):
    for name, seconds, value in (("a", 1.0, 1), ("b", 2.0, 1), ("c", 1.0, 2)):
        (tmp_path / name).mkdir()
        Path(tmp_path / name / "x.json").write_text(
            json.dumps([{"seconds": seconds, "value": value}])
        )
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")


def test_the_campaign_knows_every_command_that_writes():
    from draftlab.commands import COMMANDS as ALL
    from draftlab.config.base import OutputConfig
    from draftlab.recipe import run

    every = {*ALL, run.name}
    tried = {
        name for name in every for line in COMMANDS.values() if f"{line} ".startswith(f"{name} ")
    }
    assert tried | set(UNTRIED) | PRINTING == every
    assert not tried & set(UNTRIED)
    assert not {name for name in PRINTING if issubclass(ALL[name].config, OutputConfig)}
    assert set(MEASURED) | set(WITHOUT_OUT) <= set(COMMANDS)


def test_the_table_counts_failures():
    done = [
        Result("prune", "crash", 3, 0, "passed"), Result("distill-ce", "crash", 4, 0, "traceback: x"),
        Result("prune", "crash", 9, 0, UNFELT), Result("engine", "test", 0, 0, "FAILED a\nFAILED b", 250),
    ]  # fmt: skip
    assert table(done).splitlines()[2:4] == ["| crash | 3 | 1 | 1 |", "| test | 250 | 0 | 2 |"]
