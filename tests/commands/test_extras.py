"""A command that needs a package of an extra names it; all other commands work without the extras."""

import subprocess
import sys

import pytest
from helpers.typed import call

from draftlab.errors import EXTRAS

WITHOUT = "import sys; sys.modules.update(dict.fromkeys({packages!r})); import draftlab.cli; draftlab.cli.main()"


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("matplotlib", "report", "report nothing --html x"),
        ("matplotlib", "report", "auto tiny --out x"),
        ("gguf", "gguf", "export tiny --target tiny --to gguf --out x"),
    ],
)
def test_a_missing_extra_is_one_line(package, extra, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)  # every import of it fails
    monkeypatch.delitem(sys.modules, "draftlab.results.plots", raising=False)
    failed = call(command, code=1)
    assert failed.stderr.splitlines()[-1].startswith("error: ")
    assert f"draftlab[{extra}]" in failed.stderr
    assert not (tmp_path / "x").exists()


def test_drafts_are_made_without_extras(tmp_path):
    words = "prune --source tiny --layers 2 --data stdlib --calibration-tokens 256 --out cut"
    code = WITHOUT.format(packages=list(EXTRAS))
    command = [sys.executable, "-c", code, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cut" / "model.safetensors").is_file()
