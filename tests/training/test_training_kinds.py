"""The loss and the student of docs/extending.md, outside of draftlab, go through help, errors and training."""

import json
from pathlib import Path

import pytest
from helpers.outside import draftlab, example, install


@pytest.fixture
def site(tmp_path) -> Path:
    folder = tmp_path / "site"
    install(folder, "squares-package", {"squares": example("squares")}, "draftlab.losses")
    install(folder, "quiet-package", {"quiet": example("quiet")}, "draftlab.students")
    return folder


def test_a_loss_and_a_student_from_outside_train(site, family_dirs, tmp_path):
    text = "\n\n".join(f"def f{i}(x):\n    return [x + {i}]\n" * 8 for i in range(60))
    (tmp_path / "text.txt").write_text(text)
    target = str(family_dirs["llama"])
    words = f"distill --draft {target} --target {target} --data text.txt".split()
    words += ["--steps", "2", "--batch-size", "2", "--seq-len", "32", "--out", "out", "--json"]
    for given, named in (
        (["--student", "quiet:soft=1"], "'softness'"),
        (["--student", "quiet", "--temperature", "2"], "--temperature"),
    ):
        refused = draftlab(site, *words, *given)
        assert (refused.returncode, named in refused.stderr) == (1, True), refused.stderr
    ran = draftlab(site, *words, "--student", "quiet:softness=1.5", "--loss", "0.5*squares + 0.5*fkl")
    assert ran.returncode == 0, ran.stderr
    # it is its own teacher
    assert json.loads(ran.stdout)["after"]["acceptance"] == pytest.approx(1, abs=0.01)
    record = json.loads((tmp_path / "out" / "draftlab.json").read_text())
    assert record["config"]["student"] == "quiet:softness=1.5"
