"""A short part of the campaign of faults: two commands, one fault of every kind; and the campaign notices damage."""

import json
from pathlib import Path

import pytest
from campaign import COMMANDS, Campaign, table
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
    (tmp_path / ".prune.writing-x").mkdir()
    assert left_overs(tmp_path) == [".prune.writing-x"]
    with campaign.room() as room:
        ended = run(campaign.arguments("prune", "out"), room, Fault("crash", campaign.changes["prune"] - 2))
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

    tried = {first for first, *_ in COMMANDS.values()}
    writing = {name for name, command in ALL.items() if issubclass(command.config, OutputConfig)}
    # measured times decide what these write, or they need a server, an lm-eval task or a GPU
    untried = {"accuracy", "law", "profile", "score", "score-servers", "search", "outputs import", "online update"}
    later = {"eagle", "medusa", "prune-masks", "report", "expand"}
    assert writing - tried <= untried | later
    assert table([]) == "| fault | tried | passed |\n|---|---:|---:|"
