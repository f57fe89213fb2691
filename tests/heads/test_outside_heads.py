"""The head of docs/extending.md, outside of draftlab, is trained, drafts losslessly, and every refusal is one line."""

import json
import tomllib
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from helpers.outside import block_of, draftlab, example, install, python

ONE_FIT = ("--steps", "2", "--batch-size", "2", "--seq-len", "32", "--device", "cpu")
SCORE = ("score", "--prompt-file", "prompts.jsonl", "--max-new-tokens", "24", "--repeats", "1")
LADDER = ("--drafter", "ladder:heads=head")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the package of the head, and text."""
    folder = tmp_path_factory.mktemp("outside")
    groups = ("draftlab.drafters", "draftlab.students")
    install(folder / "site", "ladder-package", {"ladder": example("ladder")}, *groups)
    text = "\n\n".join(f"def f{i}(x):\n    return [x + {i}]\n" * 8 for i in range(60))
    (folder / "text.txt").write_text(text)
    (folder / "prompts.jsonl").write_text('{"prompt": "def parse(line):"}\n{"prompt": "return [int(part)"}\n')
    return folder


def distill(folder: Path, target: Path, *options: str) -> CompletedProcess[str]:
    words = ("--student", "ladder", "--target", str(target), "--data", "text.txt")
    return draftlab(folder / "site", "distill", *words, *ONE_FIT, *options)


@pytest.fixture(scope="module")
def trained(folder: Path, target: Path) -> Path:
    """Return the folder after a head was trained there."""
    ran = distill(folder, target, "--out", "head")
    assert ran.returncode == 0, ran.stderr
    return folder


def test_the_guides_test_of_positions_passes_and_finds_a_wrong_one(folder):
    file = folder / "test_ladder.py"
    wrong = folder / "test_wrong.py"
    text = block_of("python", "def test_training_and_drafting_agree")
    file.write_text(text)
    wrong.write_text(text.replace("out[0, -2]", "out[0, -3]"))
    ran = python(folder / "site", "pytest", "-q", "-p", "no:cacheprovider", file.name, wrong.name)
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout


def test_the_guides_package_has_the_entry_points_that_are_tested():
    package = tomllib.loads(block_of("toml", "ladder-head"))
    groups = ("draftlab.drafters", "draftlab.students")
    assert package["project"]["entry-points"] == {group: {"ladder": "ladder"} for group in groups}
    assert package["tool"]["setuptools"]["py-modules"] == ["ladder"]


def test_without_an_entry_point_the_known_students_are_named(tmp_path):
    (tmp_path / "site").mkdir()
    refused = draftlab(tmp_path / "site", "distill", "--student", "laddr", "--target", "tiny", "--data", "stdlib")
    check_refused(refused, "there is no student 'laddr'", "known: dflash, draft, eagle,")


def check_refused(ran: CompletedProcess[str], *words: str) -> None:
    """Check that a command ends in one line that has the words."""
    line = ran.stderr.splitlines()[-1]
    assert (ran.returncode, "Traceback" in ran.stderr) == (1, False), ran.stderr
    assert all(word in line for word in words), line


def test_a_head_from_outside_is_scored(trained, target):
    options = ("--k", "1,3,9", "--dtype", "float32", "--mode", "eager", "--target", str(target))
    ran = draftlab(trained / "site", *SCORE, *options, *LADDER, "--out", "out", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads((trained / "out" / "ladder:heads=head" / "score.json").read_text())
    assert found["equal_texts"] == 1
    assert set(found["speculative"]) == {"1", "3"}  # it drafts at most three tokens
    assert sum(sum(run["drafted"]) for run in found["speculative"]["3"]) > 0


def test_more_tokens_than_the_head_drafts_are_refused(trained, target):
    refused = draftlab(trained / "site", *SCORE, *LADDER, "--target", str(target), "--k", "8,9")
    check_refused(refused, "--k 8,9", "ladder:heads=head", "3")


def test_another_target_is_refused(trained):
    check_refused(draftlab(trained / "site", *SCORE, *LADDER, "--target", "tiny"), "another target")


@pytest.mark.parametrize(("option", "value"), [("--vocab", "100"), ("--student", "ladder:layer=40")])
def test_training_that_does_not_fit_is_refused(folder, target, option, value):
    check_refused(distill(folder, target, option, value, "--dry-run"), option)


@pytest.mark.parametrize(
    "command", [["check", "--files-only"], ["export", "--to", "vllm"], [*SCORE, "--draft"]], ids=lambda c: c[0]
)
def test_a_command_that_does_not_know_the_head_says_what_to_type(trained, target, command):
    refused = draftlab(trained / "site", *command, "head", "--target", str(target))
    check_refused(refused, "head of kind ladder", "draftlab score --drafter ladder:heads=head")
