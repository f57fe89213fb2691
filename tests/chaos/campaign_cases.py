"""A short part of the campaign of faults, and its controls: it notices damage, left-overs and other files."""

import pytest
from campaign import COMMANDS, MEASURED, PRINTING, UNTRIED, WITHOUT_OUT, Campaign, judged, preload
from faults import CRASHED, Fault, left_overs, run


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
    assert not judged(campaign, 0, "prune", kind, n, 0).failed


@pytest.mark.parametrize("number", range(4))
def test_a_damaged_input_is_refused_in_one_line_or_harmless(campaign, number):
    assert campaign.damaged("distill" if number % 4 == 0 else "prune", number, 0) == "passed"


def test_left_overs_and_other_files_are_seen(campaign, monkeypatch):
    with campaign.room() as room:
        ended = run(campaign.arguments("prune"), room, Fault("crash", campaign.changes["prune"] - 2))
        assert ended.code == CRASHED
        assert left_overs(room)
    monkeypatch.setitem(campaign.wholes, "prune", {})
    assert campaign.attempt("prune", Fault("crash", 1)).startswith("other files")


def test_the_campaign_knows_every_command_that_writes():
    from draftlab.commands import COMMANDS as ALL
    from draftlab.config.base import OutputConfig
    from draftlab.recipe import RUN

    every = {*ALL, RUN.name}
    tried = {name for name in every for line in COMMANDS.values() if f"{line} ".startswith(f"{name} ")}
    assert tried | set(UNTRIED) | PRINTING == every
    assert not tried & set(UNTRIED)
    assert not {name for name in PRINTING if issubclass(ALL[name].config, OutputConfig)}
    assert set(MEASURED) | set(WITHOUT_OUT) <= set(COMMANDS)
