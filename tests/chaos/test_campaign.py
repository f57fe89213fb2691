"""The short part of the campaign: campaign_cases.py, in a process of its own."""

import subprocess
import sys
from pathlib import Path


def test_the_short_campaign():
    """The campaign forks, and a process that forks must have no threads, which other tests start."""
    cases = Path(__file__).with_name("campaign_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
