"""The target of the heads in these tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def target(family_dirs: dict[str, Path]) -> Path:
    return family_dirs["llama"]
