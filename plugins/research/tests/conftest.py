"""Fixtures of draftlab's own tests that the plug-in's tests use, and heads of the kinds that the plug-in has."""

from pathlib import Path

import pytest
from helpers.dflash_heads import written
from research_heads import DSPARK, PEAGLE, written_peagle

from draftlab_research import dspark
from tests.conftest import brief_warm_ups, family_dirs, tokenizer_dir
from tests.drafters.conftest import context, corpus, eagle_head, parallel_draft, stored
from tests.heads.conftest import target

__all__ = [
    "brief_warm_ups",
    "context",
    "corpus",
    "eagle_head",
    "family_dirs",
    "parallel_draft",
    "stored",
    "target",
    "tokenizer_dir",
]


@pytest.fixture(scope="module")
def dspark_head(family_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random DSpark head."""
    return written(tmp_path_factory.mktemp("dspark") / "head", family_dirs["llama"], DSPARK, dspark)


@pytest.fixture(scope="module")
def peagle_head(family_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random P-EAGLE head."""
    return written_peagle(tmp_path_factory.mktemp("peagle") / "head", family_dirs["llama"], PEAGLE)
