"""A short part of the campaign of faults: three commands, one fault of every kind; and the campaign notices damage."""

import json
from pathlib import Path

import pytest
from campaign import COMMANDS, MEASURED, PRINTING, UNFELT, UNTRIED, WITHOUT_OUT, Campaign, Result, table
from faults import CRASHED, Fault, digest, left_overs, run


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("chaos"), ["prune", "distill"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["crash", "torn", "full"])
def test_distill_survives_a_fault_in_its_middle(campaign, kind):
    middle = campaign.changes["distill"] // 2
    assert campaign.attempt("distill", Fault(kind, middle, 100 if kind != "crash" else 0)) == "passed"


@pytest.mark.slow
def test_of_a_pair_one_wins(campaign):
    assert campaign.pair("prune", 10) == "passed"


@pytest.mark.slow
def test_what_is_left_is_seen(campaign, tmp_path, monkeypatch):
    (tmp_path / ".prune.new").mkdir()
    assert left_overs(tmp_path) == [".prune.new"]
    with campaign.room() as room:
        ended = run(campaign.arguments("prune"), room, Fault("crash", campaign.changes["prune"] - 2))
        assert ended.code == CRASHED
        assert left_overs(room)


@pytest.mark.slow
def test_a_fault_that_changes_the_output_is_seen(campaign, monkeypatch):
    monkeypatch.setitem(campaign.wholes, "prune", {})
    assert campaign.attempt("prune", Fault("crash", 1)).startswith("other files: ")


def test_digests_leave_out_times_only(tmp_path):
    for name, seconds, value in (("a", 1.0, 1), ("b", 2.0, 1), ("c", 1.0, 2)):
        (tmp_path / name).mkdir()
        Path(tmp_path / name / "x.json").write_text(json.dumps([{"seconds": seconds, "value": value}]))
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")


def test_the_campaign_knows_every_command_that_writes():
    from draftlab.commands import COMMANDS as ALL
    from draftlab.config.base import OutputConfig
    from draftlab.recipe import run

    tried, every = {first for first, *_ in COMMANDS.values()}, {*ALL, run.name}
    assert tried | set(UNTRIED) | PRINTING == every
    assert not tried & set(UNTRIED)
    assert not {name for name in PRINTING if issubclass(ALL[name].config, OutputConfig)}
    assert set(MEASURED) | set(WITHOUT_OUT) <= set(COMMANDS)


def test_the_table_counts_what_was_tried():
    done = [
        Result("prune", "crash", 3, 0, "passed"), Result("distill-ce", "crash", 4, 0, "traceback: x"),
        Result("prune", "crash", 9, 0, UNFELT),
        Result("readers", "damaged file", 0, 250, "3: hang\n9: silent", 250),
    ]  # fmt: skip
    assert table(done).splitlines()[2:] == [
        "| crash | 3 | 1 | 1 |", "| damaged file | 250 | 0 | 2 |", "distill-ce, crash 4 0: traceback: x",
        "readers, damaged file 0 250: 3: hang", "9: silent",
    ]  # fmt: skip
