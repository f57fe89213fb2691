"""The head of docs/extending.md, outside of draftlab, is trained, drafts losslessly, and refuses another target."""

import json
from pathlib import Path

import pytest
from helpers.outside import draftlab, example, install

ONE_FIT = ("--steps", "2", "--batch-size", "2", "--seq-len", "32", "--device", "cpu")
SCORE = ("--k", "1,3,9", "--max-new-tokens", "24", "--repeats", "1", "--dtype", "float32", "--mode", "eager")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    install(folder, "ladder-package", {"ladder": example("ladder")}, "draftlab.drafters", "draftlab.students")
    return folder


def check_refused(ran, *words):
    """Check that a command ends in one line that has the words."""
    line = ran.stderr.splitlines()[-1]
    assert (ran.returncode, "Traceback" in ran.stderr) == (1, False), ran.stderr
    assert all(word in line for word in words), line


def test_a_head_from_outside_is_trained_and_scored(site, family_dirs, tmp_path):
    text = "\n\n".join(f"def f{i}(x):\n    return [x + {i}]\n" * 8 for i in range(60))
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def parse(line):"}\n{"prompt": "return [int(part)"}\n')
    target = ("--target", str(family_dirs["llama"]))
    distill = ("distill", "--student", "ladder", *target, "--data", "text.txt", *ONE_FIT, "--out", "head")
    check_refused(draftlab(site, *distill, "--vocab", "100"), "--vocab")
    check_refused(draftlab(site, *distill, "--student", "ladder:layer=40", "--dry-run"), "ladder:layer=40", "40")
    trained = draftlab(site, *distill)
    assert trained.returncode == 0, trained.stderr
    score = ("score", "--prompt-file", "prompts.jsonl", *SCORE, "--drafter", "ladder:heads=head")
    ran = draftlab(site, *score, *target, "--out", "out", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "out" / "ladder:heads=head" / "score.json").read_text())
    assert found["equal_texts"] == 1
    assert set(found["speculative"]) == {"1", "3"}  # it drafts at most three tokens
    assert sum(sum(run["drafted"]) for run in found["speculative"]["3"]) > 0
    refused = draftlab(site, *score, *target, "--k", "8,9", "--out", "other")
    check_refused(refused, "--k 8,9", "ladder:heads=head", "3")
    check_refused(draftlab(site, *score, "--target", "tiny", "--out", "other"), "another target")
