"""On Windows the first line names the systems that draftlab runs on; the rest of the suite needs one of them."""

import subprocess
import sys
from pathlib import Path

import pytest

# what the standard library of Windows lacks
WINDOWS = """
import sys
sys.platform = "win32"
sys.modules |= dict.fromkeys(["resource", "fcntl", "pwd", "termios"])
import os, signal
del signal.SIGHUP, os.geteuid
"""
ENTRANCES = {
    "python -m draftlab": "import runpy; runpy.run_module('draftlab', run_name='__main__')",
    "the script draftlab": "from draftlab.__main__ import main; main()",
    "a function": "import draftlab\ntry: draftlab.prune\nexcept draftlab.UserError as error: sys.exit(str(error))",
}


@pytest.mark.parametrize("entrance", ENTRANCES.values(), ids=ENTRANCES)
def test_windows_is_one_line(entrance):
    ended = subprocess.run([sys.executable, "-c", WINDOWS + entrance], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (1, "", 1)
    assert "WSL" in ended.stderr


def test_the_script_starts_at_the_entrance_that_checks_the_system():
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'draftlab = "draftlab.__main__:main"' in project.splitlines()
