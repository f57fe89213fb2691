"""A shelf of studies/ says what ran, when and where, as its records do."""

import json
import re
from pathlib import Path

import pytest
from helpers.pages import ROOT

from benchmarks.formats import processor
from benchmarks.pages import RECORDS

STUDIES = ROOT / "studies"
SHELVES = sorted(place for place in STUDIES.iterdir() if place.is_dir())
ROW = re.compile(r"^\| `(\w+)\.json` \| (.+) \| ([0-9a-f]{7,40}) \| (\S+) \| (.+) \|$", re.MULTILINE)


def missing(shelf: Path) -> list[str]:
    """Return what a shelf lacks: a question, an answer, or a record's command, commit, day or machine."""
    text = (shelf / "README.md").read_text()
    lacks = [] if re.match(r"# .+\?\n\n\*\*Answer\.\*\* \S", text) else ["question and answer"]
    rows = {name: cells for name, *cells in ROW.findall(text)}
    records = {file.stem: json.loads(file.read_text()) for file in shelf.glob("*.json")}
    lacks += sorted({*rows} ^ {*records})
    for name in {*rows} & {*records}:
        command, _, day, machine = rows[name]
        record = records[name]
        computed = not record.get("measured", True)
        expected = "none: computed" if computed else processor(record)
        typed = re.findall(r"`((?:draftlab|python|bash) [^`]+)`", command)
        if not typed or day != record["date"] or not machine.endswith(expected):
            lacks.append(f"{name}: {command}, {day}, {machine}")
        recipes = re.findall(r"draftlab run (\S+\.yaml)", command)
        lacks += [file for file in recipes if not (shelf / file).exists()]
    return lacks


@pytest.mark.parametrize("shelf", SHELVES, ids=lambda shelf: shelf.name)
def test_a_shelf_has_a_question_an_answer_and_its_records_commands_days_and_machines(shelf):
    assert missing(shelf) == []
    assert list(shelf.glob("*.json"))


def test_a_shelf_without_day_machine_command_or_record_is_found(tmp_path):
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    record = {"date": "2026-11-22", "cpu": "AMD EPYC (avx2)"}
    row = "| `a.json` | `draftlab score` | 1234567 | 2026-11-22 | 1 thread of AMD EPYC (avx2) |"
    head = "# Does it pay?\n\n**Answer.** Yes.\n\n"
    (shelf / "a.json").write_text(json.dumps(record))
    (shelf / "README.md").write_text(head + row)
    assert missing(shelf) == []
    for wrong in (
        row.replace("2026-11-22", "2026-11-23"),
        row.replace("2026-11-22 ", ""),
        row.replace("EPYC", "Ryzen"),
        row.replace("1 thread of AMD EPYC (avx2)", ""),
        row.replace("`draftlab score`", "by hand"),
        row.replace("score`", "run nothing.yaml`"),
        row.replace("1234567", ""),
        row.replace("a.json", "b.json"),
        "",
    ):
        (shelf / "README.md").write_text(head + wrong)
        assert missing(shelf), wrong
    (shelf / "README.md").write_text("# Does it pay?\n\n" + row)
    assert missing(shelf)


def test_every_shelf_and_every_instrument_is_listed():
    listed = re.findall(r"^\| \[([\w-]+)\]\(\1/README\.md\)", (STUDIES / "README.md").read_text(), re.M)
    assert listed == [shelf.name for shelf in SHELVES]
    text = (ROOT / "benchmarks" / "README.md").read_text()
    named = {*re.findall(r"`(\w+)`", text)}
    assert {file.stem for file in (ROOT / "benchmarks").glob("[a-z]*.py")} <= named


def test_a_record_has_one_place():
    """A page names a record by its file's name alone."""
    files = [*ROOT.glob("benchmarks/results/*.json"), *ROOT.glob("studies/*/*.json")]
    assert len(RECORDS) == len(files)


def test_pages_of_results_link_to_every_shelf_and_the_first_is_short():
    names = ("results.md", "drafters.md", "serving.md")
    pages = [(ROOT / "docs" / name).read_text() for name in names]
    for shelf in SHELVES:
        assert any(f"../studies/{shelf.name}/README.md" in page for page in pages), shelf.name
    assert len(pages[0].split()) <= 2500
