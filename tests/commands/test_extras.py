"""A command that needs a package of an extra names it; all other commands work without the extras."""

import subprocess
import sys

import pytest

from draftlab.errors import EXTRAS

WITHOUT = "import sys; sys.modules.update(dict.fromkeys({packages!r})); import draftlab.cli; draftlab.cli.main()"


def run_without(packages, *words, cwd):
    code = WITHOUT.format(packages=packages)
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=cwd, check=False
    )


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("matplotlib", ["report", "nothing", "--html", "x"]),
        ("gguf", ["export", "tiny", "--target", "tiny", "--to", "gguf", "--out", "x"]),
    ],
)
def test_a_missing_extra_is_one_line(package, words, tmp_path):
    done = run_without([package], *words, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert f"draftlab[{EXTRAS[package]}]" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "x").exists()


def test_drafts_are_made_without_extras(tmp_path):
    words = "prune --source tiny --layers 2 --data stdlib --calibration-tokens 256 --out cut"
    done = run_without(list(EXTRAS), *words.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cut" / "model.safetensors").is_file()
